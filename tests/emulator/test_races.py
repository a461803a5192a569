"""Planted faults of a streaming loop: each is reported, and each corrupts data in some legal order."""

from __future__ import annotations

import pytest
import torch

from fmstream import emulator
from fmstream.emulator import SyncError
from tests.emulator.loops import (
    FAULTS,
    LATE,
    expected,
    is_wrong,
    reports_of,
    stream_weights,
    use_side_allocations,
    weights,
)


@pytest.mark.parametrize("execution", ["eager", "late", 1, 2, 3])
def test_a_loop_with_all_its_fences_is_right_and_reports_nothing(installed: None, execution: str | int) -> None:
    machine = emulator.reset(execution=execution, poison=True, check="record")
    with torch.no_grad(), emulator.host_guard():
        y = stream_weights(weights())
    assert machine.reports == []
    torch.testing.assert_close(y, expected())


@pytest.mark.parametrize("execution", ["eager", "late", 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_each_missing_fence_is_reported_with_its_call_sites(installed: None, fault: str, execution: str | int) -> None:
    reports = reports_of(fault, execution)
    assert reports
    message = reports[0].message
    assert message.count("loops.py") >= 2
    assert "unsynchronised access" in message
    assert ("record_stream" in message) == (fault == "record_stream is left out")


@pytest.mark.parametrize("fault", FAULTS)
def test_each_missing_fence_corrupts_data_in_some_order(installed: None, fault: str) -> None:
    assert any(is_wrong(fault, execution) for execution in LATE)


@pytest.mark.parametrize("execution", ["eager", "late", 1, 2])
def test_record_stream_keeps_a_block_until_its_reader_is_done(installed: None, execution: str | int) -> None:
    machine = emulator.reset(execution=execution, check="record", poison=True)
    with torch.no_grad():
        y = use_side_allocations(weights(), record=True)
    assert machine.reports == []
    torch.testing.assert_close(y, expected())


def test_a_report_is_raised_at_the_access_that_shows_it(device: torch.device) -> None:
    emu = torch.emu
    source, target, side = torch.ones(1000).pin_memory(), torch.zeros(1000, device=device), emu.Stream()
    side.wait_stream(emu.current_stream())
    with emu.stream(side):
        target.copy_(source, non_blocking=True)
    with pytest.raises(SyncError, match="copy in on stream"):
        target + 1
    emu.synchronize()
    assert (target + 1).tolist() == [2.0] * 1000


def test_without_the_guard_the_host_is_not_watched(device: torch.device) -> None:
    machine = emulator.machine()
    source, target = torch.ones(1 << 20).pin_memory(), torch.zeros(1 << 20, device=device)
    target.copy_(source, non_blocking=True)
    source.zero_()
    assert machine.reports == []
    torch.emu.synchronize()
    target.copy_(source, non_blocking=True)
    with emulator.host_guard():
        assert source[:4].sum().item() == 0.0  # a read beside a read
        with pytest.raises(SyncError, match="on the host"):
            source.fill_(2.0)


MIXED = {
    "add": lambda x, host: x + host,
    "in place": lambda x, host: x.add_(host),
    "cat": lambda x, host: torch.cat([x, host]),
    "linear": lambda x, host: torch.nn.functional.linear(x, torch.ones(2, 3)),
    "where": lambda x, host: torch.where(x > 0, x, host),
    "assign": lambda x, host: x.index_put_((torch.tensor([0, 1, 2]),), host),
    "index of the host": lambda x, host: host[torch.arange(3, device=x.device)],
    "attention": lambda x, host: torch.nn.functional.scaled_dot_product_attention(
        *(t.view(1, 1, 3, 1) for t in (x, x, host))
    ),
    "out": lambda x, host: torch.add(x, x, out=host),
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_two_devices_are_not_mixed(device: torch.device, name: str) -> None:
    with pytest.raises(RuntimeError, match=r"same device|indices should be"):
        MIXED[name](torch.ones(3, device=device), torch.ones(3))


def test_what_cuda_takes_from_the_host_is_taken(device: torch.device) -> None:
    x = torch.arange(3.0, device=device)
    assert (x + torch.tensor(2.0)).tolist() == [2.0, 3.0, 4.0]
    assert x[torch.tensor([2, 0])].tolist() == [2.0, 0.0]
    x[torch.tensor([1])] = torch.tensor(5.0)
    assert x.tolist() == [0.0, 5.0, 2.0]
