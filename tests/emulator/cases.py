"""Programs of a few operators, each a function of the device that it runs on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Case = Callable[[torch.device], Tensor]

_random = torch.Generator().manual_seed(0)
A: Final = torch.randn(6, 8, generator=_random)
B: Final = torch.randn(6, 8, generator=_random)
IMAGE: Final = torch.randn(2, 8, 16, 16, generator=_random)
VIDEO: Final = torch.randn(1, 4, 4, 8, 8, generator=_random)
KERNEL: Final = torch.randn(4, 8, 3, 3, generator=_random)
KERNEL3: Final = torch.randn(6, 4, 3, 3, 3, generator=_random)
HEADS: Final = torch.randn(2, 4, 10, 8, generator=_random)
FEW_HEADS: Final = torch.randn(2, 2, 10, 8, generator=_random)
INDEX: Final = torch.tensor([1, 3, 5])
SQUARE: Final = A[:, :6] @ A[:, :6].t() + 6 * torch.eye(6)


def _edited(tensor: Tensor, edit: Callable[[Tensor], object]) -> Tensor:
    fresh = tensor.clone()
    edit(fresh)
    return fresh


def _layer(module: nn.Module, x: Tensor) -> Callable[[torch.device], Tensor]:
    def run(d: torch.device) -> Tensor:
        result = copy.deepcopy(module).to(d).eval()(x.to(d))
        return result[0] if isinstance(result, tuple) else result

    return run


def _out_of_nothing(d: torch.device) -> Tensor:
    out = torch.empty(0, device=d)
    torch.add(A.to(d), B.to(d), out=out)
    return out


def _grown(d: torch.device) -> Tensor:
    x = A.to(d).flatten()
    x.resize_(60)[48:].zero_()
    return x


def _through_storage(d: torch.device) -> Tensor:
    x = A.to(d)
    return torch.empty(0, device=d).set_(x.untyped_storage(), 8, (2, 8), (8, 1)) * 2


def _dlpack(d: torch.device) -> Tensor:
    x = A.to(d).clone()
    part = torch.from_dlpack(x[1:3])
    part.mul_(2)
    return x


torch.manual_seed(0)
LSTM = nn.LSTM(8, 5)
GRU = nn.GRU(8, 5, bidirectional=True)
MHA = nn.MultiheadAttention(8, 2, batch_first=True)


def _multi_head(d: torch.device) -> Tensor:
    x = IMAGE[0].to(d)[:, :, :8]
    result: Tensor = copy.deepcopy(MHA).to(d)(x, x, x, need_weights=False)[0]
    return result


def _multi_head_at_once(d: torch.device) -> Tensor:
    x = IMAGE[0].to(d)[:, :, :8].contiguous()
    result: Tensor = copy.deepcopy(MHA).to(d).eval()(x, x, x, need_weights=False)[0]
    return result


ENCODER = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)


def _statistics(d: torch.device) -> Tensor:
    """A norm that gives new tensors and writes the running statistics that it was given."""
    mean, var = torch.zeros(8, device=d), torch.ones(8, device=d)
    weight, bias = B.to(d)[0], B.to(d)[1]
    out = torch.ops.aten._native_batch_norm_legit(IMAGE.to(d), weight, bias, mean, var, True, 0.1, 1e-5)
    return torch.cat([*(tensor.flatten() for tensor in out), mean, var])


CASES: Final[dict[str, Case]] = {
    # elementwise
    "add scalar": lambda d: A.to(d) + 1.5,
    "add integer to float": lambda d: A.to(d) + 1,
    "add float to integer": lambda d: INDEX.to(d) + 0.5,
    "add alpha": lambda d: torch.add(A.to(d), B.to(d), alpha=2),
    "subtract": lambda d: 1 - A.to(d),
    "multiply broadcast": lambda d: A.to(d) * B.to(d)[:1],
    "multiply by a scalar tensor": lambda d: A.to(d) * torch.tensor(3.0),
    "divide": lambda d: A.to(d) / (B.to(d) + 10),
    "floor divide": lambda d: INDEX.to(d) // 2,
    "remainder": lambda d: INDEX.to(d) % 3,
    "power": lambda d: A.to(d) ** 2,
    "power of tensors": lambda d: A.to(d).abs() ** B.to(d),
    "square root": lambda d: A.to(d).abs().sqrt(),
    "reciprocal root": lambda d: (A.to(d) ** 2 + 1).rsqrt(),
    "exponential": lambda d: A.to(d).exp(),
    "logarithm": lambda d: A.to(d).abs().log(),
    "sine and cosine": lambda d: A.to(d).sin() + B.to(d).cos(),
    "absolute": lambda d: A.to(d).abs(),
    "negative": lambda d: -A.to(d),
    "sign": lambda d: A.to(d).sign(),
    "round": lambda d: A.to(d).round(),
    "clamp": lambda d: A.to(d).clamp(-1, 1),
    "clamp by tensor": lambda d: A.to(d).clamp(min=B.to(d)),
    "maximum": lambda d: torch.maximum(A.to(d), B.to(d)),
    "minimum": lambda d: torch.minimum(A.to(d), B.to(d)),
    "interpolate linearly": lambda d: torch.lerp(A.to(d), B.to(d), 0.3),
    "addcmul": lambda d: torch.addcmul(A.to(d), A.to(d), B.to(d), value=0.5),
    "addcdiv": lambda d: torch.addcdiv(A.to(d), A.to(d), B.to(d) + 9),
    "where": lambda d: torch.where(A.to(d) > 0, A.to(d), torch.zeros((), device=d)),
    "where scalar": lambda d: torch.where(A.to(d) > 0, A.to(d), -1.0),
    "masked fill": lambda d: A.to(d).masked_fill(B.to(d) > 0, 7.0),
    "comparison": lambda d: (A.to(d) >= B.to(d)) & (A.to(d) != 0),
    "logical not": lambda d: ~(A.to(d) > 0),
    "is close": lambda d: torch.isclose(A.to(d), A.to(d) + 1e-9),
    "not a number": lambda d: torch.isnan(A.to(d)),
    "erf": lambda d: torch.erf(A.to(d)),
    "arctangent": lambda d: torch.atan2(A.to(d), B.to(d)),
    # activations
    "silu": lambda d: F.silu(A.to(d)),
    "gelu": lambda d: F.gelu(A.to(d)),
    "gelu tanh": lambda d: F.gelu(A.to(d), approximate="tanh"),
    "relu": lambda d: F.relu(A.to(d)),
    "leaky relu": lambda d: F.leaky_relu(A.to(d)),
    "elu": lambda d: F.elu(A.to(d)),
    "mish": lambda d: F.mish(A.to(d)),
    "sigmoid in place": lambda d: A.to(d).clone().sigmoid_(),
    "tanh": lambda d: A.to(d).tanh(),
    "softplus": lambda d: F.softplus(A.to(d)),
    "glu": lambda d: F.glu(A.to(d)),
    "hardswish": lambda d: F.hardswish(A.to(d)),
    "softmax": lambda d: A.to(d).softmax(-1),
    "softmax half to float": lambda d: A.to(d).bfloat16().softmax(-1, dtype=torch.float32),
    "log softmax": lambda d: A.to(d).log_softmax(0),
    # products
    "matrix product": lambda d: A.to(d) @ B.to(d).t(),
    "matrix vector": lambda d: A.to(d) @ B.to(d)[0],
    "dot": lambda d: torch.dot(A.to(d)[0], B.to(d)[0]),
    "batched product": lambda d: HEADS.to(d) @ HEADS.to(d).transpose(-1, -2),
    "baddbmm": lambda d: torch.baddbmm(IMAGE.to(d)[:, 0], IMAGE.to(d)[:, 1], IMAGE.to(d)[:, 2], beta=0.5),
    "addmm": lambda d: torch.addmm(A.to(d)[:, :6], A.to(d), B.to(d).t()),
    "einsum": lambda d: torch.einsum("ij,kj->ik", A.to(d), B.to(d)),
    "einsum of heads": lambda d: torch.einsum("bhqd,bhkd->bhqk", HEADS.to(d), HEADS.to(d)),
    "outer": lambda d: torch.outer(A.to(d)[0], B.to(d)[0]),
    "linear": lambda d: F.linear(A.to(d), B.to(d), torch.ones(6, device=d)),
    "linear in three dimensions": lambda d: F.linear(IMAGE.to(d)[0], KERNEL.to(d).flatten(1)[:, :16]),
    "linear in bf16": lambda d: F.linear(A.to(d).bfloat16(), B.to(d).bfloat16()).float(),
    "solve": lambda d: torch.linalg.solve(SQUARE.to(d), A.to(d)),
    "cholesky": lambda d: torch.linalg.cholesky(SQUARE.to(d)),
    # convolutions and images
    "conv1d": lambda d: F.conv1d(IMAGE.to(d)[:, :, 0], KERNEL.to(d)[:, :, 0], padding=1),
    "conv2d": lambda d: F.conv2d(IMAGE.to(d), KERNEL.to(d), padding=1),
    "conv2d with stride": lambda d: F.conv2d(IMAGE.to(d), KERNEL.to(d), torch.ones(4, device=d), stride=2),
    "conv2d in groups": lambda d: F.conv2d(IMAGE.to(d), KERNEL.to(d)[:, :4], groups=2),
    "conv2d transposed": lambda d: F.conv_transpose2d(IMAGE.to(d)[:, :4], KERNEL.to(d), stride=2),
    "conv3d": lambda d: F.conv3d(VIDEO.to(d), KERNEL3.to(d), padding=1),
    "channels last": lambda d: F.conv2d(IMAGE.to(d).to(memory_format=torch.channels_last), KERNEL.to(d)),
    "average pool": lambda d: F.avg_pool2d(IMAGE.to(d), 2),
    "max pool": lambda d: F.max_pool2d(IMAGE.to(d), 2),
    "adaptive pool": lambda d: F.adaptive_avg_pool2d(IMAGE.to(d), (3, 3)),
    "upsample nearest": lambda d: F.interpolate(IMAGE.to(d), scale_factor=2),
    "upsample bilinear": lambda d: F.interpolate(IMAGE.to(d), size=(9, 11), mode="bilinear", antialias=True),
    "upsample video": lambda d: F.interpolate(VIDEO.to(d), scale_factor=2.0, mode="trilinear"),
    "pad": lambda d: F.pad(IMAGE.to(d), (1, 2, 1, 0)),
    "pad by reflection": lambda d: F.pad(IMAGE.to(d), (1, 1, 1, 1), mode="reflect"),
    "unfold image": lambda d: F.unfold(IMAGE.to(d), 3),
    "grid sample": lambda d: F.grid_sample(
        IMAGE.to(d), IMAGE.to(d)[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False
    ),
    "pixel shuffle": lambda d: F.pixel_shuffle(IMAGE.to(d), 2),
    # norms
    "layer norm": lambda d: F.layer_norm(A.to(d), (8,), B.to(d)[0], B.to(d)[1]),
    "group norm": lambda d: F.group_norm(IMAGE.to(d), 2, torch.ones(8, device=d)),
    "batch norm": lambda d: F.batch_norm(IMAGE.to(d), torch.zeros(8, device=d), torch.ones(8, device=d)),
    "norm and statistics": _statistics,
    "instance norm": lambda d: F.instance_norm(IMAGE.to(d)),
    "rms norm": lambda d: F.rms_norm(A.to(d), (8,), B.to(d)[0]),
    "normalize": lambda d: F.normalize(A.to(d), dim=-1),
    "vector norm": lambda d: torch.linalg.vector_norm(A.to(d), dim=1),
    # reductions
    "sum": lambda d: A.to(d).sum(),
    "sum of one dimension": lambda d: A.to(d).sum(1, keepdim=True),
    "mean": lambda d: A.to(d).mean((0, 1)),
    "variance": lambda d: A.to(d).var(1),
    "deviation and mean": lambda d: torch.std_mean(A.to(d), 0)[0],
    "product": lambda d: A.to(d).prod(1),
    "largest": lambda d: A.to(d).max(1).values,
    "largest of two dimensions": lambda d: A.to(d).amax((0, 1)),
    "place of the largest": lambda d: A.to(d).argmax(-1),
    "any": lambda d: (A.to(d) > 9).any(),
    "all": lambda d: (A.to(d) < 9).all(1),
    "running sum": lambda d: A.to(d).cumsum(0),
    "running product": lambda d: A.to(d).cumprod(1),
    "logsumexp": lambda d: A.to(d).logsumexp(1),
    "top": lambda d: A.to(d).topk(3).values,
    "sort": lambda d: A.to(d).sort(descending=True).values,
    "order": lambda d: A.to(d).argsort(-1),
    "median": lambda d: A.to(d).median(1).values,
    "quantile": lambda d: torch.quantile(A.to(d), 0.3, dim=1),
    "cross entropy": lambda d: F.cross_entropy(A.to(d), INDEX.repeat(2).to(d)),
    "mean squared error": lambda d: F.mse_loss(A.to(d), B.to(d)),
    # shapes
    "cat": lambda d: torch.cat([A.to(d), B.to(d)], 1),
    "stack": lambda d: torch.stack([A.to(d), B.to(d)], 1),
    "split": lambda d: torch.cat(A.to(d).split(4, 0)[::-1]),
    "chunk": lambda d: A.to(d).chunk(2, -1)[1] * 2,
    "unbind": lambda d: A.to(d).unbind(1)[3] + 1,
    "transpose": lambda d: A.to(d).t().contiguous(),
    "permute": lambda d: IMAGE.to(d).permute(0, 2, 3, 1).reshape(2, -1),
    "expand": lambda d: A.to(d)[0].expand(5, 8) + 1,
    "repeat": lambda d: A.to(d).repeat(2, 2),
    "repeat interleaved": lambda d: A.to(d).repeat_interleave(2, 0),
    "repeat by tensor": lambda d: A.to(d)[:3].repeat_interleave(INDEX.to(d), 0),
    "roll": lambda d: IMAGE.to(d).roll(1, -1),
    "flip": lambda d: A.to(d).flip(0),
    "rotate": lambda d: torch.rot90(A.to(d)),
    "diagonal": lambda d: A.to(d).diagonal() * 2,
    "lower triangle": lambda d: torch.ones(4, 4, device=d).tril(),
    "unfold": lambda d: A.to(d).unfold(1, 4, 2) * 1,
    "as strided": lambda d: A.to(d).as_strided((3, 3), (8, 2), 1) + 0,
    "squeeze": lambda d: A.to(d).unsqueeze(1).squeeze(1).flatten().view(8, 6),
    "view as another type": lambda d: A.to(d).view(torch.int32) & 0xFF,
    "meshgrid": lambda d: torch.meshgrid(torch.arange(3, device=d), torch.arange(2, device=d), indexing="ij")[0] * 1,
    "contiguous channels": lambda d: IMAGE.to(d).contiguous(memory_format=torch.channels_last) + 0,
    # indexing
    "index": lambda d: A.to(d)[INDEX.to(d)],
    "index by host": lambda d: A.to(d)[INDEX],
    "index by mask": lambda d: A.to(d)[A.to(d) > 0],
    "nonzero": lambda d: (A.to(d) > 0).nonzero(),
    "masked select": lambda d: A.to(d).masked_select(B.to(d) > 0),
    "unique": lambda d: INDEX.repeat(3).to(d).unique(),
    "assign slice": lambda d: _edited(A.to(d), lambda t: t.__setitem__((slice(None), 2), 7.0)),
    "assign by index": lambda d: _edited(A.to(d), lambda t: t.__setitem__(INDEX.to(d), B.to(d)[:3])),
    "put": lambda d: A.to(d).clone().index_put_((INDEX.to(d),), torch.ones(8, device=d)),
    "index copy": lambda d: A.to(d).clone().index_copy_(0, INDEX.to(d), B.to(d)[:3]),
    "index add": lambda d: A.to(d).index_add(0, INDEX.to(d), B.to(d)[:3]),
    "index select": lambda d: A.to(d).index_select(1, INDEX.to(d)),
    "scatter": lambda d: A.to(d).clone().scatter_(0, INDEX.to(d)[:, None], 1.0),
    "scatter add": lambda d: torch.zeros(6, 8, device=d).scatter_add(0, INDEX.to(d)[:, None].expand(3, 8), A.to(d)),
    "gather": lambda d: A.to(d).gather(0, INDEX.to(d)[:, None]),
    "take along": lambda d: torch.take_along_dim(A.to(d), A.to(d).argsort(1), 1),
    "embedding": lambda d: F.embedding(INDEX.to(d), A.to(d)),
    "histogram of integers": lambda d: (
        torch.histc(INDEX.to(d), 6, 0, 5) if d.type != "cpu" else torch.tensor([0, 1, 0, 1, 0, 1])
    ),
    "one hot": lambda d: F.one_hot(INDEX.to(d), 7),
    "bucketize": lambda d: torch.bucketize(A.to(d), torch.tensor([-1.0, 0.0, 1.0], device=d)),
    "search sorted": lambda d: torch.searchsorted(A.to(d)[0].sort().values, B.to(d)[0].contiguous()),
    # attention
    "attention": lambda d: F.scaled_dot_product_attention(HEADS.to(d), HEADS.to(d), HEADS.to(d)),
    "causal attention": lambda d: F.scaled_dot_product_attention(HEADS.to(d), HEADS.to(d), HEADS.to(d), is_causal=True),
    "attention with a mask": lambda d: F.scaled_dot_product_attention(
        HEADS.to(d), HEADS.to(d), HEADS.to(d), attn_mask=torch.ones(10, 10, device=d, dtype=torch.bool).tril()
    ),
    "attention with a bias": lambda d: F.scaled_dot_product_attention(
        HEADS.to(d), HEADS.to(d), HEADS.to(d), attn_mask=torch.ones(2, 1, 10, 10, device=d)
    ),
    "attention of grouped queries": lambda d: F.scaled_dot_product_attention(
        HEADS.to(d), FEW_HEADS.to(d), FEW_HEADS.to(d), enable_gqa=True, scale=0.2
    ),
    "attention across": lambda d: F.scaled_dot_product_attention(
        HEADS.to(d), HEADS.to(d)[:, :, :5], HEADS.to(d)[:, :, 5:]
    ),
    "attention of transposed": lambda d: (
        F.scaled_dot_product_attention(*(HEADS.to(d).transpose(1, 2).contiguous().transpose(1, 2) for _ in range(3)))
        .transpose(1, 2)
        .reshape(2, 10, 32)
    ),
    "multi-head module": _multi_head,
    "multi-head module as one operator": _multi_head_at_once,
    "transformer layer": _layer(ENCODER, IMAGE[0]),
    "gru": _layer(GRU, IMAGE[0, :, :8, :8].contiguous()),
    "lstm": _layer(LSTM, IMAGE[0, :, :8, :8].contiguous()),
    # factories
    "arange": lambda d: torch.arange(5, device=d),
    "arange of floats": lambda d: torch.arange(0, 2.5, 0.5, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
    "eye": lambda d: torch.eye(3, device=d),
    "full": lambda d: torch.full((3,), 2.0, device=d),
    "full like": lambda d: torch.full_like(A.to(d), 3),
    "zeros like": lambda d: torch.zeros_like(A.to(d)),
    "new zeros": lambda d: A.to(d).new_zeros(3) + A.to(d).new_tensor([1.0, 2.0, 3.0]),
    "tensor": lambda d: torch.tensor([1.0, 2.0], device=d),
    "scalar": lambda d: torch.tensor(4.5, device=d),
    "empty result": lambda d: A.to(d)[:0] * 2,
    # types
    "to half": lambda d: A.to(d).half().float(),
    "to eight bits": lambda d: A.to(d).to(torch.float8_e4m3fn).float(),
    "to integer": lambda d: (A.to(d) * 10).to(torch.int64),
    "to bool": lambda d: A.to(d).bool(),
    "cast on the way": lambda d: A.to(d, torch.float64).float(),
    "complex": lambda d: torch.view_as_real(torch.view_as_complex(A.to(d).reshape(6, 4, 2).contiguous()) * 1j),
    "polar": lambda d: torch.polar(A.to(d).abs(), B.to(d)).real * 1,
    "fourier": lambda d: torch.fft.rfft(A.to(d)).abs(),
    # lists of tensors
    "foreach add": lambda d: torch._foreach_add([A.to(d), B.to(d)], 1.0)[1],
    "foreach multiply in place": lambda d: _edited(A.to(d), lambda t: torch._foreach_mul_([t], 2.0)),
    # memory
    "out of nothing": _out_of_nothing,
    "copy into columns": lambda d: _edited(A.to(d), lambda t: t[:, 2:4].copy_(B.to(d)[:, :2])),
    "copy with a cast": lambda d: torch.zeros(6, 8, dtype=torch.float64, device=d).copy_(A).float(),
    "copy broadcast": lambda d: torch.zeros(6, 8, device=d).copy_(A[0]),
    "fill": lambda d: torch.empty(5, device=d).fill_(3.0),
    "deep copy": lambda d: copy.deepcopy(A.to(d)) + 1,
    "resize": _grown,
    "through a storage": _through_storage,
    "a part by dlpack": _dlpack,
    "item": lambda d: torch.tensor(A.to(d).sum().item()),
    "list": lambda d: torch.tensor(A.to(d).tolist()),
}
