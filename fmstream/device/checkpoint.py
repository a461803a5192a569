"""Checkpoints on disk, and modules whose parameters are mapped from them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from fmstream.device.assign import assign
from fmstream.device.header import Entry, Header, read_header
from fmstream.device.mapped import MappedFile
from fmstream.errors import CheckpointError

_USUAL_NAMES = ("model", "diffusion_pytorch_model")


class Checkpoint:
    """Named tensors in one or several safetensors files.

    Attributes:
        path: what was opened: a file or an index.
    """

    def __init__(self, path: str, headers: list[Header]) -> None:
        self.path = path
        self._places: dict[str, tuple[Header, Entry]] = {}
        self._mapped: dict[str, MappedFile] = {}
        for header in headers:
            for name, entry in header.entries.items():
                if name in self._places:
                    raise CheckpointError(f"{path}: {name!r} is in {self._places[name][0].path} and in {header.path}")
                self._places[name] = header, entry

    def names(self) -> list[str]:
        """The names of all tensors, in the order of the files."""
        return list(self._places)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor mapped from its file: a page is read once it is touched, and writes never reach the file.

        Raises:
            CheckpointError: there is no such tensor, or its file was changed since it was opened.
        """
        if name not in self._places:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        header, entry = self._places[name]
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        mapped = self._mapped.get(header.path)
        if mapped is None:
            try:
                mapped = MappedFile(header.path)
            except OSError as error:
                raise CheckpointError(f"{header.path} cannot be mapped: {error.strerror or error}") from error
            if mapped.identity != header.identity:
                raise CheckpointError(f"{header.path} was changed while it was open; open it again")
            self._mapped[header.path] = mapped
        return mapped.tensor(entry.offset, entry.dtype, entry.shape)

    def load_into(
        self,
        module: nn.Module,
        strict: bool = True,
        rename: Callable[[str], str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> list[str]:
        """Make the mapped tensors the parameters and persistent buffers of a module.

        Nothing is copied, unless it is cast.  Parameters that were one object stay one; each keeps its
        ``requires_grad``.  If one side has a prefix that the other has not ("model."), it is added or taken away.

        Args:
            module: built on the meta device, or for real.
            strict: whether a tensor that the module has no place for is an error, and so is a real parameter that the
                checkpoint does not hold.  A parameter on the meta device must always be found.
            rename: gives the module's name for a checkpoint's.
            dtype: cast floating-point tensors to this type, in RAM; None leaves them as they are in the file.

        Returns:
            The module's names of the tensors that were cast.

        Raises:
            CheckpointError: names or shapes do not fit, or a part of the module is still on the meta device.
        """
        return assign(module, self.path, {name: self.tensor(name) for name in self._places}, strict, rename, dtype)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a safetensors file, an index of shards, or a folder with either; reads headers only.

    Raises:
        CheckpointError: there is nothing to open, more than one thing, or something damaged.
    """
    found = _locate(Path(path))
    if found.suffix == ".safetensors":
        return Checkpoint(str(found), [read_header(str(found))])
    return Checkpoint(str(found), _read_shards(found))


def _locate(path: Path) -> Path:
    if path.is_dir():
        return _locate_in(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.suffix not in (".safetensors", ".json"):
        raise CheckpointError(f"{path} is neither a .safetensors file nor the .json index of some; save it as one")
    return path


def _locate_in(folder: Path) -> Path:
    files = sorted(folder.iterdir())
    indices = [file for file in files if ".safetensors.index." in file.name and file.suffix == ".json"]
    singles = [file for file in files if file.suffix == ".safetensors" and "-of-" not in file.name]
    for candidates in (indices, singles):
        usual = [file for file in candidates if file.name.split(".safetensors")[0] in _USUAL_NAMES]
        plain = [file for file in usual if file.name.endswith((".safetensors", ".safetensors.index.json"))]
        for choice in (plain, usual, candidates):
            if len(choice) == 1:
                return choice[0]
        if candidates:
            names = ", ".join(file.name for file in candidates[:5])
            raise CheckpointError(f"{folder} holds {len(candidates)} checkpoints ({names}); give the path of one")
    if any(file.suffix == ".safetensors" for file in files):
        raise CheckpointError(f"{folder} holds shards without their index (*.safetensors.index.json)")
    if (folder / "model_index.json").exists():
        raise CheckpointError(f"{folder} is a whole pipeline; give one of its folders, such as {folder / 'unet'}")
    raise CheckpointError(f"{folder} holds no .safetensors file; save the weights with safe_serialization=True")


def _read_shards(index: Path) -> list[Header]:
    try:
        places = json.loads(index.read_bytes())["weight_map"]
        shards = sorted(set(places.values()))
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{index} is not an index: it has no table 'weight_map'; fetch it again") from None
    outside = [shard for shard in shards if not isinstance(shard, str) or Path(shard).name != shard]
    if outside:
        raise CheckpointError(f"{index} names {outside[0]!r}: shards must lie beside their index")
    headers: list[Header] = []
    for shard in shards:
        header = read_header(str(index.parent / shard))
        named = [name for name, place in places.items() if place == shard]
        lacking = [name for name in named if name not in header.entries]
        if lacking:
            raise CheckpointError(
                f"{header.path} lacks {len(lacking)} tensors that {index.name} places there, such as {lacking[0]!r}"
            )
        headers.append(header._replace(entries={name: header.entries[name] for name in named}))
    return headers
