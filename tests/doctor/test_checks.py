"""Every made-up machine gets the verdicts that it deserves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fmstream.doctor.checks import CHECKS
from fmstream.doctor.examine import examine
from fmstream.doctor.page import render_checkup
from fmstream.doctor.verdict import Checkup, Finding
from tests.doctor.machine import Machine
from tests.doctor.scenarios import SCENARIOS, Scenario


def told(finding: Finding) -> str:
    return "\n".join((finding.result.read, finding.result.limit, finding.result.advice))


def of(checkup: Checkup, number: int) -> Finding:
    """The first finding of a check."""
    return next(finding for finding in checkup.findings if finding.number == number)


def test_there_are_enough_machines_and_each_is_another() -> None:
    assert len(SCENARIOS) >= 60
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
    assert sum(scenario.name.startswith("misread") for scenario in SCENARIOS) >= 11


def test_every_check_is_expected_somewhere_and_has_its_own_number() -> None:
    numbers = [check.number for check in CHECKS]
    assert sorted(numbers) == list(range(1, 35))
    assert {number for scenario in SCENARIOS for number in scenario.expected} == set(numbers)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_verdicts(scenario: Scenario, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    scenario.build(machine)
    checkup = examine(machine.system)
    for number, (verdict, pattern) in scenario.expected.items():
        finding = of(checkup, number)
        assert (finding.verdict, re.search(pattern, told(finding), re.DOTALL) is not None) == (verdict, True), told(
            finding
        )
    # Nothing is wrong with it but what is expected.
    failed = {finding.number for finding in checkup.findings if finding.verdict == "FAIL"}
    assert failed == {number for number, (verdict, _) in scenario.expected.items() if verdict == "FAIL"}
    assert checkup.status == scenario.status
    assert [told(finding) for finding in checkup.findings if "fault of fmstream" in told(finding)] == []
    assert "bad chip" not in render_checkup(checkup)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_warnings_and_failures_name_limit_and_next_step(scenario: Scenario, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    scenario.build(machine)
    checkup = examine(machine.system)
    for finding in checkup.findings:
        assert finding.result.read
        if finding.verdict in ("WARN", "FAIL"):
            assert finding.result.advice, finding
    json.loads(checkup.to_json())


def test_only_the_expected_warnings_on_a_sound_machine(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.gpu()
    checkup = examine(machine.system)
    assert {finding.number for finding in checkup.findings if finding.verdict in ("WARN", "FAIL", "UNKNOWN")} == set()


def test_the_library_is_given_back(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.gpu()
    system = machine.system
    library = system.load_nvml()
    examine(system)
    assert not library.is_open


def test_no_card_is_put_under_load_where_that_is_not_wanted(tmp_path: Path) -> None:
    from fmstream.doctor.system import Wanted

    machine = Machine(tmp_path)
    machine.gpu()
    machine.wanted = Wanted(is_measured=False)
    checkup = examine(machine.system)
    assert machine.probes.asked == ["build sm_89"]
    assert {of(checkup, number).verdict for number in (12, 13, 14, 15, 33, 34)} == {"UNKNOWN"}


def test_a_card_is_put_under_load_once_and_its_free_memory_is_read_before(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    card = machine.gpu()
    machine.probes.during = lambda: card.answers.pop("MemoryInfo") and None
    checkup = examine(machine.system)
    assert machine.probes.asked.count("link_rates") == 1
    assert "23.5 GiB free" in of(checkup, 21).result.read


def test_a_check_that_stumbles_leaves_the_others(tmp_path: Path) -> None:
    machine = Machine(tmp_path)

    def stumble() -> frozenset[int]:
        raise ZeroDivisionError("odd machine")

    machine.gpu(files={"numa_node": "0"})
    machine.folders[0].joinpath("numa_node").write_text("0")
    system = machine.system
    system.sysfs.joinpath("devices/system/node/node1").mkdir()
    system.sysfs.joinpath("devices/system/node/node1/cpulist").write_text("16-31")
    system.allowed_cpus = stumble
    checkup = examine(system)
    assert of(checkup, 29).verdict == "UNKNOWN"
    assert "ZeroDivisionError: odd machine" in of(checkup, 29).result.read
    assert of(checkup, 30).number == 30
