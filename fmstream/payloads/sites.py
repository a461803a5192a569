"""Which modules own which parameters, and which of these can be streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fmstream.errors import ConfigError
from fmstream.payloads.absent import Absent, Bound, InGraph
from fmstream.payloads.master import Keeper, Master, span_bytes

MAX_SPREAD = 2
"""A strided parameter is streamed with its gaps while these at most double its bytes."""


@dataclass(slots=True, eq=False)
class Site:
    """A module whose calls are seen.

    ``params`` are the ids that it binds: its own, and those that it was seen to read from others.
    """

    index: int
    name: str
    module: nn.Module
    params: list[int] = field(default_factory=list)
    before: Any = None
    """``_compiled_call_impl`` as it was found in the module's own dict, None if it was not there."""


@dataclass(slots=True)
class Survey:
    """What discovery found.

    Attributes:
        sites: every module with a streamable parameter in it, outer ones first.
        masters: streamable parameters, each once.
        kept: names and bytes of parameters that are left in place, with the reason.
        shape: per module its parameters and children as they were, to notice a change.
    """

    sites: list[Site] = field(default_factory=list)
    masters: list[Master] = field(default_factory=list)
    kept: list[tuple[str, int, str]] = field(default_factory=list)


def survey(roots: Mapping[str, nn.Module], device: torch.device, keeper: Keeper, in_place: set[int]) -> Survey:
    """Walk the modules.

    Args:
        roots: outermost modules by name.
        device: where they execute.
        keeper: who is told of faults and writes.
        in_place: ``id`` of parameters that must not be streamed.

    Raises:
        ConfigError: a parameter has no values (meta) or lies on another device.
    """
    found = Survey()
    by_id: dict[int, Master] = {}
    reasons: dict[int, str] = {}
    modules = dict(_walk(roots))
    overlapping = _overlapping(modules)
    site_of: dict[int, Site] = {}
    for name, module in modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            own_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
            found.kept.append((name, own_bytes, "it is a ScriptModule"))
            continue
        own: list[int] = []
        for key, shown in module._parameters.items():
            param = shown.master.original if isinstance(shown, Absent | Bound | InGraph) else shown
            if param is None or id(param) in reasons:
                continue
            full = f"{name}.{key}" if name else key
            master = by_id.get(id(param))
            if master is None:
                reason = (
                    "it is read or written where streaming cannot follow"
                    if id(param) in in_place
                    else _why_not(full, param, device, overlapping)
                )
                if reason is not None:
                    reasons[id(param)] = reason
                    lazy = nn.parameter.is_lazy(param)
                    found.kept.append((full, 0 if lazy else param.numel() * param.element_size(), reason))
                    continue
                master = by_id[id(param)] = Master(len(found.masters), full, param, device, keeper)
                found.masters.append(master)
            master.slots.append((module._parameters, key))
            if master.index not in own:
                own.append(master.index)
        site_of[id(module)] = Site(len(found.sites), name, module, own)
        found.sites.append(site_of[id(module)])
    inside: set[int] = set()
    for module in modules.values():
        if id(module) not in site_of:
            continue
        _add_hidden_slots(module, by_id)
        for reader_of in _reads(module):
            site = site_of[id(module)]
            for param in reader_of.parameters():
                master = by_id.get(id(param))
                if master is not None and master.index not in site.params:
                    site.params.append(master.index)
        if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            inside |= {id(child) for child in module.modules() if child is not module}
    owning = {id(site.module) for site in found.sites if site.params}
    holding = {id(m) for m in modules.values() if any(id(child) in owning for child in m.modules())}
    sites = [s for s in found.sites if id(s.module) in holding and id(s.module) not in inside]
    for index, site in enumerate(sites):
        site.index = index
    found.sites = sites
    return found


def _walk(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()
    for root_name, root in roots.items():
        scripted: list[str] = []
        for name, module in root.named_modules():
            full = ".".join(part for part in (root_name, name) if part)
            if id(module) in seen or any(f"{full}.".startswith(prefix) for prefix in scripted):
                continue
            if isinstance(module, torch.jit.ScriptModule):
                scripted.append(f"{full}.")
            seen.add(id(module))
            yield full, module


def _why_not(name: str, param: nn.Parameter, device: torch.device, overlapping: set[int]) -> str | None:
    """Why a parameter cannot be streamed, None if it can."""
    if param.device.type == "meta":
        raise ConfigError(f"parameter {name!r} is on the meta device and has no values: load it first (fmstream.load)")
    if type(param) is not nn.Parameter:
        return f"it is a {type(param).__name__}"
    if param.layout is not torch.strided or param.is_quantized or param.is_conj() or param.is_neg():
        return "its layout is not strided"
    if param.device.type != "cpu":
        raise ConfigError(
            f"parameter {name!r} is on {param.device}: move the pipeline to the CPU; device={str(device)!r} says "
            f"where it executes"
        )
    if param.numel() == 0:
        return "it has no elements"
    if span_bytes(param) > MAX_SPREAD * param.numel() * param.element_size():
        return "its elements lie far apart in memory"
    if id(param) in overlapping:
        return "it shares memory with another parameter"
    return None


def _overlapping(modules: Mapping[str, nn.Module]) -> set[int]:
    """``id`` of parameters whose memory overlaps that of another parameter object."""
    params = {id(p): p for m in modules.values() for p in m._parameters.values() if type(p) is nn.Parameter}
    spans = []
    for key, param in params.items():
        plain = param.layout is torch.strided and param.device.type == "cpu"
        if plain and param.numel():
            start = param.data_ptr()
            spans.append((start, start + span_bytes(param), key))
    spans.sort()
    found: set[int] = set()
    end, holder = 0, 0
    for start, stop, key in spans:
        if start < end:
            found |= {key, holder}
        if stop > end:
            end, holder = stop, key
    return found


def _reads(module: nn.Module) -> Iterator[nn.Module]:
    """Modules whose parameters ``module`` is known to read itself, beside its own."""
    if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
        yield module
    elif isinstance(module, nn.TransformerEncoder) and len(module.layers):
        yield module.layers[0]  # the check for the nested-tensor path


def _add_hidden_slots(module: nn.Module, by_id: Mapping[int, Master]) -> None:
    """Other places of a module that refer to its parameters, such as the flat weights of recurrent layers."""
    attributes = module.__dict__
    for key, value in attributes.items():
        if key in ("_parameters", "_modules", "_buffers"):
            continue
        if isinstance(value, list):
            for i, item in enumerate(value):
                if id(item) in by_id:
                    by_id[id(item)].deep.append((attributes, key, i))
        elif isinstance(value, dict):
            for name, item in value.items():
                if id(item) in by_id:
                    by_id[id(item)].deep.append((attributes, key, name))
        elif id(value) in by_id:
            by_id[id(value)].slots.append((attributes, key))
