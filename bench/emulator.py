"""What the emulated accelerator costs: an operator, a copy, an event, and a dry pass of a model of real size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from bench.contract import Bar, Findings, Row, Timing, Workplace, in_turn, register, seconds_of
from fmstream import emulator

CLAIM: Final = (
    "On the emulated accelerator an operator costs the host some tens of microseconds with the race checker on, and a "
    "dry forward pass of Flux at its real size takes less than a second and a few hundred megabytes."
)
BARS: Final = {"linear_us": Bar(at_most=150.0), "flux_dry_s": Bar(at_most=1.0)}
CALLS: Final = 200
"""Calls in one sample; the device is synchronised after each sample, outside of the time taken."""
FLUX_PIXELS: Final = 1024
FLUX_TOKENS: Final = 512


@register("emulator", CLAIM, BARS)
def run(place: Workplace) -> Findings:
    """Measure with one thread, in eager mode and dry."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _installed():
            operators = measure_operators(rounds=5 if place.quick else 25)
            place.say("operators measured")
            flux, row = measure_flux(rounds=2 if place.quick else 5)
    finally:
        torch.set_num_threads(before)
    figures = {f"{name}_us": min(timing.samples) * 1e6 for name, timing in operators.items()}
    rows = [timing.row(f"{name}, one call") for name, timing in operators.items()]
    return Findings({**figures, "flux_dry_s": min(flux.samples)}, [*rows, row])


@contextmanager
def _installed() -> Iterator[None]:
    emulator.install()
    try:
        yield
    finally:
        emulator.uninstall()


def _emu() -> Any:
    """``torch.emu``, which type checkers cannot know."""
    return torch.get_device_module("emu")


def measure_operators(rounds: int) -> dict[str, Timing]:
    """Time on the core of one call each: small operands, so that the kernels themselves take next to nothing.

    The least of the samples is the figure: what the code costs, not what else the machine was doing.
    """
    emulator.reset(check="raise")
    a, b = torch.randn(8, 8, device="emu"), torch.randn(8, 8, device="emu")
    layer = nn.Linear(8, 8).to("emu")
    source, target = torch.randn(8, 8).pin_memory(), torch.empty(8, 8, device="emu")
    side = _emu().Stream()

    def pass_an_event() -> None:
        event = _emu().Event()
        event.record()
        event.wait(side)

    calls: dict[str, Callable[[], object]] = {
        "add": lambda: a + b,
        "linear": lambda: layer(a),
        "copy": lambda: target.copy_(source, non_blocking=True),
        "event": pass_an_event,
    }
    with torch.no_grad():
        return in_turn({name: _sampler(call) for name, call in calls.items()}, rounds)


def _sampler(call: Callable[[], object]) -> Callable[[], list[float]]:
    def sample() -> list[float]:
        call()
        began = time.thread_time()
        for _ in range(CALLS):
            call()
        seconds = (time.thread_time() - began) / CALLS
        _emu().synchronize()
        return [seconds]

    return sample


def measure_flux(rounds: int) -> tuple[Timing, Row]:
    """Dry forward passes of Flux on an H200, at 1024 x 1024 pixels with 512 tokens of text."""
    machine = emulator.reset("h200", execution="dry", check="raise", keep_timeline=False)
    model = build_flux().to("emu")
    with torch.no_grad():
        model(**flux_inputs())
        _emu().synchronize()
        machine.reset_statistics()
        samples = [seconds_of(lambda: model(**flux_inputs())) for _ in range(rounds)]
        _emu().synchronize()
    found, timing = machine.statistics(), Timing(tuple(samples))
    more = {
        "modelled_s": found.seconds / rounds,
        "kernels": found.num_kernels // rounds,
        "activations_gb": (found.peak_allocated - found.allocated) / 1e9,
        "weights_gb": sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9,
    }
    return timing, timing.row("dry forward pass of Flux", **more)


def build_flux() -> nn.Module:
    """Flux with the sizes of FLUX.1-dev in bfloat16, its weights dry."""
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        model: Any = FluxTransformer2DModel(
            patch_size=1,
            in_channels=64,
            num_layers=19,
            num_single_layers=38,
            attention_head_dim=128,
            num_attention_heads=24,
            joint_attention_dim=4096,
            pooled_projection_dim=768,
            guidance_embeds=True,
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    module: nn.Module = emulator.dry_parameters(model).eval()
    return module


def flux_inputs() -> dict[str, torch.Tensor | bool]:
    """Inputs of one step, on the device."""
    num_patches = (FLUX_PIXELS // 16) ** 2
    low: dict[str, Any] = {"dtype": torch.bfloat16, "device": "emu"}
    return {
        "hidden_states": torch.empty(1, num_patches, 64, **low),
        "encoder_hidden_states": torch.empty(1, FLUX_TOKENS, 4096, **low),
        "pooled_projections": torch.empty(1, 768, **low),
        "timestep": torch.zeros(1, **low),
        "guidance": torch.zeros(1, **low),
        "img_ids": torch.zeros(num_patches, 3, **low),
        "txt_ids": torch.zeros(FLUX_TOKENS, 3, **low),
        "return_dict": False,
    }
