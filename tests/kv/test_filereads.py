"""Pages come from the file ahead of need, in order, by workers; what goes wrong with that is told and undone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.scenarios import SLOW, replaced
from fmstream import PagedCache, emulator
from fmstream.actors.portable import read_at
from fmstream.actors.tickets import Ticket
from fmstream.core.jobs import Status
from fmstream.errors import StreamError
from fmstream.payloads.kv import filereads
from fmstream.payloads.kv.filereads import FileReads
from tests.kit_workers import replace_reads
from tests.kv.kit import checked, compare, fresh, generate, llama, model_on, plain_cache, prompt

LAYERS, LAYER_PAGES = 4, 6
SHAPE = (1, 2, 8 * LAYER_PAGES, 8)


def written(device: str, folder: Path, pages: int = 3 * LAYER_PAGES) -> tuple[PagedCache, list[Tensor]]:
    """A cache in which most pages of each layer lie in the file, and what it holds."""
    config = model_on(llama, "cpu").config
    cache = PagedCache(config, pages, page_tokens=8, kv_host_memory=0, spill_dir=folder)
    held = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(layer)) for layer in range(LAYERS)]
    for layer, values in enumerate(held):
        cache.update(values.to(device), (-values).to(device), layer)
    return cache, held


def reads_of(cache: PagedCache) -> FileReads:
    (pool,) = cache.pools
    return pool.tiers.reads


def append(cache: PagedCache, held: list[Tensor], layer: int) -> None:
    """One more token of a layer; all of it must be as it was written."""
    new = torch.full((1, 2, 1, 8), float(layer))
    keys, values = cache.update(new.to(cache.layers[0].device), -new.to(cache.layers[0].device), layer)
    held[layer] = torch.cat([held[layer], new], 2)
    assert torch.equal(keys.cpu(), held[layer])
    assert torch.equal(values.cpu(), -held[layer])


class Gate:
    """Lets reads of the file go on, or not."""

    def __init__(self, cache: PagedCache, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        self.threads: set[int] = set()
        self.error: OSError | None = None
        self.is_short = False
        replace_reads(reads_of(cache).workers, self._read, monkeypatch)

    def _read(self, fd: int, address: int, offset: int, num_bytes: int) -> int:
        self.threads.add(threading.get_ident())
        assert self.is_open.wait(60)
        if self.error is not None:
            raise self.error
        return 0 if self.is_short else read_at(fd, address, offset, num_bytes)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Nothing is read within."""
        self.is_open.clear()
        try:
            yield
        finally:
            self.is_open.set()


def let_end(cache: PagedCache) -> None:
    """Wait for what is being read, without landing it."""
    reads = reads_of(cache)
    for reading in reads._under_way:
        reads.workers.wait(reading.ticket)


@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_the_next_layer_is_read_while_this_one_is_computed(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh("late")
    cache, held = written(device, tmp_path)
    for layer in range(LAYERS):
        append(cache, held, layer)
    gate = Gate(cache, monkeypatch)
    ahead = 0
    for _ in range(3):
        for layer in range(LAYERS):
            let_end(cache)
            block = cache.layers[layer].block
            in_file = cache.layers[layer].pool.frames.table.frame[block.pages] < 0
            if in_file.any():  # the rest of it is read while it is needed
                append(cache, held, layer)
                continue
            with gate.closed():  # it returns though nothing can be read
                append(cache, held, layer)
                ahead += sum(not reads_of(cache).is_read(one) for one in reads_of(cache)._under_way)
    assert ahead > 0
    assert threading.get_ident() not in gate.threads
    with checked(cache):
        assert cache.statistics().file_read_bytes > 0


@pytest.mark.parametrize("leave", ["crop", "reset", "reorder", "free"])
def test_pages_that_are_not_wanted_any_more_while_they_are_read(
    leave: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh("late")
    cache, held = written("emu", tmp_path)
    gate = Gate(cache, monkeypatch)
    with gate.closed():
        (pool,) = cache.pools
        pool.enter(cache.layers[1].block)
        pool.prefetch(cache.layers[1].block)
        before = len(pool.frames._coming)
        assert before > 0
        if leave == "crop":
            cache.crop(-40)  # the first page is left
            held = [values[:, :, :8] for values in held]
        elif leave == "reset":
            cache.reset()
        elif leave == "reorder":
            cache.reorder_cache(torch.tensor([0]))
        else:
            pool.frames.vacate(cache.layers[1].block.pages[0, 1:4].copy())
        pool.check()
        after = len(pool.frames._coming)
        assert after == before if leave == "reorder" else after == 0 if leave == "reset" else after < before
    if leave == "reset":
        held = [values[:, :, :0] for values in held]
    for layer in range(LAYERS):
        append(cache, held, layer)
    cache.check()
    cache.close()
    assert not emulator.machine().reports


@pytest.mark.parametrize("pages", [1, 2, 3])
@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_memory_for_few_pages_is_used_again_and_again(
    device: str, pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh("late")
    monkeypatch.setattr(filereads, "READ_PAGES", pages)
    options = {"kv_host_memory": 0, "spill_dir": tmp_path}
    did = compare(model_on(llama, device), prompt(30), 9, cache_options=options).did
    assert did.file_read_bytes > 0
    assert os.listdir(tmp_path) == []


def test_frames_that_are_copied_over_hold_what_was_being_read(tmp_path: Path) -> None:
    fresh("late")
    cache, held = written("emu", tmp_path)
    (pool,) = cache.pools
    pool.enter(cache.layers[1].block)
    pool.prefetch(cache.layers[1].block)
    assert pool.frames._coming
    pool.resize(4 * LAYER_PAGES)
    for layer in range(LAYERS):
        append(cache, held, layer)
    with checked(cache):
        assert not emulator.machine().reports


# What goes wrong


def test_a_file_that_ends_early_names_the_tier_and_the_cache_can_be_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh()
    model = model_on(llama, "emu")
    cache = PagedCache(model.config, 9, page_tokens=8, kv_host_memory=0, spill_dir=tmp_path)
    generate(model, prompt(30), cache, max_new_tokens=4)
    with monkeypatch.context() as patched:
        Gate(cache, patched).is_short = True
        with pytest.raises(StreamError, match=r"the file tier .* cannot be read .*the file ends") as caught:
            generate(model, prompt(40), cache, max_new_tokens=4)
    assert str(tmp_path) in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    cache.check()
    del caught
    cache.close()
    expected = generate(model, prompt(30), plain_cache(model), max_new_tokens=4)
    with checked(cache):
        assert torch.equal(generate(model, prompt(30), cache, max_new_tokens=4), expected)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_read_that_fails_leaves_no_page_in_a_frame_that_did_not_come(
    ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh("late")
    cache, held = written("emu", tmp_path)
    (pool,) = cache.pools
    gate = Gate(cache, monkeypatch)
    gate.error = OSError(5, "Input/output error")
    if ahead:
        pool.enter(cache.layers[0].block)
        pool.prefetch(cache.layers[0].block)
    for _ in range(2):
        with pytest.raises(StreamError, match=r"cannot be read .*errno 5"):
            append(cache, held, 0)
        cache.check()
    gate.error = None  # the disk is back
    for layer in range(LAYERS):
        append(cache, held, layer)
    with checked(cache):
        assert not emulator.machine().reports


def test_an_interrupt_while_pages_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh("late")
    cache, held = written("emu", tmp_path)
    wait, left = reads_of(cache).workers.wait, [1]

    def interrupted(ticket: Ticket, timeout: float | None = None) -> bool:
        if left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        return wait(ticket, timeout)

    monkeypatch.setattr(reads_of(cache).workers, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        append(cache, held, 0)
    cache.check()
    for layer in range(LAYERS):
        append(cache, held, layer)
    with checked(cache):
        assert not emulator.machine().reports


# Order


class Late:
    """In place of workers: reads when it is asked whether it has, and tells the checker of order that it writes."""

    def __init__(self, num_workers: int) -> None:
        self._jobs: dict[Ticket, tuple[int, int, int, int]] = {}

    def read(self, fd: int, offset: int, destination: int, num_bytes: int, *, keep: object, name: str) -> Ticket:
        ticket = Ticket(self, name)  # type: ignore[arg-type]
        self._jobs[ticket] = (fd, destination, offset, num_bytes)
        return ticket

    def is_done(self, ticket: Ticket) -> bool:
        if ticket in self._jobs:
            fd, address, offset, num_bytes = self._jobs.pop(ticket)
            emulator.machine().host_access([], [(address, num_bytes)], "read by a worker")
            assert read_at(fd, address, offset, num_bytes) == num_bytes
            ticket.status = Status.DONE
        return ticket.status is not None

    def wait(self, ticket: Ticket) -> bool:
        return self.is_done(ticket)

    def cancel(self, ticket: Ticket) -> None:
        self._jobs.pop(ticket, None)
        ticket.status = Status.CANCELLED

    def close(self) -> None:
        pass


def reports(folder: Path, execution: Any) -> list[emulator.Report]:
    """What the checker says of layers that come through memory for two pages, on a card that the host runs ahead of."""
    machine = emulator.reset(SLOW, execution=execution, check="record", capacity=64 << 20, poison=True)
    cache, held = written("emu", folder)
    for _ in range(2):
        for layer in range(LAYERS):
            new = torch.full((1, 2, 1, 8), float(layer), device="emu")
            cache.update(new, -new, layer)
            held[layer] = torch.cat([held[layer], new.cpu()], 2)
    machine.synchronize()
    found = list(machine.reports)
    same = all(torch.equal(cache.layers[layer].keys.cpu(), held[layer]) for layer in range(LAYERS))
    assert same or found, "contents differ and no access was out of order"
    cache.close()
    return found


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filereads, "HostWorkers", Late)
    monkeypatch.setattr(filereads, "READ_PAGES", 2)


@pytest.mark.parametrize("execution", ["eager", "late", 1, 2, 3])
@pytest.mark.usefixtures("late")
def test_no_read_is_out_of_order(execution: Any, tmp_path: Path) -> None:
    assert not reports(tmp_path, execution)


def ignoring_copies(is_over: Callable[..., bool]) -> Callable[..., bool]:
    """A place is taken to be free as soon as it was landed, with its copy still under way."""
    return lambda self, reading: reading.point > 0 or is_over(self, reading)


@pytest.mark.parametrize("execution", ["eager", "late"])
@pytest.mark.usefixtures("late")
def test_without_the_wait_for_its_copy_a_place_is_written_too_early(execution: Any, tmp_path: Path) -> None:
    with replaced(FileReads, "_is_over", ignoring_copies):
        found = reports(tmp_path, execution)
    assert found
    assert all(report.kind == "race" for report in found)


def without_waiting(land: Callable[..., None]) -> Callable[..., None]:
    """Land what may not have been read yet."""

    def landed(self: FileReads, reading: Any, target: Tensor) -> None:
        workers, self.workers = self.workers, Done()  # type: ignore[assignment]
        try:
            land(self, reading, target)
        finally:
            self.workers = workers

    return landed


class Done:
    """Takes everything for done."""

    def wait(self, ticket: Ticket) -> bool:
        return True


@pytest.mark.usefixtures("late")
def test_without_the_wait_for_a_worker_other_bytes_are_there(tmp_path: Path) -> None:
    fresh("late")
    with replaced(FileReads, "land", without_waiting), pytest.raises(AssertionError):  # noqa: PT012
        cache, held = written("emu", tmp_path)
        for layer in range(LAYERS):
            append(cache, held, layer)
