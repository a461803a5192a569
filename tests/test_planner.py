from __future__ import annotations

import pytest

from fmstream.core.plan import Costs, Limits, Plan, Prediction, Unit
from fmstream.core.trace import Trace
from fmstream.payloads.passes import Route
from fmstream.payloads.planner import COMPARED, GAIN, REPAID_IN, Meter, Planner
from tests.traces import flat

MIB = 1 << 20
NUM = 20
RATE = 1e9


class Known(Meter):
    """The link of a machine without an accelerator, as if it had been seen."""

    @property
    def costs(self) -> Costs:
        return Costs(RATE)


def known(costs: Costs) -> Meter:
    """An accelerator's link, as it was probed."""
    meter = Meter()
    meter.known = costs
    return meter


def made(trace: Trace, seconds: float, num_resident: int) -> Plan:
    """A plan that keeps the first parameters and streams the others, one by one, predicted to last ``seconds``."""
    units = tuple(Unit(i, i, (i,), MIB) for i in range(num_resident, NUM))
    predicted = Prediction(seconds, trace.seconds, seconds, seconds, "link-bound")
    return Plan("made", frozenset(range(num_resident)), units, 2 * MIB, None, True, predicted)


def improved(seconds: float, num_resident: int, meter: Meter) -> bool:
    """Whether a plan that lasts ``seconds`` takes the place of one that streams ten of twenty units."""
    trace = flat([MIB] * NUM, [1e-6] * NUM)
    limits = Limits(16 * MIB, 4096)
    present = Route(trace, made(trace, 0.0, 10), limits.memory_bytes)
    planner = Planner(lambda trace, limits, costs: made(trace, seconds, num_resident), limits, meter)
    following = planner.improve(present, trace, frozenset())
    assert following is not None
    return following.plan is not present.plan


PRESENT = 10 * MIB / RATE
"""What the present plan takes, the link being all that counts."""
EXCHANGE = COMPARED * 10 * MIB / RATE / REPAID_IN


@pytest.mark.parametrize(("seconds", "taken"), [(GAIN * PRESENT - 1.1 * EXCHANGE, True), (0.9 * PRESENT, False)])
def test_another_plan_must_repay_the_residents_that_it_brings(seconds: float, taken: bool) -> None:
    assert improved(seconds, 10, Known()) is taken


def test_fewer_bytes_are_worth_an_exchange_only_where_it_is_cheap() -> None:
    assert not improved(PRESENT, 12, Known())
    assert improved(PRESENT, 12, known(Costs(RATE, shared=True)))


def test_on_an_accelerator_any_clear_gain_is_taken() -> None:
    assert improved(0.9 * PRESENT, 10, known(Costs(RATE)))
