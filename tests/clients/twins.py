"""What the tests of the zoo share: twins, what a call uses, and what a runtime could leave behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fmstream.core.telemetry import Telemetry
from tests.clients.client import Built, Client, named_modules_of, num_bytes, parameters_of


class Reads(TorchDispatchMode):
    """Collects the parameters whose storage an operation reads or writes; shape queries do not come here."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.by_storage = {p.untyped_storage().data_ptr(): p for p in params if p.numel()}
        self.seen: dict[int, nn.Parameter] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in self.by_storage:
                param = self.by_storage[leaf.untyped_storage().data_ptr()]
                self.seen[id(param)] = param
        return func(*args, **(kwargs or {}))


def called_bytes(built: Built) -> int:
    """Bytes of the parameters that one call uses."""
    with Reads(parameters_of(built.modules)) as reads:
        built.call()
    return num_bytes(reads.seen.values())


def build_twin(client: Client) -> Built:
    """A second build whose parameters lie at the 64-byte alignment of fast memory: kernels may depend on it."""
    twin = client.build()
    for param in parameters_of(twin.modules):
        param.data = param.data.clone()
    return twin


def parameter_objects(modules: Any) -> dict[str, nn.Parameter]:
    """Every name of every parameter."""
    return {
        f"{top}.{name}": param
        for top, module in named_modules_of(modules).items()
        for name, param in module.named_parameters(remove_duplicate=False)
    }


def state_of(modules: Any) -> dict[str, Tensor]:
    """The state dicts of all top modules in one."""
    return {
        f"{top}.{name}": value.detach().clone()
        for top, module in named_modules_of(modules).items()
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }


def traces_of(modules: Any) -> dict[str, object]:
    """What a runtime could leave behind: types, attribute names and the number of hooks of every module."""
    left: dict[str, object] = {} if isinstance(modules, dict) else {"owner": sorted(vars(modules))}
    for top, root in named_modules_of(modules).items():
        for name, module in root.named_modules():
            hooks = {
                key: len(value) for key, value in vars(module).items() if "hooks" in key and isinstance(value, dict)
            }
            left[f"{top}.{name}"] = (type(module).__qualname__, sorted(vars(module)), hooks)
    return left


def assert_equal(actual: list[Tensor], expected: list[Tensor], exact: bool = True) -> None:
    """Equal bits, or a difference of a few units in the last place of the largest number."""
    assert len(actual) == len(expected)
    for mine, theirs in zip(actual, expected, strict=True):
        assert (type(mine), mine.dtype) == (type(theirs), theirs.dtype)
        if exact or not theirs.is_floating_point():
            assert torch.equal(mine, theirs)
        else:
            last = 8 * torch.finfo(theirs.dtype).eps
            scale = theirs.nan_to_num(posinf=0.0, neginf=0.0).abs().max().item() if theirs.numel() else 0.0
            torch.testing.assert_close(mine, theirs, rtol=last, atol=last * scale)


def assert_within(telemetry: Telemetry, memory: int) -> None:
    """Residents and window together never pass the memory given."""
    assert telemetry.passes
    assert max(record.resident_bytes + record.window_bytes for record in telemetry.passes) <= memory
