"""Operators that the device has kernels of its own for: what makes, views and resizes tensors, and attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

from fmstream.emulator import copies, fused, traced
from fmstream.emulator.current import current
from fmstream.emulator.generators import seeded
from fmstream.emulator.operators import enqueue, resize, run_operator
from fmstream.emulator.pinned import is_pinned, pin
from fmstream.emulator.shapes import aten
from fmstream.emulator.tensors import CPU_KEYS, is_device

KEY: Final = "PrivateUse1"
Kernel = Callable[..., Any]

FAST: Final = (
    "add.Tensor sub.Tensor mul.Tensor div.Tensor mm addmm bmm baddbmm addcmul silu gelu relu tanh sigmoid _softmax "
    "mean.dim pow.Tensor_Scalar rsqrt neg exp cos sin cat eq.Tensor lt.Tensor gt.Scalar lt.Scalar clone "
    "native_layer_norm native_group_norm _fused_rms_norm"
)
"""Registered one by one: the fallback finds its operator more slowly, and composite kernels would come first."""

VIEWS: Final = (
    "as_strided view _reshape_alias unfold set_.source_Tensor set_.source_Storage set_.source_Storage_storage_offset"
)


def overload(name: str) -> torch._ops.OpOverload:
    """The operator of a name such as "add.Tensor"."""
    packet, _, which = name.partition(".")
    found: torch._ops.OpOverload = getattr(getattr(aten, packet), which or "default")
    return found


def register(aten_library: Any, every: Any, own_library: Any) -> None:
    """Give the device its kernels."""
    every.fallback(run_operator, KEY)
    for name in FAST.split():
        aten_library.impl(name, partial(run_operator, overload(name)), KEY)
    for name in VIEWS.split():
        aten_library.impl(name, partial(overload(name).redispatch, CPU_KEYS), KEY)
    for name, kernel in KERNELS.items():
        aten_library.impl(name, kernel, KEY)
    aten_library.impl("is_pinned", is_pinned, "CPU")
    aten_library.impl("_pin_memory", pin, "CPU")
    aten_library.impl("scaled_dot_product_attention", attend_with_graph, "AutogradPrivateUse1")
    traced.register(own_library, attend, attention_shape)


def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """``torch.empty``."""
    if memory_format is None or memory_format is torch.contiguous_format:
        return current.memory.new(size, _contiguous_stride(size), dtype or torch.get_default_dtype())
    shape = torch.empty(tuple(size), device="meta", memory_format=memory_format)
    return current.memory.new(size, shape.stride(), dtype or torch.get_default_dtype())


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """``torch.empty_strided``."""
    return current.memory.new(size, stride, dtype or torch.get_default_dtype())


def _contiguous_stride(size: Sequence[int]) -> list[int]:
    stride, step = [], 1
    for length in reversed(size):
        stride.append(step)
        step *= max(length, 1)
    return stride[::-1]


def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """``tensor.record_stream``: of the whole block that it lies in."""
    allocator = current.machine.allocator
    block = allocator.block_at(tensor.data_ptr()) if tensor.numel() else None
    if block is not None:
        allocator.record_stream(block, stream.stream_id)


def copy_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``_copy_from_and_resize``."""
    if target.size() != source.size():
        target.resize_(source.size())
    return copies.copy_from(source, target)


def resize_(
    tensor: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    """``tensor.resize_``."""
    return resize(tensor, size)


def convolve(*args: Any) -> torch.Tensor:
    """``convolution_overrideable``: where PyTorch sends convolutions of devices that it does not know."""
    result: torch.Tensor = run_operator(aten.convolution.default, *args)
    return result


def convolve_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """``convolution_backward_overrideable``."""
    shape = [weight.size(1) * groups if transposed else weight.size(0)]
    result: tuple[torch.Tensor | None, ...] = run_operator(
        aten.convolution_backward.default,
        gradient,
        x,
        weight,
        shape,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        mask,
    )
    return result


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scaled dot-product attention as one kernel that keeps no scores."""
    size = (*query.shape[:-1], value.shape[-1])
    result = current.memory.new(size, _attention_stride(query, size), query.dtype)
    attention = torch.nn.functional.scaled_dot_product_attention
    generator = current.generator.fork() if dropout_p else None

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        run = partial(attention, q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        found: torch.Tensor = run() if generator is None else seeded(run, generator)
        return found

    flops = 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    reads = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
    return _launch("aten::scaled_dot_product_attention", kernel, reads, result, 0, flops // 2 if is_causal else flops)


def attention_shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """What `attend` gives, without its values."""
    size = (*query.shape[:-1], value.shape[-1])
    return torch.empty_strided(size, _attention_stride(query, size), dtype=query.dtype, device=query.device)


def multiply_grouped(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``_grouped_mm``: products in groups, which PyTorch's generic kernel would find by waiting for ``offs``."""
    size = [a.size(-2), b.size(-1)]
    if a.dim() == b.dim():
        groups = a.size(0) if a.dim() == 3 else (offs.numel() if offs is not None else 1)
        size = [groups, *size]
    result = current.memory.new(size, _contiguous_stride(size), out_dtype or a.dtype)
    places = [i for i, t in enumerate((a, b, offs, bias)) if t is not None]
    reads = [t for t in (a, b, offs, bias) if t is not None]

    def kernel(*aliases: torch.Tensor) -> torch.Tensor:
        # Device tensors must not be named in here: work that waits would keep their memory.
        args: list[torch.Tensor | None] = [None] * 4
        for place, alias in zip(places, aliases, strict=True):
            args[place] = alias
        found: torch.Tensor = aten._grouped_mm.default(*args, out_dtype)
        return found

    flops = 2 * a.numel() * b.size(-1) // (a.size(0) if a.dim() > b.dim() else 1)
    return _launch("aten::_grouped_mm", kernel, reads, result, flops, 0)


def _launch(
    name: str,
    kernel: Callable[..., torch.Tensor],
    reads: Sequence[torch.Tensor],
    result: torch.Tensor,
    gemm_flops: int,
    attention_flops: int,
) -> torch.Tensor:
    """Enqueue a kernel from ``reads``, given as CPU aliases, into ``result``."""
    for tensor in reads:
        if not is_device(tensor):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {tensor.device}")
    run = None
    if current.knowledge is None or current.knowledge.learn(reads, [result], [], overwrites=True):
        aliases, out = [current.memory.alias(t) for t in reads], current.memory.alias(result)
        run = lambda: out.copy_(kernel(*aliases))  # noqa: E731
    enqueue(name, run, reads, [result], gemm_flops=gemm_flops, attention_flops=attention_flops)
    return result


def _attention_stride(query: torch.Tensor, size: Sequence[int]) -> Sequence[int]:
    """Where heads lie between tokens in the queries, as after ``transpose(1, 2)``, they do in the result."""
    if query.dim() == 4 and not query.is_contiguous() and query.transpose(1, 2).is_contiguous():
        _, heads, tokens, width = size
        return (heads * tokens * width, width, heads * width, 1)
    return _contiguous_stride(size)


def attend_with_graph(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: Any,
    **kw: Any,
) -> torch.Tensor:
    """The same where gradients may be needed: then by operators that have them, with the scores in memory."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        math_result: torch.Tensor = aten._scaled_dot_product_attention_math.default(
            query, key, value, attn_mask, *args, **kw
        )[0]
        return math_result
    if traced.is_traced(query):
        return traced.attend(query, key, value, attn_mask, *args, **kw)
    return attend(query, key, value, attn_mask, *args, **kw)


def has_compatible_type(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Lets ``parameter.data`` be set to a tensor of another device, as between CPU and CUDA."""
    return True


KERNELS: Final[dict[str, Kernel]] = {
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "_has_compatible_shallow_copy_type": has_compatible_type,
    "record_stream": record_stream,
    "_local_scalar_dense": copies.item,
    "_copy_from": copies.copy_from,
    "_to_copy": copies.to_copy,
    "_copy_from_and_resize": copy_and_resize,
    "resize_": resize_,
    "scaled_dot_product_attention": attend,
    "_grouped_mm": multiply_grouped,
    "convolution_overrideable": convolve,
    "convolution_backward_overrideable": convolve_backward,
    "_fused_rms_norm_backward": fused.rms_norm_backward,
    "_thnn_fused_lstm_cell": fused.lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": fused.lstm_cell_backward,
    "_thnn_fused_gru_cell": fused.gru_cell,
    "_thnn_fused_gru_cell_backward": fused.gru_cell_backward,
}
