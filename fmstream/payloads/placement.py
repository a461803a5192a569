"""Buffers, and parameters that are not streamed, on the device that computes with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from fmstream.payloads.kinds import is_wrapper, tensors_in


class OnDevice(torch.Tensor):
    """A buffer in the place of the user's: copies and pickles of it lie on the host, as those of parameters do."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach().to("cpu", copy=True)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().to("cpu").__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


_Outline = tuple[torch.dtype, torch.Size]


class _Placed(NamedTuple):
    """A tensor of a module, and the one on the device that stands in its place; versions are as it was put there."""

    holder: dict[str, Any]
    key: str
    original: torch.Tensor
    placed: torch.Tensor
    original_version: int
    placed_version: int
    outline: _Outline
    """The original's."""


class Placement:
    """Puts what modules hold beside streamed parameters on a device, and back again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._placed: list[_Placed] = []
        self._buffers: list[dict[str, Any]] = []
        self._parameters: list[dict[str, Any]] = []
        self._there_before: set[int] | None = None
        """``id`` of parameters that were on the device when the first module came here."""

    def place(self, modules: Iterable[nn.Module], streamed: set[int]) -> int:
        """Move buffers, and parameters whose ``id`` is not in ``streamed``; returns the bytes that were moved."""
        moved: dict[int, torch.Tensor] = {}
        num_bytes = 0
        modules = list(modules)
        self._parameters = [module._parameters for module in modules]
        if self._there_before is None:
            self._there_before = {id(p) for holder in self._parameters for p in holder.values() if self._is_here(p)}
        with torch.inference_mode(False), torch.no_grad():
            for module in modules:
                self._buffers.append(module._buffers)
                holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for holder in holders:
                    for key, tensor in holder.items():
                        if tensor is None or id(tensor) in streamed or tensor.device.type != "cpu":
                            continue
                        if id(tensor) not in moved:
                            moved[id(tensor)] = _stand_in(tensor, self._device)
                            num_bytes += tensor.numel() * tensor.element_size()
                        placed = moved[id(tensor)]
                        # Noted first, lest an interrupt between the two leave it there.
                        versions = _version(tensor), _version(placed)
                        self._placed.append(_Placed(holder, key, tensor, placed, *versions, _outline(tensor)))
                        holder[key] = placed
        return num_bytes

    def give_back(self) -> None:
        """Put the user's own tensors back, with what was written to them meanwhile.

        Buffers that a forward made are brought to the host, and parameters that the user put in meanwhile.
        """
        seen: set[int] = set()
        with torch.inference_mode(False), torch.no_grad():
            for record in reversed(self._placed):
                holder, key, original, placed, *_ = record
                if id(original) not in seen:
                    seen.add(id(original))
                    _bring_back(record)
                present = holder.get(key)
                if present is placed:
                    holder[key] = original
                elif isinstance(present, torch.Tensor) and present.device == self._device:
                    holder[key] = _on_device(present, original.device)  # a forward put another tensor there
            for holder in self._buffers:
                for key, present in holder.items():
                    if isinstance(present, torch.Tensor) and present.device == self._device:
                        holder[key] = _on_device(present, torch.device("cpu"))
            for holder in self._parameters:
                for key, present in holder.items():
                    if not self._is_here(present) or id(present) in (self._there_before or ()):
                        continue
                    if is_wrapper(present):  # its device is its own for good
                        holder[key] = _on_device(present, torch.device("cpu"))
                    else:
                        present.data = present.data.to("cpu")
        self._placed.clear()
        self._buffers.clear()
        self._parameters.clear()

    def _is_here(self, tensor: torch.Tensor | None) -> bool:
        return tensor is not None and tensor.device == self._device


def _bring_back(record: _Placed) -> None:
    """Bring what was written on the device, and a gradient, to the user's tensor."""
    original, placed = record.original, record.placed
    if placed.grad is not None:
        original.grad, placed.grad = placed.grad.to(original.device), None
    unseen = _version(placed) == record.placed_version  # but the kernels of some norms raise no version
    present = (_version(original), _outline(original))
    if unseen and _outline(placed) == record.outline and present != (record.original_version, record.outline):
        return
    _take_over(placed, original)


def _take_over(placed: torch.Tensor, original: torch.Tensor) -> None:
    if is_wrapper(original) and type(placed) is type(original):
        for there, here in zip(tensors_in(placed), tensors_in(original), strict=True):
            _take_over(there, here)
        return
    present = placed.detach().to(original.device)
    if _outline(present) != _outline(original):
        with torch.inference_mode(original.is_inference()):
            original.data = present
        return
    if not _same_bytes(present, original):
        with torch.inference_mode(original.is_inference()):
            original.detach().copy_(present)


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.layout is not torch.strided or type(left) is not torch.Tensor:
        return False
    return torch.equal(left.contiguous().flatten().view(torch.uint8), right.contiguous().flatten().view(torch.uint8))


def _outline(tensor: torch.Tensor) -> _Outline:
    return tensor.dtype, tensor.size()


def _stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    placed = _on_device(tensor, device)
    return torch.Tensor._make_subclass(OnDevice, placed) if type(placed) is torch.Tensor else placed


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    placed = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        placed = nn.Parameter(placed, tensor.requires_grad)
        for key, value in tensor.__dict__.items():
            placed.__dict__.setdefault(key, value)  # but the tensors in a wrapper are on the device by now
    return placed


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
