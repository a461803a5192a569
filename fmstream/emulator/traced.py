"""The device for who traces a program instead of running it: ``torch.compile``.

Kernels are Python here, so that the compiler would take their frames for the user's and compile them: it is told to let
them be.  And PyTorch's attention is made of others, so that the device's kernel for it comes before a tracer sees an
operator.  Handed tensors without memory, it gives `attend` instead: in graphs that stands for the kernel, which then
computes the same bits.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
import torch._C._dynamo.eval_frame as eval_frame

NAMESPACE: Final = "fmstream_emulator"
_SCHEMA: Final = (
    "attend(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, *, "
    "float? scale, bool enable_gqa) -> Tensor"
)


def register(own_library: Any, kernel: Any, shape: Any) -> None:
    """Define the operator; ``kernel`` computes it on the device, ``shape`` gives it on tensors without memory."""
    own_library.define(_SCHEMA, tags=(torch.Tag.nondeterministic_seeded,))
    own_library.impl("attend", kernel, "PrivateUse1")
    own_library.impl("attend", shape, "Meta")


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor may have no memory, or somebody wants to see the operators that are called."""
    return type(tensor) is not torch.Tensor or torch._C._len_torch_dispatch_stack() > 0


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
    """``scaled_dot_product_attention`` as one operator."""
    operator = getattr(torch.ops, NAMESPACE).attend.default
    result: torch.Tensor = operator(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return result


def keep_compiler_out() -> None:
    """Let the compiler take no notice of frames of this package, nor of those that they call."""
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    package = __name__.rpartition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}."):
            for code in _codes(vars(module).values(), name, str(module.__file__)):
                eval_frame.set_code_exec_strategy(code, strategy)


def _codes(values: Iterable[Any], module: str, file: str) -> Iterator[types.CodeType]:
    """The code of functions, methods and properties of a module, and of what is defined within them."""
    for value in list(values):
        if isinstance(value, type):
            if value.__module__ == module:
                yield from _codes(vars(value).values(), module, file)
            continue
        function = getattr(value, "fget", None) or getattr(value, "__wrapped__", None) or value
        function = getattr(function, "__func__", function)
        code = function if isinstance(function, types.CodeType) else getattr(function, "__code__", None)
        if isinstance(code, types.CodeType) and code.co_filename == file:
            yield code
            yield from _codes(code.co_consts, module, file)
