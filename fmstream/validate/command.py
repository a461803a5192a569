"""``fmstream validate``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fmstream.report.report import describe_environment, installed_version
from fmstream.validate.kv import try_kv
from fmstream.validate.outcome import Outcome, Validation
from fmstream.validate.place import Place, find_place
from fmstream.validate.weights import try_weights


def run_validate(*, device: str | None, as_json: bool) -> int:
    """Make the trials, print what they came to, and return the exit status: 1 if anything failed.

    Args:
        device: "cpu", "cuda", "cuda:1", or "emu" for the emulated device; None is the card where there is one.

    Raises:
        ConfigError: there is no such device.
    """
    with find_place(device) as place, _progress() as show:
        outcomes = []
        for outcome in _trials(place):
            outcomes.append(outcome)
            show(outcome)
        validation = Validation(_about(place), tuple(outcomes))
    if as_json:
        print(validation.to_json())
    else:
        from fmstream.validate.page import print_validation

        print_validation(validation)
    return validation.status


def _trials(place: Place) -> Iterator[Outcome]:
    yield from try_weights(place)
    yield from try_kv(place)


@contextmanager
def _progress() -> Iterator[Callable[[Outcome], None]]:
    """Tells of each outcome on the terminal, if standard error is one, until all are there."""
    if not sys.stderr.isatty():
        yield lambda outcome: None
        return
    from rich.console import Console

    with Console(stderr=True).status("the first trial") as status:
        yield lambda outcome: status.update(f"{outcome.part}: {outcome.trial}: {outcome.verdict}; the next one")


def _about(place: Place) -> dict[str, str]:
    versions = describe_environment() | {"transformers": installed_version("transformers")}
    told = ", ".join(f"{name} {value}" for name, value in versions.items())
    return {
        "device": f"{place.device}, {place.name}",
        "versions": told,
        "compared": "with the same model on the same device, unstreamed, with a plain cache",
    }
