"""Copies between host and device, within the device, and of single values to the host."""

from __future__ import annotations

from typing import Any

import torch

from fmstream.emulator.cost import copy_seconds
from fmstream.emulator.current import current
from fmstream.emulator.dry import empty_dry, require_known
from fmstream.emulator.operators import Run, enqueue
from fmstream.emulator.pinned import empty_pinned, is_pinned
from fmstream.emulator.tensors import is_device, num_elements_spanned, span_of


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``target.copy_(source)`` where either is on the device.

    A copy from or to pinned memory of the same dtype, contiguous on both sides, is asynchronous if ``non_blocking``;
    every other copy over the link blocks the host, as on CUDA.
    """
    if not target.numel():
        return target
    on_device = is_device(source), is_device(target)
    if on_device == (True, True):
        run = _run(source, target, lambda: (current.memory.alias(source), current.memory.alias(target)))
        enqueue("aten::copy_", run, [source], [target])
    elif on_device == (False, True):
        host = source.detach()
        run = _run(source, target, lambda: (host, current.memory.alias(target)))
        _over_link("copy in", run, host, target, host, non_blocking)
    else:
        host = target.detach()
        run = _run(source, target, lambda: (current.memory.alias(source), host))
        _over_link("copy out", run, source, host, host, non_blocking)
    return target


def _run(source: torch.Tensor, target: torch.Tensor, pair: Any) -> Run | None:
    """The work of a copy; None in a dry run that does not have the values."""
    if current.knowledge is not None and not current.knowledge.learn_copy(source, target):
        return None
    read, written = pair()
    return lambda: written.copy_(read)


def _over_link(
    lane: str, run: Run | None, source: torch.Tensor, target: torch.Tensor, host: torch.Tensor, non_blocking: bool
) -> None:
    machine = current.machine
    num_bytes = target.numel() * target.element_size()
    as_it_lies = (
        source.dtype == target.dtype
        and source.size() == target.size()
        and _lie_alike(source, target)
        and is_pinned(host)
    )
    machine.submit(
        machine.current_stream,
        lane,
        lane,
        copy_seconds(machine.card, lane, num_bytes, pinned=as_it_lies),
        run,
        [span_of(source)],
        [span_of(target)],
        seen_seconds=machine.card.copy_seen_seconds,
        launch_seconds=machine.card.copy_launch_seconds,
        blocking=not (as_it_lies and non_blocking),
        num_bytes=num_bytes,
    )


def _lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one size are each a stretch of memory without gaps, in the same order."""
    if one.is_contiguous():
        return other.is_contiguous()
    dense = num_elements_spanned(one.size(), one.stride()) == one.numel()
    return dense and one.stride() == other.stride()


def to_copy(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """``tensor.to(...)`` of a device tensor.  A result on the CPU is pinned if ``non_blocking``, as on CUDA."""
    dtype = dtype or tensor.dtype
    place = torch.device(device) if device is not None else tensor.device
    kept = memory_format is None or memory_format is torch.preserve_format
    if kept and tensor.is_contiguous():
        stride = tensor.stride()
    else:
        shape = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="meta")
        stride = torch.empty_like(shape, memory_format=torch.preserve_format if kept else memory_format).stride()
    result = _place_for(tensor, stride, dtype, place, pin_memory or (place.type == "cpu" and non_blocking))
    return result.copy_(tensor, non_blocking)


def _place_for(
    tensor: torch.Tensor, stride: tuple[int, ...], dtype: torch.dtype, place: torch.device, pinned: bool
) -> torch.Tensor:
    dry = place.type == "cpu" and current.knowledge is not None and not current.knowledge.knows([tensor], [])
    if place.type == "cpu" and pinned:
        return empty_pinned(tensor.size(), stride, dtype, dry=dry)
    if dry:
        return empty_dry(tensor.size(), stride, dtype)
    return torch.empty_strided(tensor.size(), stride, dtype=dtype, device=place)


def item(tensor: torch.Tensor) -> Any:
    """The value of a tensor of one element; the host waits for it."""
    require_known(tensor, current.knowledge)
    result = torch.empty(tensor.size(), dtype=tensor.dtype, device="cpu")
    copy_from(tensor, result)
    return result.item()
