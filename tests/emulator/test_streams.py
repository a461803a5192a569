"""Streams and events of the device in virtual time."""

from __future__ import annotations

import threading

import pytest
import torch

from fmstream import emulator


def busy(device: torch.device, side: int = 512) -> torch.Tensor:
    x = torch.ones(side, side, device=device)
    return x @ x


def test_new_streams_differ_and_the_default_one_is_zero(device: torch.device) -> None:
    emu = torch.emu
    one, two = emu.Stream(), torch.Stream(device)
    assert len({one.stream_id, two.stream_id, emu.default_stream().stream_id}) == 3
    assert emu.default_stream().stream_id == 0
    assert emu.current_stream() == emu.default_stream()
    assert one != two
    assert isinstance(one, torch.Stream)


def test_a_stream_is_current_within_its_context(device: torch.device) -> None:
    emu = torch.emu
    side = emu.Stream()
    with emu.stream(side):
        assert emu.current_stream() == side
        with side, emu.stream(None):
            assert torch.accelerator.current_stream() == side
    assert emu.current_stream() == emu.default_stream()
    emu.set_stream(side)
    assert emu.current_stream() == side


def test_each_thread_has_a_current_stream_and_a_clock(device: torch.device) -> None:
    emu, machine = torch.emu, emulator.machine()
    side = emu.Stream()
    machine.charge(1.0)
    seen: list[object] = []

    def work() -> None:
        seen.extend((emu.current_stream().stream_id, machine.now))
        machine.join_clock(0.5)
        seen.append((torch.ones(3, device=device) * 2).tolist())
        seen.append(0.5 < machine.now < 0.6)

    with emu.stream(side):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [0, 0.0, [2.0, 2.0, 2.0], True]


def test_an_event_measures_the_work_between(device: torch.device) -> None:
    emu, card = torch.emu, emulator.machine().card
    x = torch.ones(2048, 2048, device=device)
    before, after = emu.Event(enable_timing=True), torch.Event(device, enable_timing=True)
    emu.synchronize()
    before.record()
    x @ x
    after.record()
    assert not after.query()
    with pytest.raises(RuntimeError, match="completed"):
        before.elapsed_time(after)
    after.synchronize()
    assert after.query()
    expected = 2 * 2048**3 / card.gemm_flops + card.kernel_seconds + card.launch_seconds
    assert before.elapsed_time(after) == pytest.approx(expected * 1e3, rel=1e-3)


def test_times_are_taken_of_recorded_events_with_timing_only(device: torch.device) -> None:
    emu = torch.emu
    with pytest.raises(RuntimeError, match="enable_timing"):
        emu.Event().elapsed_time(emu.Event())
    with pytest.raises(RuntimeError, match="recorded"):
        emu.Event(enable_timing=True).elapsed_time(emu.Event(enable_timing=True))


def test_an_event_never_recorded_is_done(device: torch.device) -> None:
    event = torch.emu.Event()
    event.synchronize()
    event.wait()
    assert event.query()


def test_the_host_runs_ahead_until_it_synchronises(device: torch.device) -> None:
    machine = emulator.machine()
    stream = torch.emu.current_stream()
    busy(device)
    ahead = machine.now
    assert not stream.query()
    stream.synchronize()
    assert stream.query()
    assert machine.now > ahead + 1e-6


def test_copies_and_kernels_of_two_streams_overlap(device: torch.device) -> None:
    emu, machine = torch.emu, emulator.machine()
    source = torch.ones(8 << 20, dtype=torch.uint8).pin_memory()
    target = torch.empty(8 << 20, dtype=torch.uint8, device=device)
    x = torch.ones(1024, 1024, device=device)
    emu.synchronize()
    machine.reset_statistics()
    began = machine.now
    side = emu.Stream()
    side.wait_stream(emu.current_stream())
    with emu.stream(side):
        target.copy_(source, non_blocking=True)
    for _ in range(10):
        x @ x
    emu.current_stream().wait_stream(side)
    target + 1
    emu.synchronize()
    found = machine.statistics()
    copying, computing = found.busy["copy in"], found.busy["compute"]
    assert copying == pytest.approx((8 << 20) / machine.card.h2d_bytes_per_second, rel=0.01)
    assert max(copying, computing) < machine.now - began < copying + computing


def test_a_wait_orders_a_stream_after_another(any_order: torch.device) -> None:
    emu = torch.emu
    source = torch.arange(4096.0).pin_memory()
    target = torch.zeros(4096, device=any_order)
    side, copied = emu.Stream(), emu.Event()
    side.wait_stream(emu.current_stream())
    with emu.stream(side):
        target.copy_(source, non_blocking=True)
        copied.record()
    emu.current_stream().wait_event(copied)
    assert torch.equal((target * 2).cpu(), source * 2)
    assert side.record_event() is not None


def test_virtual_time_is_the_same_in_every_run_and_order(installed: None) -> None:
    def run(execution: str | int) -> tuple[float, dict[str, float], int]:
        machine = emulator.reset(capacity=64 << 20, execution=execution)
        x = torch.randn(64, 64, device="emu")
        for _ in range(5):
            x = (x @ x).softmax(-1)
        x.sum().item()
        found = machine.statistics()
        return machine.now, found.busy, found.peak_allocated

    first = run("eager")
    assert all(run(execution) == first for execution in ("eager", "late", 3, 4))
