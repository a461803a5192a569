"""What a scenario is: a machine, and what the doctor has to say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fmstream.doctor.system import Wanted
from tests.doctor.machine import Machine

Said = tuple[str, str]
"""A verdict, and a pattern that what is told must match."""


@dataclass(frozen=True)
class Scenario:
    """A machine to build and what is expected of it by the number of the check."""

    name: str
    build: Callable[[Machine], Any]
    expected: dict[int, Said]

    @property
    def status(self) -> int:
        """The exit status that follows."""
        return int(any(verdict == "FAIL" for verdict, _ in self.expected.values()))


SCENARIOS: list[Scenario] = []


def expect(expected: dict[int, Said]) -> Callable[[Callable[[Machine], Any]], Callable[[Machine], Any]]:
    """Keep what is decorated as a scenario of its name."""

    def keep(build: Callable[[Machine], Any]) -> Callable[[Machine], Any]:
        SCENARIOS.append(Scenario(build.__name__, build, expected))
        return build

    return keep


def no_load(machine: Machine, **wanted: Any) -> None:
    """The user asks for no load on the card."""
    machine.wanted = Wanted(is_measured=False, **wanted)
