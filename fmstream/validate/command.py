"""``fmstream validate``."""

from __future__ import annotations

from collections.abc import Iterator

from fmstream.report.report import describe_environment
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
    with find_place(device) as place:
        outcomes = tuple(_trials(place))
        validation = Validation(_about(place), outcomes)
    if as_json:
        print(validation.to_json())
    else:
        from fmstream.validate.page import print_validation

        print_validation(validation)
    return validation.status


def _trials(place: Place) -> Iterator[Outcome]:
    yield from try_weights(place)
    yield from try_kv(place)


def _about(place: Place) -> dict[str, str]:
    versions = ", ".join(f"{name} {value}" for name, value in describe_environment().items())
    return {"device": f"{place.device}, {place.name}", "versions": versions}
