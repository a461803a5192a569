"""A checkup of the whole machine."""

from __future__ import annotations

import platform

from fmstream.core.reading import Unread
from fmstream.doctor.checks import CHECKS
from fmstream.doctor.system import System
from fmstream.doctor.verdict import Checkup
from fmstream.report import describe_environment


def examine(system: System) -> Checkup:
    """Run all checks.  Loads, where cards are to be measured, take some seconds for each card."""
    try:
        findings = [finding for check in CHECKS for finding in check.run(system)]
    finally:
        system.close()
    findings.sort(key=lambda finding: finding.number)
    return Checkup(_about(system), tuple(findings))


def _about(system: System) -> dict[str, str]:
    about = describe_environment()
    about["kernel"] = platform.release()
    if not isinstance(system.torch, Unread):
        about["torch"] = system.torch.version
    about["cards"] = ", ".join(gpu.name for gpu in system.gpus) or "none"
    return about
