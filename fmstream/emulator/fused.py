"""Fused operators that PyTorch calls on every device but the CPU, as several operators of the device.

What a recurrent cell leaves for its backward pass is the emulator's own affair: activated gates, side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], scale: Tensor, weight: Tensor | None, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """``_fused_rms_norm_backward``: gradients of ``x`` and ``weight``.  ``scale`` is 1 / RMS.  (Zhang, Sennrich)"""
    inner = list(range(x.dim() - len(shape), x.dim()))
    outer = list(range(x.dim() - len(shape)))
    normed = x * scale
    scaled = grad if weight is None else grad * weight
    of_weight: Tensor | None = None
    if mask[1] and weight is not None:
        of_weight = ((grad * normed).sum(outer) if outer else grad * normed).to(weight.dtype)
    if not mask[0]:
        return None, of_weight
    of_x = scale * (scaled - normed * (scaled * normed).mean(inner, keepdim=True))
    return of_x.to(x.dtype), of_weight


def _gates(from_input: Tensor, from_hidden: Tensor, bias: Tensor | None, hidden_bias: Tensor | None) -> Tensor:
    gates = from_input + from_hidden
    if bias is not None and hidden_bias is not None:
        gates = gates + bias + hidden_bias
    return gates


def lstm_cell(
    from_input: Tensor,
    from_hidden: Tensor,
    cell: Tensor,
    bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``_thnn_fused_lstm_cell``: hidden state, cell and workspace.  (Hochreiter and Schmidhuber, 1997)"""
    i, f, g, o = _gates(from_input, from_hidden, bias, hidden_bias).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * cell + i * g
    return o * after.tanh(), after, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hidden: Tensor | None,
    grad_after: Tensor | None,
    cell: Tensor,
    after: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``_thnn_fused_lstm_cell_backward_impl``: gradients of the gates, of the cell, and of the bias."""
    i, f, g, o = workspace.chunk(4, 1)
    tanh = after.tanh()
    hidden = torch.zeros_like(after) if grad_hidden is None else grad_hidden
    inner = hidden * o * (1 - tanh * tanh)
    if grad_after is not None:
        inner = inner + grad_after
    gates = torch.cat(
        [
            inner * g * i * (1 - i),
            inner * cell * f * (1 - f),
            inner * i * (1 - g * g),
            hidden * tanh * o * (1 - o),
        ],
        1,
    )
    return gates, inner * f, gates.sum(0) if has_bias else None


def gru_cell(
    from_input: Tensor,
    from_hidden: Tensor,
    hidden: Tensor,
    bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``_thnn_fused_gru_cell``: hidden state and workspace.  (Cho et al., 2014)"""
    if bias is not None and hidden_bias is not None:
        from_input, from_hidden = from_input + bias, from_hidden + hidden_bias
    input_r, input_z, input_n = from_input.chunk(3, 1)
    hidden_r, hidden_z, hidden_n = from_hidden.chunk(3, 1)
    r, z = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
    n = (input_n + r * hidden_n).tanh()
    return n + z * (hidden - n), torch.cat([r, z, n, hidden, hidden_n], 1)


def gru_cell_backward(
    grad: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """``_thnn_fused_gru_cell_backward``: gradients of both gates, of the hidden state, and of both biases."""
    r, z, n, hidden, hidden_n = workspace.chunk(5, 1)
    inner = grad * (1 - z) * (1 - n * n)
    grad_z = grad * (hidden - n) * z * (1 - z)
    grad_r = inner * hidden_n * r * (1 - r)
    of_input = torch.cat([grad_r, grad_z, inner], 1)
    of_hidden = torch.cat([grad_r, grad_z, inner * r], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad * z, *biases
