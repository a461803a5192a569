"""The law of twins: what is streamed to a device gives what the same module on the device gives, bit by bit."""

from __future__ import annotations

import pytest

from fmstream.emulator.backlog import Execution
from tests.accelerator.cases import CASES, Case
from tests.accelerator.kit import FRACTIONS, ORDERS, POLICIES, fresh, stream_and_compare
from tests.kit import assert_streams_fully

IN_FULL = ("mlp", "wandering", "keeping")
"""Cases that are streamed with every policy at every budget."""


@pytest.mark.parametrize("execution", ORDERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_streamed_steps_equal_those_of_the_twin(case: Case, execution: Execution) -> None:
    settings = [(policy, fraction) for policy in POLICIES for fraction in FRACTIONS]
    if execution != "eager" or case.name not in IN_FULL:
        settings = settings[::4]  # each policy and each budget once
    for policy, fraction in settings:
        fresh(execution)
        handle, _ = stream_and_compare(case.build(), case.step, 5, fraction, edited=case.edited, policy=policy)
        if case.plain:
            assert_streams_fully(handle)
