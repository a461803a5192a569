"""Host memory and the file behind the pool: limits, refusals, full disks, and what errors say."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fmstream import PagedCache, emulator
from fmstream.device.pagefile import PageFile
from fmstream.errors import ConfigError, MemoryBudgetError, StreamError
from fmstream.payloads import budget
from fmstream.payloads.kv.cache import KvStatistics
from fmstream.payloads.kv.hostpages import HostPages
from tests.kv.kit import compare, fresh, generate, llama, model_on, parts, plain_cache, prompt

PAGE_BYTES = 2 * 2 * 8 * 8 * 4
LAYER = 7


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("host_pages", [0, 1, 4, 1000])
def test_a_host_tier_smaller_than_the_pool(device: str, host_pages: int, tmp_path: Path) -> None:
    fresh("late")
    options = {"kv_host_memory": host_pages * PAGE_BYTES, "spill_dir": tmp_path}
    did = compare(model_on(llama, device), prompt(30), LAYER + 3, cache_options=options).did
    assert did.recalled_bytes > 0
    assert did.host_bytes <= max(4096, host_pages * PAGE_BYTES + 4095)
    assert (did.file_written_bytes > 0) == (did.file_read_bytes > 0) == (host_pages < 1000)
    assert os.listdir(tmp_path) == []


def test_without_a_file_the_error_names_all_tiers_and_what_helps() -> None:
    fresh()
    model = model_on(llama, "emu")
    cache = PagedCache(model.config, 8, page_tokens=8, kv_host_memory=3 * PAGE_BYTES)
    with pytest.raises(MemoryBudgetError) as caught:
        generate(model, prompt(30), cache)
    said = str(caught.value)
    for part in (
        "frames on emu:0",
        "host tier holds",
        "no file tier",
        "spill_dir",
        "kv_host_memory",
        "kv_cache_max_pages",
    ):
        assert part in said
    cache.check()
    del caught  # its frames hold the keys of a layer
    cache.reset()
    expected = generate(model, prompt(8), plain_cache(model), max_new_tokens=4)
    assert torch.equal(generate(model, prompt(8), cache, max_new_tokens=4), expected)
    cache.close()


def fail_after(monkeypatch: pytest.MonkeyPatch, num_writes: int, number: int = errno.ENOSPC) -> None:
    """Let the disk be full after some writes, or fail otherwise."""
    step, seen = PageFile._step, [0]

    def limited(self: PageFile, view: memoryview, offset: int) -> int:
        seen[0] += 1
        if seen[0] > num_writes:
            raise OSError(number, os.strerror(number))
        return step(self, view, offset)

    monkeypatch.setattr(PageFile, "_step", limited)


@pytest.mark.parametrize("num_writes", [0, 1, 5])
def test_a_full_disk_is_an_error_and_loses_nothing(
    num_writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh()
    fail_after(monkeypatch, num_writes)
    cache = PagedCache(model_on(llama, "emu").config, 6, page_tokens=8, kv_host_memory=0, spill_dir=tmp_path)
    held: list[tuple[int, torch.Tensor]] = []
    with pytest.raises(MemoryBudgetError, match=r"the disk of .* is full: give a spill_dir with room"):  # noqa: PT012
        for number in range(20):
            values = torch.full((1, 2, 8, 8), float(number), device="emu")
            keys, _ = cache.update(values, values, number % 4)
            held = [(layer, kept) for layer, kept in held if layer != number % 4] + [(number % 4, keys.cpu())]
            del keys
    cache.check()
    monkeypatch.undo()  # somebody made room
    for layer, kept in held:
        assert torch.equal(cache.layers[layer].keys.cpu(), kept)
    cache.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("num_writes", range(3, 9))
def test_tokens_that_are_refused_are_not_stored(
    num_writes: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh()
    fail_after(monkeypatch, num_writes, number)
    cache = PagedCache(model_on(llama, "emu").config, 7, page_tokens=8, kv_host_memory=0, spill_dir=tmp_path)
    held = [torch.zeros(1, 2, 0, 8)] * 4
    for step in range(24):
        new = torch.full((1, 2, 8, 8), float(step))
        try:
            cache.update(new.to("emu"), new.to("emu"), step % 4)
        except (MemoryBudgetError, StreamError):
            break
        held[step % 4] = torch.cat([held[step % 4], new], 2)
    monkeypatch.undo()
    for layer, kept in zip(cache.layers, held, strict=True):
        assert layer.get_seq_length() == kept.shape[2]
        assert kept.numel() == 0 or torch.equal(layer.keys.cpu(), kept)
    cache.check()
    cache.close()


@pytest.mark.parametrize("has_file", [True, False])
def test_host_memory_that_the_system_does_not_give(
    has_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh()

    def refuse(self: HostPages, num_pages: int) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(HostPages, "add", refuse)
    model = model_on(llama, "cpu")
    if has_file:
        assert compare(model, prompt(30), LAYER, cache_options={"spill_dir": tmp_path}).did.file_pages > 0
        return
    with pytest.raises(MemoryBudgetError, match="the host tier holds 0 bytes of all but its floor"):
        generate(model, prompt(30), PagedCache(model.config, LAYER, page_tokens=8))


def test_another_failure_of_a_write_names_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()

    def broken(self: PageFile, view: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(PageFile, "_step", broken)
    model = model_on(llama, "emu")
    cache = PagedCache(model.config, 7, page_tokens=8, kv_host_memory=0, spill_dir=tmp_path)
    with pytest.raises(StreamError, match=r"the file tier .* cannot be written \(.*Input/output") as caught:
        generate(model, prompt(30), cache)
    assert isinstance(caught.value.__cause__, OSError)
    cache.check()
    cache.close()


def test_the_floor_of_host_memory_sends_pages_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()
    monkeypatch.setattr(budget, "available_bytes", lambda: 0)
    did = compare(model_on(llama, "cpu"), prompt(30), LAYER, cache_options={"spill_dir": tmp_path}).did
    assert did.host_bytes == 0
    assert did.file_read_bytes == did.recalled_bytes > 0


def test_a_refusal_to_pin_is_told_and_changes_no_result() -> None:
    fresh("late", pinned_cap=4096)
    notes: list[str] = []
    did = compare(model_on(llama, "emu"), prompt(30), LAYER, cache_options={"note": notes.append}).did
    assert did.recalled_bytes > 0
    assert len(notes) == 1
    assert "refused to pin" in notes[0]
    assert "pageable" in notes[0]


def test_pinned_memory_is_given_back_when_the_cache_goes() -> None:
    machine = fresh()
    model = model_on(llama, "emu")
    cache: Any = PagedCache(model.config, LAYER, page_tokens=8)
    generate(model, prompt(30), cache)
    assert machine.pinned.charged_bytes > 0
    del cache
    assert machine.pinned.charged_bytes == 0
    machine.synchronize()
    assert not machine.reports


def test_a_folder_that_went_away(tmp_path: Path) -> None:
    fresh()
    model, folder = model_on(llama, "cpu"), tmp_path / "none"
    folder.mkdir()
    cache = PagedCache(model.config, LAYER, page_tokens=8, kv_host_memory=0, spill_dir=folder)
    folder.rmdir()
    with pytest.raises(ConfigError, match=r"no file for KV pages can be made in .*none .*give another spill_dir"):
        generate(model, prompt(30), cache)


def test_a_pool_smaller_than_a_layer_names_the_least() -> None:
    fresh()
    model = model_on(llama, "emu")
    cache = PagedCache(model.config, LAYER - 1, page_tokens=8)
    with pytest.raises(MemoryBudgetError, match=rf"kv_cache_max_pages={LAYER - 1} .* has {LAYER} pages of 8 tokens"):
        generate(model, prompt(30), cache)
    cache.check()


def test_a_device_without_room_for_the_pool() -> None:
    fresh(capacity=4 << 20)
    model = model_on(llama, "emu")
    with pytest.raises(MemoryBudgetError, match=r"no room for 9999 pages of 1024 bytes .* smaller kv_cache_max_pages"):
        generate(model, prompt(30), PagedCache(model.config, 9999, page_tokens=8))


@pytest.mark.parametrize("at_pass", [1, 3])
def test_pages_leave_when_the_devices_memory_runs_short(at_pass: int) -> None:
    machine = fresh("late", capacity=64 << 20)
    model = model_on(llama, "emu")
    ids = prompt(50).to("emu")
    plain, hog = plain_cache(model), []
    cache = PagedCache(model.config, 30000, page_tokens=8, cpu_offload_threshold_mb=10)
    sizes: list[KvStatistics] = []
    for number, (begin, end) in enumerate(((0, 40), (40, 41), (41, 42), (42, 50))):
        if number == at_pass:
            hog.append(torch.empty(26 << 20, dtype=torch.uint8, device="emu"))
        with torch.no_grad():
            theirs = model(ids[:, begin:end], cache=plain).logits.cpu()
            assert torch.equal(model(ids[:, begin:end], cache=cache).logits.cpu(), theirs)
        sizes.append(parts(cache)[0].statistics())
        cache.check()
    assert sizes[at_pass - 1].device_pages == 30000
    assert sizes[at_pass].device_pages < 27000
    assert sizes[at_pass].spilled_bytes > 0
    assert sizes[-1].recalled_bytes > 0
    cache.close()
    assert not machine.reports


def test_a_pool_without_a_size_grows_while_there_is_memory_and_then_spills() -> None:
    machine = fresh("late", capacity=3 << 20)
    model = model_on(llama, "emu")
    cache = PagedCache(model.config, page_tokens=8, cpu_offload_threshold_mb=1)
    ids, sizes = prompt(480).to("emu"), []
    plain = plain_cache(model)
    with torch.no_grad():
        for begin in range(0, 480, 40):
            model(ids[:, begin : begin + 40], cache=cache, logits_to_keep=1)
            cache.check()
            sizes.append(cache.statistics().device_pages)
        keys = [layer.keys.cpu() for layer in cache.layers]
        cache.close()
        for begin in range(0, 480, 40):
            model(ids[:, begin : begin + 40], cache=plain, logits_to_keep=1)
    assert sizes[0] < sizes[2] < sizes[5]
    assert all(torch.equal(left, right.keys.cpu()) for left, right in zip(keys, plain.layers, strict=True))
    assert not emulator.machine().reports
    assert machine.statistics().num_ooms == 0


@pytest.mark.parametrize("pages", [None, 40])
def test_a_pool_that_gave_memory_back_still_holds_a_layer_that_grows(pages: int | None) -> None:
    fresh("late")
    model = model_on(llama, "emu")
    options = {"page_tokens": 4, "cpu_offload_threshold_mb": 1 << 20}
    did = compare(model, prompt(23), pages, cache_options=options, max_new_tokens=40).did
    assert did.recalled_bytes > 0
    with pytest.raises(MemoryBudgetError, match=r"kv_cache_max_pages=11 is less than one layer"):
        compare(model, prompt(23), 11, cache_options=options, max_new_tokens=40)
