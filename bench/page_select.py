"""Choosing the pages that a decoding step attends to, at 128K tokens: how near to the rate of reading their digests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Final

import numpy as np
import torch

from bench.contract import Bar, Findings, Row, Workplace, in_turn, num_cores, register, seconds_of
from fmstream.payloads.page_select import Choice, Digests, Limits, expected_rotation, select, select_with_torch

CLAIM: Final = (
    "Choosing the pages of a layer at 128K tokens runs near the speed at which memory gives their digests, with the "
    "decision made and the same one that PyTorch operations make."
)
BARS: Final = {"cpu_bandwidth_share": Bar(at_least=0.70), "gpu_us": Bar(at_most=37.0)}
TOKENS: Final = 128 << 10
PAGE_TOKENS: Final = 32
KV_HEADS: Final = 8
GROUP: Final = 4
HEAD_DIM: Final = 128
SHARE_CHOSEN: Final = 0.135
LAYERS: Final = 16
"""Layers that take turns, so that digests come from memory, not from a cache: they have 537 MB in float32."""


@register("page_select", CLAIM, BARS)
def run(place: Workplace) -> Findings:
    """Measure on the CPU, and on a CUDA card where there is one."""
    rounds = 5 if place.quick else 15
    layers = [_digests(seed, torch.device("cpu"), torch.float32) for seed in range(LAYERS)]
    query, limits = _query(torch.device("cpu")), _limits()
    _check_equal(select(query, layers[0], limits), select_with_torch(query, layers[0], limits))
    before = torch.get_num_threads()
    torch.set_num_threads(num_cores())
    try:
        figures, rows = _measure_cpu(query, layers, limits, rounds)
    finally:
        torch.set_num_threads(before)
    if torch.cuda.is_available():
        microseconds, more = _measure_cuda(limits, rounds)
        figures["gpu_us"] = microseconds
        rows.append(more)
    else:
        place.say("there is no CUDA card here: gpu_us is left out")
    return Findings(figures, rows)


def _limits() -> Limits:
    chosen = int(TOKENS / PAGE_TOKENS * SHARE_CHOSEN)
    return Limits(num_chosen=chosen - 16, num_frames=chosen, num_ahead=16)


def _query(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(1, KV_HEADS * GROUP, HEAD_DIM, generator=generator).to(device)


def _digests(seed: int, device: torch.device, dtype: torch.dtype) -> Digests:
    generator = torch.Generator().manual_seed(seed)
    shape = (1, KV_HEADS, TOKENS // PAGE_TOKENS, HEAD_DIM)
    inv_freq = 1.0 / 10000 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = expected_rotation(inv_freq, 512)
    return Digests(
        torch.randn(shape, generator=generator).to(device, dtype),
        torch.rand(shape, generator=generator).to(device, dtype),
        (torch.rand(shape[:3], generator=generator) < SHARE_CHOSEN).to(device),
        (cos.to(device), sin.to(device)),
        HEAD_DIM**-0.5,
        shape[2],
    )


def _check_equal(found: Choice, wanted: Choice) -> None:
    # Sums in another order may exchange pages on the threshold: a few of thousands.
    same = (found.chosen == wanted.chosen).float().mean().item()
    assert same > 0.98, f"only {same:.3f} of the choices agree with PyTorch's"


def _measure_cpu(
    query: torch.Tensor, layers: list[Digests], limits: Limits, rounds: int
) -> tuple[dict[str, float], list[Row]]:
    num_threads = torch.get_num_threads()
    num_bytes = 2 * layers[0].centre.nbytes
    with ThreadPoolExecutor(num_threads) as pool:

        def over_layers(work: Callable[[Digests], Any]) -> Callable[[], list[float]]:
            return lambda: [seconds_of(lambda layer=layer: work(layer)) for layer in layers]  # type: ignore[misc]

        def read(layer: Digests) -> None:
            parts = [chunk for part in (layer.centre, layer.radius) for chunk in part.view(-1).chunk(num_threads)]
            list(pool.map(_reader(), (part.numpy() for part in parts)))

        read(layers[0])
        timings = in_turn(
            {
                "select, native": over_layers(lambda layer: select(query, layer, limits)),
                "read the digests": over_layers(read),
                "select, PyTorch operations": over_layers(lambda layer: select_with_torch(query, layer, limits)),
            },
            rounds,
        )
    rows = [
        timing.row(name, gb_per_s=num_bytes / timing.median / 1e9, threads=num_threads)
        for name, timing in timings.items()
    ]
    native, reading, plain = (timing.median for timing in timings.values())
    return {"cpu_bandwidth_share": reading / native, "vs_pytorch": plain / native}, rows


@cache
def _reader() -> Callable[[Any], float]:
    """Sums float32 values as fast as memory gives them, without the GIL."""
    from numba import njit

    @njit(fastmath=True, nogil=True)  # type: ignore[untyped-decorator]
    def read(array: Any) -> Any:
        total = np.float32(0)
        for index in range(array.shape[0]):
            total += array[index]
        return total

    return read  # type: ignore[no-any-return]


def _measure_cuda(limits: Limits, rounds: int) -> tuple[float, Row]:
    device = torch.device("cuda")
    layers = [_digests(seed, device, torch.bfloat16) for seed in range(LAYERS)]
    query = _query(device)
    _check_equal(select(query, layers[0], limits), select_with_torch(query, layers[0], limits))
    graph = torch.cuda.CUDAGraph()  # what the host takes for a launch is not what is measured
    with torch.cuda.graph(graph):
        for layer in layers:
            select(query, layer, limits)
    samples = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / len(layers))
    middle = sorted(samples)[len(samples) // 2]
    return middle, {"contender": "select, CUDA kernel", "median_us": middle, "min_us": min(samples)}
