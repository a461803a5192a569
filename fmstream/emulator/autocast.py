"""``torch.autocast("emu")``: which operators cast their arguments, as on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from fmstream.emulator.tensors import NAME

KEY: Final = "AutocastPrivateUse1"
KEYS: Final = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY))

LOWER: Final = (
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution mm mv matmul "
    "linear addmm addmv addr addbmm baddbmm bmm chain_matmul linalg_multi_dot prelu scaled_dot_product_attention"
)
"""In the lower precision."""
FLOAT32: Final = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d upsample_nearest2d "
    "upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d softmax.int "
    "log_softmax.int cumprod cumsum prod prod.dim_int sum sum.dim_IntList"
)
"""In 32 bits.  (CUDA's lists are in aten/src/ATen/autocast_mode.h.)"""
WIDEST: Final = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add cat stack"
"""In the widest precision among the arguments."""


def register(aten_library: Any, every: Any) -> None:
    """Give operators their casts; the others pass through."""
    every.fallback(torch.library.fallthrough_kernel, KEY)
    for names, choose in ((LOWER, _lower), (FLOAT32, _float32), (WIDEST, _widest)):
        for name in names.split():
            packet, _, which = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), which or "default")
            aten_library.impl(name, partial(_cast, op, choose), KEY)


def _lower(args: Any) -> torch.dtype:
    return torch.get_autocast_dtype(NAME)


def _float32(args: Any) -> torch.dtype:
    return torch.float32


def _widest(args: Any) -> torch.dtype:
    wide = any(t.dtype == torch.float32 for t in _tensors(args))
    return torch.float32 if wide else torch.get_autocast_dtype(NAME)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for one in value for t in _tensors(one)] if isinstance(value, (list, tuple)) else []


def _cast(op: torch._ops.OpOverload, choose: Callable[[Any], torch.dtype], *args: Any, **kwargs: Any) -> Any:
    dtype = choose(args)
    with torch._C._ExcludeDispatchKeyGuard(KEYS):
        return op(*(_to(a, dtype) for a in args), **{name: _to(a, dtype) for name, a in kwargs.items()})


def _to(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        casts = value.is_floating_point() and value.device.type == NAME and value.dtype != torch.float64
        return value.to(dtype) if casts else value
    if isinstance(value, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in value):
        return [_to(one, dtype) for one in value]
    return value
