"""Gradients, optimisers, autocast and random numbers on the device."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fmstream import emulator


class Decoder(nn.Module):
    """A block of a language model: embedding, norm, grouped-query attention, gated layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.norm = nn.RMSNorm(16)
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.up, self.gate, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids))
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Denoiser(nn.Module):
    """Convolutions, group norms, resampling and attention over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.Conv2d(8, 3, 3, padding=1)
        self.norm, self.attend = nn.GroupNorm(2, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.norm(self.enter(x)))
        tokens = h.flatten(2).transpose(1, 2)
        h = h + self.attend(tokens, tokens, tokens)[0].transpose(1, 2).view_as(h)
        return self.leave(F.interpolate(h, scale_factor=2.0))


class Recurrent(nn.Module):
    """Both fused cells."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(6, 5), nn.GRU(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(self.lstm(x)[0])[0]


class Video(nn.Module):
    """Three-dimensional convolutions, plain and transposed, and a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv3d(2, 4, 3, padding=1), nn.ConvTranspose3d(4, 2, 2, stride=2)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(F.gelu(self.norm(self.enter(x).movedim(1, -1))).movedim(-1, 1))


MODELS = {
    "decoder": (Decoder, torch.arange(10).view(2, 5)),
    "denoiser": (Denoiser, torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)),
    "recurrent": (Recurrent, torch.linspace(-1, 1, 7 * 3 * 6).view(7, 3, 6)),
    "video": (Video, torch.linspace(-1, 1, 2 * 2 * 64).view(2, 2, 4, 4, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), torch.linspace(-1, 1, 96).view(4, 3, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_steps_are_those_of_the_cpu(any_order: torch.device, name: str) -> None:
    make, x = MODELS[name]
    torch.manual_seed(0)
    module = make()
    twin = copy.deepcopy(module).to(any_order)
    for model, given in ((module, x), (twin, x.to(any_order))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            model(given).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    for ours, theirs in zip(twin.parameters(), module.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), atol=1e-4, rtol=1e-3)


def test_gradients_flow_to_inputs_through_checkpoints(device: torch.device) -> None:
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    y = torch.ones(2, 4, device=device, requires_grad=True)
    layer(x).sum().backward()
    checkpoint(copy.deepcopy(layer).to(device), y, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(y.grad.cpu(), x.grad)


def test_autocast_casts_as_on_cuda(device: torch.device) -> None:
    layer, x = nn.Linear(4, 4).to(device), torch.randn(2, 4, device=device)
    with torch.autocast("emu", dtype=torch.bfloat16):
        y = layer(x)
        found = {
            "linear": y.dtype,
            "softmax": y.softmax(-1).dtype,
            "norm": F.layer_norm(y, (4,)).dtype,
            "cat": torch.cat([x, y]).dtype,
            "attention": F.scaled_dot_product_attention(x[None], x[None], x[None]).dtype,
            "relu": y.relu().dtype,
        }
        with torch.autocast("emu", enabled=False):
            assert layer(x).dtype == torch.float32
    low, full = torch.bfloat16, torch.float32
    assert found == {
        "linear": low, "softmax": full, "norm": full, "cat": full, "attention": low, "relu": low
    }  # fmt: skip
    y.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == full


def test_a_generator_of_the_device_repeats_itself_in_any_order(installed: None) -> None:
    def draw(execution: str | int) -> list[torch.Tensor]:
        emulator.reset(execution=execution)
        g = torch.Generator("emu").manual_seed(5)
        first = torch.randn(4, device="emu", generator=g)
        state = g.get_state()
        second, third = torch.rand(4, device="emu", generator=g), torch.randperm(9, device="emu", generator=g)
        again = torch.rand(4, device="emu", generator=torch.Generator("emu").set_state(state))
        assert torch.equal(second, again)
        return [t.cpu() for t in (first, second, third)]

    eager = draw("eager")
    assert all(torch.equal(a, b) for mode in ("late", 3) for a, b in zip(draw(mode), eager, strict=True))
    assert not torch.equal(*eager[:2])


def test_seeding_pytorch_seeds_the_device(device: torch.device) -> None:
    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(3)
        return torch.rand(8, device=device).cpu(), F.dropout(torch.ones(64, device=device), 0.5).cpu()

    (a, b), (c, d) = draw(), draw()
    assert torch.equal(a, c)
    assert torch.equal(b, d)
    assert set(b.tolist()) == {0.0, 2.0}
    state = torch.emu.get_rng_state()
    e = torch.rand(8, device=device)
    torch.emu.set_rng_state(state)
    assert torch.equal(e, torch.rand(8, device=device))


def test_random_numbers_of_the_device_leave_those_of_the_cpu_alone(device: torch.device) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    F.dropout(torch.randn(9, device=device), 0.5)
    assert torch.equal(torch.rand(3), expected)


def test_a_generator_of_the_cpu_is_refused(device: torch.device) -> None:
    generator = torch.Generator("cpu")
    assert isinstance(generator, torch.Generator)
    with pytest.raises(RuntimeError, match="expected a generator"):
        torch.randn(3, device=device, generator=generator)


def test_a_state_of_another_kind_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        torch.Generator("emu").set_state(torch.get_rng_state())
