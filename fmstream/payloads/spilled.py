"""Masters of RAM that are written to a file, and mapped back in their place."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fmstream.device.homes import FileHome, FileSet, MemoryHome
from fmstream.device.memory import return_free_memory
from fmstream.device.spill import SpillFile
from fmstream.payloads.master import Master

MIN_SPILL_BYTES = 4096
"""Parameters smaller than this stay in RAM when the others are spilled."""


class Spilled:
    """Masters that lie in a file of our own while their modules stream."""

    def __init__(self) -> None:
        self._file: SpillFile | None = None
        self._masters: list[tuple[Master, int]] = []
        """Each with the address at which it was mapped."""

    def take(self, masters: Iterable[Master], directory: str, files: FileSet) -> None:
        """Write those that lie in RAM to one file in ``directory``, and let it be their home.

        All are as before if this fails; ``files`` are closed then.

        Raises:
            ConfigError: the directory cannot be written, or has no room.
            OSError: the disk failed.
        """
        chosen = [m for m in masters if isinstance(m.home, MemoryHome) and m.span >= MIN_SPILL_BYTES]
        if not chosen:
            return
        spill = SpillFile(directory)
        try:
            offsets = [spill.append(m.original.data_ptr(), m.span) for m in chosen]
            spill.finish()
            file = files.open(spill.path)
            mapped = [spill.map(offset, m.span) for m, offset in zip(chosen, offsets, strict=True)]
        except BaseException:
            files.close()
            spill.close()
            raise
        self._file = spill
        with torch.inference_mode(False), torch.no_grad():
            for master, offset, flat in zip(chosen, offsets, mapped, strict=True):
                master.original.data = flat.view(master.dtype).as_strided(master.size, master.stride)
                master.take_memory()
                master.home = FileHome(file, offset, master.span)
                self._masters.append((master, master.original.data_ptr()))
        return_free_memory()

    def bring_back(self) -> None:
        """Bring them to RAM again and delete the file; what the user moved elsewhere meanwhile stays there."""
        with torch.inference_mode(False), torch.no_grad():
            for master, address in self._masters:
                if master.original.data_ptr() == address:
                    master.original.data = master.memory().clone(memory_format=torch.preserve_format)
                    master.take_memory()
        self._masters.clear()
        if self._file is not None:
            self._file.close()
            self._file = None
