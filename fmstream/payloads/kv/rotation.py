"""What the rotary embedding of a model turns by, for the prior of the coming positions."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from fmstream.payloads.page_select import expected_rotation


def inverse_frequencies(config: Any, dim: int) -> torch.Tensor | None:
    """Radians for each position, float32 [dim / 2]; None where a model turns nothing, or not all of a head alike."""
    parameters: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if parameters and all(isinstance(value, dict) for value in parameters.values()):
        parameters = parameters.get("full_attention", {})  # models whose layers turn by several
    theta = parameters.get("rope_theta", getattr(config, "rope_theta", None))
    partial = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if theta is None or partial not in (None, 1, 1.0):
        return None
    plain = 1.0 / float(theta) ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    return plain if kind == "default" else _scaled(kind, config, plain)


def _scaled(kind: str, config: Any, plain: torch.Tensor) -> torch.Tensor | None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        return None
    found: torch.Tensor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]
    return found if found.shape == plain.shape else None


class Rotation:
    """The mean rotation over some coming positions, by device and size of a head."""

    def __init__(self, config: Any, horizon: int) -> None:
        self._config = config
        self._horizon = horizon
        self._of = cache(self._compute)

    def __call__(self, device: torch.device, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Means of cosine and sine, float32 [dim] each."""
        return self._of(device, dim)

    def _compute(self, device: torch.device, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = inverse_frequencies(self._config, dim)
        # A model that turns nothing is asked for what its present query is.
        cos, sin = expected_rotation(torch.zeros(dim // 2) if found is None else found.float(), self._horizon)
        return cos.to(device), sin.to(device)
