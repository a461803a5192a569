"""The payload of weights: shows parameters in fast memory, and keeps every master true."""

from __future__ import annotations

import bisect
import gc
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fmstream.actors.compute import Executor
from fmstream.actors.prefetch import Piece
from fmstream.core.telemetry import Telemetry
from fmstream.device.device import Part
from fmstream.device.homes import FileHome, FileSet, Mappings, MemoryHome, dirty
from fmstream.payloads.absent import Absent, restore
from fmstream.payloads.bound import InGraph, make_bound, show_in_graph
from fmstream.payloads.embeddings import Tables, find_tables, release
from fmstream.payloads.kinds import is_dressed
from fmstream.payloads.master import Master
from fmstream.payloads.shells import Shell, put_back, show
from fmstream.payloads.sites import Site, Survey, ids_of, survey
from fmstream.payloads.spilled import Spilled
from fmstream.payloads.views import bytes_of, looks_into, point_at
from fmstream.payloads.watch import Watch, aliased

LEARNED_SHARE = 0.5
"""Part of the memory that a module may bind of its own and others' parameters together."""


class Weights:
    """All parameters of some modules.  One pass at a time shows them; the rest of the time they are stand-ins.

    It is the executor's payload and the masters' keeper.
    """

    def __init__(self, roots: Mapping[str, nn.Module], device: torch.device, telemetry: Telemetry) -> None:
        self.roots = dict(roots)
        self.device = device
        self.telemetry = telemetry
        self.executor: Executor | None = None
        self.sites: list[Site] = []
        self.masters: list[Master] = []
        self.shells: list[Shell] = []
        self.sizes: Sequence[int] = ()
        self.stack: list[Site] = []
        """Modules that are being called, innermost last."""
        self.learned = False
        """Whether a site was seen to read a parameter that it did not bind, or one was pinned."""
        self.changed_shape = False
        """Whether the modules are no longer what was surveyed."""
        self.homes_changed = False
        """Whether a master may have moved from its file to RAM."""
        self.comparing = False
        """Whether the bytes of what is bound now are compared with what they are when it is unbound."""
        self.pinned: set[int] = set()
        self.spilled = Spilled()
        self.tables: Tables | None = None
        self.as_weights: set[int] = set()
        """``id`` of tables that are streamed as a whole."""
        self.unbound: set[int] = set()
        """Tables that nothing binds: only their rows are in fast memory."""
        self.in_place: set[int] = set()
        self.fault_bytes = 0
        self._watch_grads = False
        self._exposed: set[int] = set()
        self._replaced: dict[int, Master] = {}
        """What was surveyed, by index, where a parameter has come to hold other data since."""
        self._unshown: set[int] = set()
        """What is not shown in fast memory any more: it holds other data, or is left in place."""
        self._watch = Watch()
        self._files = FileSet()
        self._structure: list[tuple[dict[str, Any], tuple[Any, ...]]] = []

    # Coming and going

    def survey(self) -> Survey:
        """Find the parameters and where their masters lie; changes nothing in the modules."""
        # Of what is in no module any more, another tensor may have the id by now.
        present = ids_of(self.roots, self.device) if self.in_place or self.as_weights else set()
        self.in_place, self.as_weights = self.in_place & present, self.as_weights & present
        found = survey(self.roots, self.device, self, self.in_place)
        mappings = Mappings.snapshot()
        for master in found.masters:
            address = master.original.data_ptr()
            place = mappings.find(address, master.span)
            if place is not None and not dirty(address, master.span):
                master.home = FileHome(self._files.open(place[0]), place[1], master.span)
        self.masters = found.masters
        self.sites = found.sites
        self.shells = found.shells
        self.sizes = [master.num_bytes for master in found.masters]
        self.unbound = set()
        self.pinned.clear()
        self._replaced.clear()
        self._unshown.clear()
        self._exposed = aliased(self.masters, self.roots.values())
        return found

    def choose_tables(self) -> list[Master]:
        """Let large embedding tables be looked up by rows; they may go on being weights of other modules."""
        tables = find_tables(self.sites, self.masters, self.as_weights)
        self.unbound = release(self.sites, self.masters, tables)
        return [self.masters[index] for index in sorted(tables)]

    @property
    def unbound_bytes(self) -> int:
        """Bytes in fast memory that tables would take which nothing binds."""
        return sum(self.sizes[index] for index in self.unbound)

    def spill(self, directory: str) -> None:
        """Let masters that lie in RAM lie in a file in ``directory``; the modules are as before if this fails."""
        self.spilled.take([m for m in self.masters if not self.is_watched(m)], directory, self._files)

    def install(self) -> None:
        """Put the stand-ins into the modules."""
        for master in self.masters:
            for holder, key in master.slots:
                holder[key] = master.absent
            master.show_deep((master.original,), master.absent)
        show(self.shells, self.roots.values())
        self._structure = [
            (holder, tuple(holder.values()))
            for root in self.roots.values()
            for module in root.modules()
            for holder in (module._parameters, module._modules)
        ]

    def uninstall(self) -> None:
        """Put the user's parameters back wherever a stand-in, or what it showed, stands by now."""
        for master in [master.present() for master in self.masters]:
            master.show(master.shown(), master.original)
        put_back(self.shells, self.roots.values(), self)
        for root in self.roots.values():
            for module in root.modules():
                restore(module._parameters, self)
                restore(module._buffers, self)
        for master in self.masters:
            master.retire()
        self.shells = []
        self.masters = []  # each refers to a parameter of the user's, and so would look like somebody who holds it
        self._structure = []

    def close_files(self) -> None:
        """Close every file that masters were read from."""
        self._files.close()

    def structure_changed(self) -> bool:
        """Whether a parameter or a child of any module was replaced, added or removed."""
        if self.changed_shape:
            return True
        for holder, expected in self._structure:
            if len(holder) != len(expected):
                return True
            for value, known in zip(holder.values(), expected, strict=True):
                if value is not known:
                    return True
        return any(shell.is_changed for shell in self.shells)

    # Keeping masters true

    def refresh_masters(self) -> None:
        """Notice writes that went past the stand-ins: to the user's own parameter objects, or through aliases."""
        for master in self.masters:
            held = master.is_held
            original = master.original
            if not isinstance(master.absent, Absent):  # swapped; asked here for every parameter in every pass
                self.changed_shape = True
            moved = original.data_ptr() != master.address
            if moved or ((held or master.index in self._exposed) and master.is_outdated):
                # Other data, perhaps of another size: there is a new survey before it is used.
                master.present()
                self._exposed.discard(master.index)
                self.changed_shape = True
                continue
            if not original.is_inference() and original._version != master.seen_version:
                master.seen_version = original._version
                self._written_unseen(master)
            if original.requires_grad != master.requires_grad:
                master.follow_requires_grad()
            if held:
                self._exposed.add(master.index)
        for index in self._exposed:
            master = self.masters[index]
            if isinstance(master.home, MemoryHome) or dirty(master.original.data_ptr(), master.span):
                self._written_unseen(master)

    def _written_unseen(self, master: Master) -> None:
        # The memory holds the change, so it is the truth: no file is read over it.
        master.take_memory()
        self.changed(master)

    def _write_back(self, params: Sequence[int], part: Part) -> None:
        """Bring in-place writes to bound parameters to their masters, and keep these resident from now on."""
        for param in params:
            master = self.masters[param]
            if master.bound is None or master.is_bound_swapped or master.present() is not master:
                continue
            with torch.inference_mode(False), torch.no_grad():
                present = part.read(master.bound.data_ptr() - part.address, master.span)
                if not torch.equal(present, master.host_bytes()):
                    master.write_back(present)
                    self._watch.forget(param)
                    self._pin(param)

    def _compare(self, params: Sequence[int], offsets: Sequence[int], part: Part) -> None:
        """Bring writes that no count shows to the masters, and leave these parameters in place from now on."""
        began = time.perf_counter()
        for param, offset in zip(params, offsets, strict=True):
            master = self.masters[param]
            if master.bound is not None and self._watch.has_changed(param, part, offset, master.span):
                master.write_back(part.read(offset, master.span))
                self.left_in_place(master)
        self._did_not_compute(began)

    def _did_not_compute(self, since: float) -> None:
        """The compute clock stands while bytes are compared: later passes do without."""
        if self.executor is not None:
            self.executor.loads.waited += time.perf_counter() - since

    def settle_aliases(self) -> None:
        """Bring writes through views of faulted values to their masters; the pass is over."""
        self.bring_aliases()
        self._watch.clear()

    def bring_aliases(self) -> None:
        """Bring what was written through them so far."""
        if not self._watch.aliases:
            return
        for master, value in self._watch.written_aliases():
            master.write_back(bytes_of(value, master.span))

    def _pin(self, index: int) -> None:
        if index not in self.pinned:
            self.pinned.add(index)
            self.learned = True

    # The masters' keeper

    def count_fault(self, master: Master) -> None:
        """Count it; inside a pass its reader is one that binds the parameter from now on."""
        self.bring_aliases()
        reader = self.stack[-1] if self.stack else None
        name = reader.name if reader is not None else "outside any forward"
        counted = self.telemetry.faults.setdefault((master.name, name or "the module itself"), [0, 0])
        counted[0] += 1
        counted[1] += master.span
        self.fault_bytes += master.span
        known = reader is None or master.index in reader.params
        if reader is not None and not known and self._is_present(master) and self._may_bind(reader, master):
            reader.params.append(master.index)
            self.learned = True

    def _may_bind(self, reader: Site, master: Master) -> bool:
        """Whether a reader may bind one more parameter: one that reads a whole model must not need it all at once."""
        executor = self.executor
        if executor is None:
            return False
        num_bytes = sum(self.sizes[p] for p in reader.params) + master.num_bytes
        return num_bytes <= LEARNED_SHARE * executor.arena.num_bytes

    def note_alias(self, master: Master, value: torch.Tensor) -> bool:
        """Within a pass a view of the value is as good as one of the master: writes to it are brought back."""
        if self.stack:
            self._watch.note(master, value)
            return True
        if isinstance(master.home, MemoryHome) and value.data_ptr() == master.home.address:
            self.note_exposed(master)
            return True
        return False

    def note_exposed(self, master: Master) -> None:
        """Look at this master's memory before every pass."""
        if self._is_present(master):
            self._exposed.add(master.index)

    def left_in_place(self, master: Master) -> None:
        """From the next pass on it is not streamed."""
        self.bring_aliases()
        self.in_place.add(id(master.original))
        self.changed_shape = True
        if master.bound is None and self._is_present(master):
            self._unshown.add(master.index)

    def is_watched(self, master: Master) -> bool:
        """Whether somebody may look into a master's memory and write it unseen, so that it must stay where it is."""
        return master.index in self._exposed

    def stream_table(self, master: Master) -> None:
        """From the next pass on a table is streamed as a whole: gradients go through it."""
        if id(master.original) not in self.as_weights:
            self.as_weights.add(id(master.original))
            self.changed_shape = True
            self.telemetry.notes.append(
                f"{master.name} needs a gradient, so it streams as a whole instead of by rows: call under "
                f"torch.no_grad(), or freeze it, where no gradient is wanted"
            )

    def changed(self, master: Master) -> None:
        """Renew copies in fast memory."""
        self.homes_changed = True
        if self.tables is not None:
            self.tables.changed(master)
        if self.executor is None or not self._is_present(master) or master.index in self._replaced:
            return
        self.executor.refresh(master.index)
        if self.executor.slab is not None:
            # Casts of a tensor that is shown again may be remembered elsewhere (autocast): show another one.
            for part in self.executor.slab.parts():
                for key in [key for key in part.shown if key[0] == master.index]:
                    part.drop(key)

    @property
    def is_in_pass(self) -> bool:
        """Whether a module is being called."""
        return bool(self.stack)

    def succeeded(self, master: Master, successor: Master) -> None:
        """Survey again before the next pass; in this one the successor is not bound, for it may be of another size."""
        self._replaced.setdefault(master.index, master)
        self._unshown.add(master.index)
        self.masters[master.index] = successor
        self.changed_shape = True

    def sharing(self, master: Master) -> list[Master]:
        """The masters in the same storage."""
        storage = master.original.untyped_storage()._cdata
        every = dict.fromkeys((master, *self.masters))
        return [each for each in every if each.original.untyped_storage()._cdata == storage]

    def settle(self) -> None:
        """Wait for every copy that is on its way."""
        if self.executor is not None:
            self.executor.settle()
        if self.tables is not None:
            self.tables.settle()

    def _is_present(self, master: Master) -> bool:
        """Whether a master has not been succeeded by another one."""
        return master.index < len(self.masters) and self.masters[master.index] is master

    def _surveyed(self, param: int) -> Master:
        """The master whose bytes are copied to fast memory for a parameter."""
        return self._replaced.get(param) or self.masters[param]

    # Gradients

    def begin_graph(self) -> None:
        """A graph is being built in a pass that began without one: parameters in it must get their gradients."""
        if not self._watch_grads:
            self._watch_grads = True
            for master in self.masters:
                master.watch_grad()

    def end_graph(self) -> None:
        """The pass is over."""
        self._watch_grads = False

    def bound_at(self, address: int) -> Master | None:
        """The parameter that is shown at an address of fast memory."""
        for master in self.masters:
            if master.bound is not None:
                start = master.bound.data_ptr()
                if start <= address < start + master.num_bytes:
                    return master
        return None

    # The executor's payload

    def pieces(self, param: int, address: int) -> Iterable[Piece]:
        """One copy of the whole span."""
        master = self._surveyed(param)
        return (Piece(master.home, 0, address, master.span),)

    def bind(self, param: int, part: Part, offset: int) -> None:
        """Show a view of fast memory, unless the parameter has come to hold other data or is left in place."""
        if param in self._unshown:
            return
        master = self.masters[param]
        bound = part.shown.get((param, offset))
        in_graph = master.requires_grad and torch.is_grad_enabled() and not is_dressed(master.original)
        if bound is None or in_graph or bound.requires_grad != master.requires_grad:
            dtype = master.dtype
            view = part.typed(dtype).as_strided(master.size, master.stride, offset // dtype.itemsize)
            if in_graph:
                bound = show_in_graph(master, view)
            else:
                bound = make_bound(master, view)
                part.drop((param, offset))
                part.keep((param, offset), bound)
        master.bind(bound, part.address + offset)
        if self.comparing and self.device.type == "cpu":
            began = time.perf_counter()
            self._watch.take(param, part, offset, master.span)
            self._did_not_compute(began)
        if self._watch_grads:
            master.watch_grad()

    def unbind(self, params: Sequence[int], offsets: Sequence[int], part: Part) -> None:
        """Show the stand-ins again; in-place writes are brought to the masters first."""
        masters, shown = self.masters, part.shown
        if part.was_written() or any(_was_written(masters[param]) for param in params):
            self._write_back(params, part)
        if self._watch.checksums:
            self._compare(params, offsets, part)
        for param, offset in zip(params, offsets, strict=True):
            master = masters[param]
            if master.bound is not None and not master.unbind():
                self.changed_shape = True
            kept = shown.get((param, offset))
            # Besides the dict, this frame and the call: somebody took the tensor along, or it may have other memory.
            if kept is not None and (sys.getrefcount(kept) > 3 or param in self._unshown):
                part.drop((param, offset))

    def rewrite(self, param: int, part: Part, offset: int) -> None:
        """Copy the master's present bytes over a copy in fast memory."""
        part.overwrite(offset, self.masters[param].host_bytes())
        self._watch.forget(param)

    def escaped(self, params: Sequence[int]) -> None:
        """Keep these resident: a tensor that outlived their use looks into them."""
        for param in params:
            self._pin(param)

    def outlived(self, params: Sequence[int], offsets: Sequence[int], part: Part) -> None:
        """Somebody looks into the part longer than it is shown: let them look into the masters instead.

        These parameters are left in place from now on; where the tensor cannot be found, all in the part are.
        """
        found = False
        for tensor in gc.get_objects():
            kind = type(tensor)  # `isinstance` would run code of any object that there is
            if issubclass(kind, torch.Tensor) and kind is not Absent and looks_into(tensor, part):
                start = tensor.storage_offset() * tensor.element_size()  # an empty one has no address
                at = bisect.bisect_right(offsets, start) - 1
                master = self._surveyed(params[at])
                self.in_place.add(id(master.original))
                point_at(master, tensor, start - offsets[at])
                found = True
        if not found:
            self.in_place |= {id(self.masters[param].original) for param in params}
        self.changed_shape = True


def _was_written(master: Master) -> bool:
    return isinstance(master.bound, InGraph) and master.is_bound_written
