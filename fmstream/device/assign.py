"""Making given tensors the parameters and buffers of a module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from fmstream.errors import CheckpointError

_NUM_NAMED = 4


def assign(
    module: nn.Module,
    source: str,
    tensors: Mapping[str, torch.Tensor],
    strict: bool,
    rename: Callable[[str], str] | None,
    dtype: torch.dtype | None,
) -> list[str]:
    """See `Checkpoint.load_into`; ``source`` is what errors call the tensors' origin."""
    slots = _slots(module)
    given = _renamed(source, tensors, rename)
    given = _with_fitting_prefix(given, slots)
    cast: list[str] = []
    if dtype is not None:
        cast = [
            name
            for name, tensor in given.items()
            if name in slots and tensor.is_floating_point() and tensor.dtype != dtype
        ]
        for name in cast:
            given[name] = given[name].to(dtype)
    _check_shapes(source, given, slots)
    with torch.inference_mode(False):
        _share(given, slots)
        _load(module, source, given, strict)
    _check_all_real(module, source)
    return cast


def _slots(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by every name that leads to them."""
    slots: dict[str, torch.Tensor] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        named = [*child._parameters.items(), *child._buffers.items()]
        for key, tensor in named:
            if tensor is not None and key not in child._non_persistent_buffers_set:
                slots[f"{prefix}.{key}" if prefix else key] = tensor
    return slots


def _renamed(
    source: str, tensors: Mapping[str, torch.Tensor], rename: Callable[[str], str] | None
) -> dict[str, torch.Tensor]:
    if rename is None:
        return dict(tensors)
    given = {rename(name): tensor for name, tensor in tensors.items()}
    if len(given) < len(tensors):
        twice = [name for name, count in Counter(map(rename, tensors)).items() if count > 1]
        raise CheckpointError(f"{source}: rename gives {twice[0]!r} to more than one tensor")
    return given


def _with_fitting_prefix(given: dict[str, torch.Tensor], slots: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The tensors with a prefix taken from their names, or added, if more of them fit the module that way."""
    now = sum(name in slots for name in given)
    surplus, lack = _best_prefix(given, slots), _best_prefix(slots, given)
    if max(surplus[1], lack[1]) <= now:
        return given
    if surplus[1] >= lack[1]:
        named = {name.removeprefix(surplus[0]): tensor for name, tensor in given.items()}
    else:
        named = {name if name in slots else lack[0] + name: tensor for name, tensor in given.items()}
    return named if len(named) == len(given) else given


def _best_prefix(longer: Iterable[str], shorter: Mapping[str, object]) -> tuple[str, int]:
    """The prefix without which most names of ``longer`` are in ``shorter``, and how many."""
    counts: Counter[str] = Counter()
    for name in longer:
        parts = name.split(".")
        for length in range(1, len(parts)):
            rest = ".".join(parts[length:])
            if rest in shorter:
                counts[name[: len(name) - len(rest)]] += 1
    return counts.most_common(1)[0] if counts else ("", 0)


def _check_shapes(source: str, given: Mapping[str, torch.Tensor], slots: Mapping[str, torch.Tensor]) -> None:
    wrong = [
        f"{name} is {tuple(tensor.shape)} in the checkpoint and {tuple(slots[name].shape)} in the module"
        for name, tensor in given.items()
        if name in slots and tensor.shape != slots[name].shape
    ]
    if wrong:
        raise CheckpointError(
            f"{source}: {len(wrong)} shapes differ: {'; '.join(wrong[:_NUM_NAMED])}; "
            f"build the module with the configuration of this checkpoint"
        )


def _share(given: dict[str, torch.Tensor], slots: Mapping[str, torch.Tensor]) -> None:
    """Make parameters of the tensors, the same one for all names that the module has for one parameter."""
    groups: dict[int, list[str]] = {}
    for name, slot in slots.items():
        groups.setdefault(id(slot), []).append(name)
    for names in groups.values():
        found = [name for name in names if name in given]
        if not found:
            continue
        old, tensor = slots[names[0]], given[found[-1]]
        if isinstance(old, nn.Parameter):
            can_have_grad = tensor.is_floating_point() or tensor.is_complex()
            tensor = nn.Parameter(tensor, requires_grad=old.requires_grad and can_have_grad)
            tensor.__dict__.update(old.__dict__)
        for name in names:
            given[name] = tensor


def _load(module: nn.Module, source: str, given: Mapping[str, torch.Tensor], strict: bool) -> None:
    # Through load_state_dict, for modules have hooks there that know older names of their parameters.
    try:
        result = module.load_state_dict(given, strict=False, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{source} does not fit {type(module).__name__}: {error}") from error
    if not strict:
        return
    if result.missing_keys:
        raise CheckpointError(
            f"{source} lacks {_some(result.missing_keys)} of {type(module).__name__}; "
            f"give rename= if they are called otherwise there, or strict=False if they need no values"
        )
    if result.unexpected_keys:
        raise CheckpointError(
            f"{source} has {_some(result.unexpected_keys)} that {type(module).__name__} has no place for; "
            f"give rename= if they are called otherwise here, or strict=False to leave them out"
        )


def _check_all_real(module: nn.Module, source: str) -> None:
    slots = _slots(module)
    absent = [name for name, tensor in slots.items() if tensor.is_meta]
    if absent:
        raise CheckpointError(f"{source} lacks {_some(absent)} and the module was built without values for them")
    absent = [name for name, buffer in module.named_buffers() if buffer.is_meta and name not in slots]
    if absent:
        raise CheckpointError(
            f"{_some(absent)} of {type(module).__name__} are on the meta device and in no checkpoint (non-persistent "
            f"buffers); give a factory that builds them for real"
        )


def _some(names: list[str]) -> str:
    named = ", ".join(names[:_NUM_NAMED])
    return f"{len(names)} tensors ({named}{', ...' if len(names) > _NUM_NAMED else ''})"
