"""What a trial came to: its verdict, what was done, and the page that outcomes make."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from fmstream.errors import FmstreamError

SCHEMA: Final = 1
"""Version of what `Validation.to_json` writes."""

FAILURES: Final = (FmstreamError, RuntimeError, OSError, MemoryError, ValueError, AssertionError)
"""What a trial may end with where something does not work: errors of ours, of the device, of the disk, broken laws."""


class Verdict(StrEnum):
    """How a trial ended.  What cannot be tried here is NOT RUN, never FAIL."""

    PASS = "PASS"
    FAIL = "FAIL"
    NOT_RUN = "NOT RUN"


class Mismatch(Exception):
    """What was found is not what should be there; the message says both."""


def expect(holds: bool, said: str) -> None:
    """Raise `Mismatch` with ``said`` unless something holds."""
    if not holds:
        raise Mismatch(said)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One trial.

    Attributes:
        part: what it is about: "weights", "keys and values", "choice of pages".
        trial: its name.
        read: what was done, with figures, or what went wrong.
        seconds: what it took; 0 where it was not run, or is told of another that took it.
    """

    part: str
    trial: str
    verdict: Verdict
    read: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Validation:
    """All outcomes, and ``about`` what was validated, by name of the fact."""

    about: dict[str, str]
    outcomes: tuple[Outcome, ...]

    @property
    def counts(self) -> dict[Verdict, int]:
        """Outcomes by verdict."""
        found = Counter(outcome.verdict for outcome in self.outcomes)
        return {verdict: found[verdict] for verdict in Verdict}

    @property
    def status(self) -> int:
        """Exit status of the command: 1 if anything failed, else 0."""
        return int(self.counts[Verdict.FAIL] > 0)

    def to_json(self) -> str:
        """As indented JSON of a versioned schema."""
        rows: list[dict[str, Any]] = [
            {
                "part": outcome.part,
                "trial": outcome.trial,
                "verdict": str(outcome.verdict),
                "read": outcome.read,
                "seconds": round(outcome.seconds, 6),
            }
            for outcome in self.outcomes
        ]
        counts = {str(verdict): count for verdict, count in self.counts.items()}
        document = {"schema": SCHEMA, "about": self.about, "status": self.status, "counts": counts, "trials": rows}
        return json.dumps(document, indent=2)


def carry_out(part: str, name: str, trial: Callable[[], str]) -> Outcome:
    """Make a trial, which says what was done or raises."""
    began = time.perf_counter()
    try:
        verdict, read = Verdict.PASS, trial()
    except Mismatch as error:
        verdict, read = Verdict.FAIL, str(error)
    except FAILURES as error:
        verdict, read = Verdict.FAIL, f"{type(error).__name__}: {first_line(error)}"
    return Outcome(part, name, verdict, read, time.perf_counter() - began)


def first_line(error: BaseException) -> str:
    """The first line of a message, which may go on for pages."""
    return str(error).strip().partition("\n")[0] or "without a message"
