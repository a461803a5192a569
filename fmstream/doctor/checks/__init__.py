"""The checks, each one small function over the machine."""

from __future__ import annotations

from typing import Final

from fmstream.doctor.checks import build, card, driver, errors, link, memory, trials
from fmstream.doctor.checks.check import Check

CHECKS: Final[tuple[Check, ...]] = (
    card.device_memory,  # before trials take some of it
    driver.driver,
    driver.driver_versions,
    driver.wsl,
    driver.driver_model,
    driver.shared_memory,
    driver.compute_capability,
    build.torch_build,
    build.kernel_build,
    link.link_width,
    link.link_generation,
    link.path_to_root,
    trials.pinned_memory,
    trials.pinned_copies,
    trials.pageable_copies,
    trials.both_ways,
    errors.replays,
    errors.bus_errors,
    link.power_saving,
    link.runtime_power,
    link.bar1,
    card.spill,
    card.ecc,
    card.replaced_rows,
    card.clocks,
    card.temperature,
    memory.host_memory,
    memory.commit,
    memory.numa,
    memory.model_files,
    memory.vc_runtime,
    memory.compression,
    trials.memory_trial,
    trials.round_trip,
)
"""In the order in which they run; findings are listed by number."""
