"""What a check says: verdicts, findings, and the checkup that they make."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

SCHEMA: Final = 1
"""Version of what `Checkup.to_json` writes."""


class Verdict(StrEnum):
    """How a finding is meant.  What cannot be read is UNKNOWN, never FAIL."""

    FAIL = "FAIL"
    WARN = "WARN"
    UNKNOWN = "UNKNOWN"
    INFO = "INFO"
    OK = "OK"


@dataclass(frozen=True, slots=True)
class Result:
    """What one check found.

    Attributes:
        read: what was read, with its value.
        limit: what it was held against; empty where there is no limit.
        advice: the next step; empty where there is none.
        applies: False where the check has no object on this machine.
    """

    verdict: Verdict
    read: str
    limit: str = ""
    advice: str = ""
    applies: bool = True


def ok(read: str, limit: str = "", advice: str = "") -> Result:
    """As it should be."""
    return Result(Verdict.OK, read, limit, advice)


def info(read: str, limit: str = "", advice: str = "") -> Result:
    """Worth knowing, neither good nor bad."""
    return Result(Verdict.INFO, read, limit, advice)


def warn(read: str, limit: str, advice: str) -> Result:
    """Costs speed or will bite."""
    return Result(Verdict.WARN, read, limit, advice)


def fail(read: str, limit: str, advice: str) -> Result:
    """Does not work, or gives wrong results."""
    return Result(Verdict.FAIL, read, limit, advice)


def unknown(read: str, advice: str = "", limit: str = "") -> Result:
    """Could not be read, or was read when it says nothing."""
    return Result(Verdict.UNKNOWN, read, limit, advice)


def not_here(why: str) -> Result:
    """The check has no object on this machine."""
    return Result(Verdict.INFO, why, applies=False)


@dataclass(frozen=True, slots=True)
class Finding:
    """A result with the check that gave it: its number, its name, its topic, and what was examined."""

    number: int
    check: str
    topic: str
    subject: str
    result: Result

    @property
    def verdict(self) -> Verdict:
        """The verdict of the result."""
        return self.result.verdict

    def to_dict(self) -> dict[str, Any]:
        """As one flat JSON object."""
        return {
            "number": self.number,
            "check": self.check,
            "topic": self.topic,
            "subject": self.subject,
            "verdict": str(self.verdict),
            "read": self.result.read,
            "limit": self.result.limit,
            "next_step": self.result.advice,
            "applies": self.result.applies,
        }


@dataclass(frozen=True, slots=True)
class Checkup:
    """All findings about a machine; ``about`` says which machine, by name of the fact."""

    about: dict[str, str]
    findings: tuple[Finding, ...]

    @property
    def counts(self) -> dict[Verdict, int]:
        """Findings by verdict, without those that do not apply."""
        found = Counter(finding.verdict for finding in self.findings if finding.result.applies)
        return {verdict: found[verdict] for verdict in Verdict}

    @property
    def status(self) -> int:
        """Exit status of the command: 1 if anything failed, else 0."""
        return int(self.counts[Verdict.FAIL] > 0)

    def to_json(self) -> str:
        """As indented JSON of a versioned schema."""
        document = {
            "schema": SCHEMA,
            "about": self.about,
            "status": self.status,
            "counts": {str(verdict): count for verdict, count in self.counts.items()},
            "findings": [finding.to_dict() for finding in self.findings],
        }
        return json.dumps(document, indent=2)
