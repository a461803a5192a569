"""``fmstream validate``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fmstream.errors import ConfigError
from fmstream.report.report import describe_environment, installed_version
from fmstream.validate.hits import tokens_of, try_hits
from fmstream.validate.kv import try_kv
from fmstream.validate.models import Speaker, find_speaker
from fmstream.validate.outcome import Outcome, Validation
from fmstream.validate.place import Place, find_place
from fmstream.validate.text import read_prompt
from fmstream.validate.weights import try_weights


def run_validate(*, device: str | None, kv: str | None, prompt: str | None, as_json: bool) -> int:
    """Make the trials, print what they came to, and return the exit status: 1 if anything failed.

    Args:
        device: "cpu", "cuda", "cuda:1", or "emu" for the emulated device; None is the card where there is one.
        kv: a language model whose choice of pages is measured, see `find_speaker`.
        prompt: the file of the text that it reads; None is the reference of the language.

    Raises:
        ConfigError: there is no such device, model or text.
    """
    if prompt is not None and kv is None:
        raise ConfigError(f"--prompt {prompt} is what the model of --kv reads: give that too")
    reader = None if kv is None else _find_reader(kv, prompt)
    with find_place(device) as place, _progress() as show:
        outcomes = []
        for outcome in _trials(place, reader):
            outcomes.append(outcome)
            show(outcome)
        validation = Validation(_about(place, kv, prompt), tuple(outcomes))
    if as_json:
        print(validation.to_json())
    else:
        from fmstream.validate.page import print_validation

        print_validation(validation)
    return validation.status


class _Reader(NamedTuple):
    """A language model and the tokens that it reads."""

    speaker: Speaker
    ids: torch.Tensor


def _find_reader(kv: str, prompt: str | None) -> _Reader:
    text = read_prompt(prompt)
    speaker = find_speaker(kv)
    return _Reader(speaker, tokens_of(speaker, text))


def _trials(place: Place, reader: _Reader | None) -> Iterator[Outcome]:
    yield from try_weights(place)
    yield from try_kv(place)
    if reader is not None:
        yield from try_hits(place, reader.speaker, reader.ids)


@contextmanager
def _progress() -> Iterator[Callable[[Outcome], None]]:
    """Tells of each outcome on the terminal, if standard error is one, until all are there."""
    if not sys.stderr.isatty():
        yield lambda outcome: None
        return
    from rich.console import Console

    with Console(stderr=True).status("the first trial") as status:
        yield lambda outcome: status.update(f"{outcome.part}: {outcome.trial}: {outcome.verdict}; the next one")


def _about(place: Place, kv: str | None, prompt: str | None) -> dict[str, str]:
    versions = describe_environment() | {"transformers": installed_version("transformers")}
    told = ", ".join(f"{name} {value}" for name, value in versions.items())
    about = {
        "device": f"{place.device}, {place.name}",
        "versions": told,
        "compared": "with the same model on the same device, unstreamed, with a plain cache",
    }
    if kv is not None:
        about["read"] = f"{prompt or 'the reference of the language'}, by {kv}"
    return about
