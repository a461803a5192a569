"""What a policy is, and where policies enter their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fmstream.core.plan import Costs, Limits, Plan
from fmstream.core.trace import Trace


class Policy(Protocol):
    """A pure function from what was seen, what is allowed and what moving costs to a plan.

    Raises `fmstream.errors.MemoryBudgetError` where no plan fits the memory.
    """

    def __call__(self, trace: Trace, limits: Limits, costs: Costs) -> Plan: ...


registry: dict[str, Policy] = {}
"""Policies by name; `fmstream.policies` fills it."""


def register(name: str) -> Callable[[Policy], Policy]:
    """Decorator that enters a policy under ``name``."""

    def enter(policy: Policy) -> Policy:
        if name in registry:
            raise AssertionError(f"two policies are named {name!r}")
        registry[name] = policy
        return policy

    return enter
