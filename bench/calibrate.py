"""A card as the emulator knows it, fitted to the accelerator that is here, and steps modelled beside measured ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

import fmstream
from bench.contract import Bar, BenchError, Findings, Row, Workplace, register
from fmstream.device.accelerator import Accelerator
from fmstream.device.opening import open_device
from fmstream.emulator.cards import Card

CLAIM: Final = (
    "The emulated accelerator, fitted to a card by a few measurements, predicts the step time of models on that card, "
    "resident and streamed."
)
BARS: Final = {"worst_ratio": Bar(at_most=1.25)}
MIB: Final = 1 << 20
SIZES: Final = (64 << 10, 1 * MIB, 16 * MIB, 64 * MIB)
"""Bytes of copies that are timed."""
TIMES: Final = 5
WARM_STEPS: Final = 6
TINY_KERNELS: Final = 400


@register("calibrate", CLAIM, BARS)
def run(place: Workplace) -> Findings:
    """Measure the CUDA card; raises `BenchError` where there is none."""
    if not torch.cuda.is_available():
        raise BenchError("there is no CUDA card here to be measured: run this where torch.cuda.is_available()")
    device = open_device("cuda")
    assert isinstance(device, Accelerator)
    card = fit(device)
    rows: list[Row] = [{"field": name, "value": getattr(card, name)} for name in Card.__dataclass_fields__]
    steps = list(compare(card, device, models(small=place.quick)))
    ratios = [row["modelled_s"] / row["measured_s"] for row in steps]
    figures = {
        "worst_ratio": max(max(ratio, 1 / ratio) for ratio in ratios),
        "h2d_gb_per_s": card.h2d_bytes_per_second / 1e9,
        "gemm_tflops": card.gemm_flops / 1e12,
        "attention_tflops": card.attention_flops / 1e12,
    }
    return Findings(figures, [*rows, *copies(device), *steps])


def fit(device: Accelerator, scale: int = 4096) -> Card:
    """The card's rates; ``scale`` is the side of the matrices and the length of the attention."""
    where = device.torch_device
    with torch.inference_mode():
        costs = device.probe(torch.empty(4 * MIB, dtype=torch.uint8, device=where))
        launch = _launch_seconds(device)
        return Card(
            name=str(device.module.get_device_properties(where).name),
            memory_bytes=device.total_bytes(),
            h2d_bytes_per_second=_rate(device, _host(SIZES[-1], pinned=True), to_device=True),
            d2h_bytes_per_second=_rate(device, _host(SIZES[-1], pinned=True), to_device=False),
            pageable_bytes_per_second=_rate(device, _host(SIZES[-1], pinned=False), to_device=True),
            gemm_flops=_gemm_flops(device, scale),
            attention_flops=_attention_flops(device, scale),
            memory_bytes_per_second=_memory_rate(device),
            copy_engine_seconds=costs.latency_seconds,
            copy_seen_seconds=costs.seen_seconds,
            launch_seconds=launch,
            copy_launch_seconds=launch,
            kernel_seconds=_kernel_seconds(device, scale),
        )


def copies(device: Accelerator) -> Iterator[Row]:
    """Copies of several sizes, from pinned and from pageable memory."""
    for num_bytes in SIZES:
        for pinned in (True, False):
            host = _host(num_bytes, pinned=pinned)
            for to_device in (True, False):
                rate = _rate(device, host, to_device=to_device)
                direction = "to the device" if to_device else "from the device"
                yield {"copy": direction, "pinned": pinned, "bytes": num_bytes, "gb_per_s": rate / 1e9}


def _host(num_bytes: int, *, pinned: bool) -> Tensor:
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    return memory.pin_memory() if pinned else memory


def _rate(device: Accelerator, host: Tensor, *, to_device: bool) -> float:
    """Bytes a second of a copy."""
    there = torch.zeros(host.numel(), dtype=torch.uint8, device=device.torch_device)
    target, source = (there, host) if to_device else (host, there)
    return host.numel() / _seconds(device, lambda: target.copy_(source, non_blocking=True))


def _gemm_flops(device: Accelerator, n: int) -> float:
    left, right = (torch.zeros(n, n, dtype=torch.float16, device=device.torch_device) for _ in range(2))
    return 2 * n**3 / _seconds(device, lambda: left @ right)


def _attention_flops(device: Accelerator, length: int) -> float:
    heads, width = 16, 128
    q = torch.zeros(1, heads, length, width, dtype=torch.float16, device=device.torch_device)
    return 4 * heads * length**2 * width / _seconds(device, lambda: functional.scaled_dot_product_attention(q, q, q))


def _memory_rate(device: Accelerator) -> float:
    """Bytes read and written a second by an operator that computes next to nothing."""
    x = torch.zeros(512 * MIB, dtype=torch.uint8, device=device.torch_device)
    return 2 * x.numel() / _seconds(device, lambda: x.add_(1))


def _launch_seconds(device: Accelerator) -> float:
    """Seconds for each of many tiny kernels, which take longer to launch than to run."""
    x = torch.zeros(1, device=device.torch_device)

    def many() -> None:
        for _ in range(TINY_KERNELS):
            x.add_(1)

    return _seconds(device, many) / TINY_KERNELS


def _kernel_seconds(device: Accelerator, n: int) -> float:
    """Seconds for each of many tiny kernels that were launched while the device was busy with something else."""
    x = torch.zeros(1, device=device.torch_device)
    left = torch.zeros(n, n, dtype=torch.float32, device=device.torch_device)

    def behind(count: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(8):
                left @ left
            for _ in range(count):
                x.add_(1)

        return work

    few, many = 20, 120
    return max(0.0, _seconds(device, behind(many)) - _seconds(device, behind(few))) / (many - few)


def _seconds(device: Accelerator, work: Callable[[], Any]) -> float:
    """Median seconds of the device for some work, after it was done once."""
    work()
    taken = []
    for _ in range(TIMES):
        device.module.synchronize()
        began = device.mark(timed=True)
        work()
        ended = device.mark(timed=True)
        ended.event.synchronize()
        taken.append(began.event.elapsed_time(ended.event) / 1e3)
    return max(median(taken), 1e-9)


@dataclass(frozen=True, slots=True)
class Model:
    """A module in half precision and an input, both on the CPU."""

    name: str
    module: nn.Module
    x: Tensor


def models(*, small: bool) -> list[Model]:
    """Three kinds of work: matrix products alone, transformer blocks, convolutions."""
    from bench.peers.model import Net, Shape

    width = 512 if small else 2048
    shape = Shape(num_blocks=8 if small else 24, width=width, num_heads=8, num_tokens=width)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        layers = [layer for _ in range(16) for layer in (nn.Linear(width, width), nn.GELU())]
        channels = width // 4
        convolutions = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(12)]
        found = [
            Model("linear layers", nn.Sequential(*layers), torch.randn(width, width)),
            Model("transformer blocks", Net(shape), torch.randn(1, shape.num_tokens, shape.num_features)),
            Model("convolutions", nn.Sequential(*convolutions), torch.randn(1, channels, 64, 64)),
        ]
    return [Model(m.name, m.module.half().eval().requires_grad_(False), m.x.half()) for m in found]


def compare(card: Card, device: Accelerator, of: list[Model]) -> Iterator[Row]:
    """Each model resident and streamed with half of its weights in memory: measured here, and modelled by the card."""
    from bench.streamed import resident_step, streamed_step
    from fmstream import emulator

    measured = [(model, memory, _measure(device, model, memory)) for model in of for memory in (None, "50%")]
    emulator.install()
    for model, memory, seconds in measured:

        def call(module: nn.Module, x: Tensor = model.x) -> Tensor:
            output: Tensor = module(x.to("emu")).cpu()
            return output

        if memory is None:
            step = resident_step(card, model.module, call)
        else:
            step = streamed_step(card, model.module, call, memory=memory, check=None)
        yield {"model": model.name, "memory": memory or "all", "measured_s": seconds, "modelled_s": step.seconds}


def _measure(device: Accelerator, model: Model, memory: str | None) -> float:
    """Median wall seconds of a steady step."""
    where = device.torch_device
    with torch.inference_mode(), fmstream.stream(model.module, device=str(where), memory=memory) as handle:
        for _ in range(WARM_STEPS):
            model.module(model.x.to(where)).cpu()
            handle._session.settle_plans()
        taken = []
        for _ in range(TIMES):
            began = time.perf_counter()
            model.module(model.x.to(where)).cpu()
            taken.append(time.perf_counter() - began)
    return median(taken)
