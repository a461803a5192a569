"""What a check is: a number, a name, a topic, and one function that looks at the machine or at one card of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from fmstream.doctor.gpus import Gpu
from fmstream.doctor.system import System
from fmstream.doctor.verdict import Finding, Result, not_here, unknown

MachineCheck = Callable[[System], Result]
CardCheck = Callable[[System, Gpu], Result]


@dataclass(frozen=True, slots=True)
class Check:
    """One check.  A function for cards is asked of each card, the other one where there is none or no such function."""

    number: int
    name: str
    topic: str
    of_machine: MachineCheck | None = None
    of_card: CardCheck | None = None

    def run(self, system: System) -> Iterator[Finding]:
        """Examine the machine, or each of its cards."""
        if self.of_card is not None and system.gpus:
            for gpu in system.gpus:
                yield self._finding(f"GPU {gpu.number}", partial(self.of_card, system, gpu))
        elif self.of_machine is not None:
            yield self._finding("machine", partial(self.of_machine, system))
        else:
            yield self._finding("machine", partial(not_here, "no card"))

    def _finding(self, subject: str, examine: Callable[[], Result]) -> Finding:
        try:
            result = examine()
        except Exception as error:
            # The other checks are still of use to somebody whose machine is odd enough for this one to stumble.
            what = f"the check itself failed: {type(error).__name__}: {error}"
            result = unknown(what, "a fault of fmstream: please report it, with what fmstream env prints")
        return Finding(self.number, self.name, self.topic, subject, result)


def per_machine(number: int, name: str, topic: str) -> Callable[[MachineCheck], Check]:
    """Make a function of the machine a check."""
    return lambda function: Check(number, name, topic, of_machine=function)


def per_card(number: int, name: str, topic: str) -> Callable[[CardCheck], Check]:
    """Make a function of the machine and a card a check of each card."""
    return lambda function: Check(number, name, topic, of_card=function)
