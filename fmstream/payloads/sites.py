"""Which modules own which parameters, and which of these can be streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fmstream.errors import ConfigError
from fmstream.payloads import kinds
from fmstream.payloads.compiled import is_compiled
from fmstream.payloads.keeper import Keeper
from fmstream.payloads.master import Master
from fmstream.payloads.shells import Shell, Wrappers, is_host
from fmstream.payloads.truth import span_bytes

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
    is_unit: bool = False
    """It is compiled together with all that is in it."""
    is_whole: bool = False
    """It is compiled and outermost: called without the compiler where its weights come and go."""
    members: list[int] = field(default_factory=list)
    """Ids of all parameters in a compiled module."""

    @property
    def title(self) -> str:
        """Its name; that of its class where it has none."""
        return self.name or type(self.module).__name__


@dataclass(slots=True)
class Survey:
    """What discovery found.

    Attributes:
        sites: every module with a streamable parameter in it, outer ones first.
        masters: streamable parameters, each once.
        kept: names and bytes of parameters that are left in place, with the reason.
        whole: names of outermost modules that are compiled as a whole.
        shells: what is to be shown in place of wrappers.
    """

    sites: list[Site] = field(default_factory=list)
    masters: list[Master] = field(default_factory=list)
    kept: list[tuple[str, int, str]] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    shells: list[Shell] = field(default_factory=list)


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
    surveyor = _Surveyor(roots, device, keeper, in_place)
    for name, module in surveyor.modules.items():
        surveyor.take_own(name, module)
    surveyor.add_reads()
    return surveyor.finish(roots)


def ids_of(roots: Mapping[str, nn.Module], device: torch.device) -> set[int]:
    """``id`` of every parameter in some modules, and of the tensors in those that are wrappers."""
    wrappers = Wrappers(device)
    return {id(part.tensor) for _, module in _walk(roots) for part in _tensors(module, "", wrappers)}


class _Surveyor:
    """A survey on its way: see `survey`."""

    def __init__(
        self, roots: Mapping[str, nn.Module], device: torch.device, keeper: Keeper, in_place: set[int]
    ) -> None:
        self.modules = dict(_walk(roots))
        self._outermost = {id(root) for root in roots.values()}
        self._device = device
        self._keeper = keeper
        self._in_place = in_place
        self._found = Survey()
        self._wrappers = Wrappers(device)
        self._by_id: dict[int, Master] = {}
        self._kept: set[int] = set()
        self._overlapping = _overlapping(self.modules, self._wrappers)
        _leave_whole(self.modules, self._wrappers, self._overlapping, in_place)

    def take_own(self, name: str, module: nn.Module) -> None:
        """Make a module a site, with a master for each parameter of its own that can be streamed."""
        found = self._found
        if isinstance(module, torch.jit.ScriptModule):
            own_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
            found.kept.append((name, own_bytes, "it is a ScriptModule"))
            return
        own: list[int] = []
        for part in _tensors(module, name, self._wrappers):
            master = self._master(part, inner=part.holder is not module._parameters)
            if master is None:
                continue
            if not any(known is part.holder and slot == part.key for known, slot in master.slots):
                master.slots.append((part.holder, part.key))
            if master.index not in own:
                own.append(master.index)
        found.sites.append(Site(len(found.sites), name, module, own))

    def _master(self, part: kinds.Part, *, inner: bool) -> Master | None:
        """The master of a parameter, which may have been met before; None where it is left in place."""
        holder, _, name, param = part
        if id(param) in self._kept:
            return None
        master = self._by_id.get(id(param))
        if master is not None:
            return master
        reason = (
            "it is read or written where streaming cannot follow"
            if id(param) in self._in_place
            else _why_not(name, param, self._device, self._overlapping, inner=inner)
        )
        if reason is not None:
            self._kept.add(id(param))
            self._found.kept.append((name, kinds.num_bytes(param), reason))
            return None
        master = Master(len(self._found.masters), name, param, self._device, self._keeper)
        master.shell = self._wrappers.shell_at(holder)
        self._by_id[id(param)] = master
        self._found.masters.append(master)
        return master

    def add_reads(self) -> None:
        """Let sites bind what their modules are known to read from others, and compiled ones all that is in them."""
        for site in self._found.sites:
            module = site.module
            _add_hidden_slots(module, self._by_id)
            for reader_of in _reads(module, self._outermost):
                for index in _indices(reader_of, self._by_id, self._wrappers):
                    if index not in site.params:
                        site.params.append(index)
            if is_compiled(module):
                site.is_unit, site.is_whole = id(module) not in self._outermost, id(module) in self._outermost
                site.members = list(_indices(module, self._by_id, self._wrappers))

    def finish(self, roots: Mapping[str, nn.Module]) -> Survey:
        """Leave out the sites without a parameter in them, and those within a unit."""
        found = self._found
        inside = {
            id(child)
            for site in found.sites
            if _is_one_unit(site.module, self._outermost)
            for child in site.module.modules()
            if child is not site.module
        }
        owning = {id(site.module) for site in found.sites if site.params}
        holding = {id(m) for m in self.modules.values() if any(id(child) in owning for child in m.modules())}
        found.sites = [s for s in found.sites if id(s.module) in holding and id(s.module) not in inside]
        for index, site in enumerate(found.sites):
            site.index = index
        found.whole = [
            name or type(getattr(root, "_orig_mod", root)).__name__ for name, root in roots.items() if is_compiled(root)
        ]
        found.shells = self._wrappers.shells()
        return found


def _tensors(module: nn.Module, name: str, wrappers: Wrappers) -> Iterator[kinds.Part]:
    """What a module's own parameters consist of: themselves, or the tensors in those that are wrappers."""
    for key, shown in module._parameters.items():
        if shown is not None:
            for part in wrappers.parts(module._parameters, key, f"{name}.{key}" if name else key):
                yield part._replace(tensor=_user_tensor(part.tensor))


def _leave_whole(
    modules: Mapping[str, nn.Module], wrappers: Wrappers, overlapping: set[int], in_place: set[int]
) -> None:
    """On another device a wrapper is shown as a whole, so that it stays in place if one tensor in it does."""
    for name, module in modules.items():
        for part in _tensors(module, name, wrappers):
            shell = wrappers.shell_at(part.holder)
            if shell is None:
                continue
            kept = id(part.tensor) in in_place
            if kept or _why_not(part.name, part.tensor, wrappers.device, overlapping, inner=True) is not None:
                wrappers.leave_whole(shell)


def _user_tensor(shown: torch.Tensor) -> torch.Tensor:
    """The tensor of the user's that is shown, where it is one of ours."""
    master = shown.__dict__.get("master")
    return master.original if type(master) is Master else shown


def _indices(root: nn.Module, by_id: Mapping[int, Master], wrappers: Wrappers) -> Iterator[int]:
    """Ids of all parameters in a module."""
    seen: set[int] = set()
    for module in root.modules():
        for part in _tensors(module, "", wrappers):
            master = by_id.get(id(part.tensor))
            if master is not None and master.index not in seen:
                seen.add(master.index)
                yield master.index


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


def _why_not(name: str, param: torch.Tensor, device: torch.device, overlapping: set[int], *, inner: bool) -> str | None:
    """Why a parameter cannot be streamed, None if it can."""
    if param.device.type == "meta":
        raise ConfigError(f"parameter {name!r} is on the meta device and has no values: load it first (fmstream.load)")
    expected = torch.Tensor if inner else nn.Parameter
    dressed = kinds.is_dressed(param) and not param.requires_grad
    if dressed and not is_host(device):
        dressed = kinds.moves_as_bytes(param)
    if (type(param) is not expected and not dressed) or (inner and param.requires_grad):
        return f"it is a {type(param).__name__}"
    if param.layout is not torch.strided or param.is_quantized or param.is_conj() or param.is_neg():
        return "its layout is not strided"
    if param.device.type != "cpu":
        if param.device == device:
            return "it is on the device already"
        raise ConfigError(
            f"parameter {name!r} is on {param.device}: move the pipeline to the CPU; device={str(device)!r} says "
            f"where it executes"
        )
    if param.numel() == 0:
        return "it has no elements"
    if param.untyped_storage().nbytes() < param.storage_offset() * param.element_size() + span_bytes(param):
        return "its memory was given up"
    if span_bytes(param) > MAX_SPREAD * param.numel() * param.element_size():
        return "its elements lie far apart in memory"
    if id(param) in overlapping:
        return "it shares memory with another parameter"
    return None


def _overlapping(modules: Mapping[str, nn.Module], wrappers: Wrappers) -> set[int]:
    """``id`` of parameters whose memory overlaps that of another parameter object."""
    every = (part.tensor for module in modules.values() for part in _tensors(module, "", wrappers))
    params = {id(p): p for p in every if type(p) in (nn.Parameter, torch.Tensor) or kinds.is_dressed(p)}
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


def _is_one_unit(module: nn.Module, outermost: Set[int]) -> bool:
    """Whether a module is not seen to call those inside it: they are parts of one operator, or of compiled code."""
    if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
        return True
    return id(module) not in outermost and is_compiled(module)


def _reads(module: nn.Module, outermost: Set[int]) -> Iterator[nn.Module]:
    """Modules whose parameters ``module`` is known to read itself, beside its own."""
    if _is_one_unit(module, outermost):
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
