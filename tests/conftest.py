"""Settings for all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No test may fail because the machine is busy, and none may fail in one run only.
settings.register_profile(
    "fmstream",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fmstream")
