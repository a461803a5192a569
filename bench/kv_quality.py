"""What a model answers when it attends to the pages of its cache that matter most: beside everything, and beside what
forgets the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from bench.contract import Bar, BenchError, Findings, Row, Workplace, num_cores, register
from bench.kv_peers import KeptTokens, attending
from bench.smollm2 import load
from fmstream import PagedCache
from fmstream.device.page_packing import pack_pages, packed_bytes
from fmstream.payloads.kv.choosing import Seen
from fmstream.payloads.kv.hits import HitMeter

CLAIM: Final = (
    "With 13.5 % of its keys and values on the device a real model finds the pass key that it finds with all of them, "
    "and the pages that it attends to are the ones that matter and are mostly there already."
)
BARS: Final = {
    "passkey_equal": Bar(at_least=1.0),
    "importance_hit": Bar(at_least=0.92),
    "position_hit": Bar(at_least=0.85),
    "paging_hit": Bar(at_least=0.90),
    "fallback_share": Bar(at_most=0.05),
}
BUDGET: Final = 0.135
PAGE_TOKENS: Final = 16
FILLER: Final = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
QUESTION: Final = "\nWhat is the pass key? The pass key is"
ANSWER_TOKENS: Final = 6
END: Final = 8
"""Last tokens of a prompt, which the model reads into a paged cache itself: they bring the pages for the first step."""
PROSE_FROM: Final = 20_000
"""Where in the text the prose begins, in characters."""


@dataclass(frozen=True, slots=True)
class Work:
    """How much is measured: repetitions of the filler in each context, depths of the key, those of them at which the
    others are asked too, tokens of prose, and steps in it."""

    fillers: tuple[int, ...]
    depths: tuple[float, ...]
    beside: tuple[float, ...]
    prose_tokens: int
    prose_steps: int


DEPTHS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
QUICK: Final = Work((44,), (0.1, 0.7), (0.7,), 1024, 16)
FULL: Final = Work((44, 88, 168), DEPTHS, DEPTHS, 2048, 256)


@register("kv_quality", CLAIM, BARS)
def run(place: Workplace) -> Findings:
    """Measure pass keys, then prose."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise BenchError("transformers is needed: pip install 'fmstream-runtime[test]'") from error
    place.need(1 << 30)
    before = torch.get_num_threads()
    torch.set_num_threads(num_cores())
    try:
        with torch.inference_mode():
            return Quality(place, *load(place.say)).run(QUICK if place.quick else FULL)
    finally:
        torch.set_num_threads(before)


class Quality:
    """One model, and what was measured of it so far."""

    def __init__(self, place: Workplace, model: Any, tokenizer: Any) -> None:
        self.say = place.say
        self.model = model
        self.tokenizer = tokenizer
        self.meter = HitMeter()
        self.rows: list[Row] = []
        self.num_equal = self.num_asked = 0
        self.num_pages = self.num_packed = 0

    def run(self, work: Work) -> Findings:
        """Everything."""
        for fillers in work.fillers:
            for depth in work.depths:
                self.ask(fillers, depth, beside=depth in work.beside)
        figures = {"passkey_equal": self.num_equal / self.num_asked}
        figures |= self.read(work.prose_tokens, work.prose_steps)
        rates = self.meter.rates()
        figures |= {
            "importance_hit": rates.importance,
            "position_hit": rates.position,
            "paging_hit": rates.paging,
            "fallback_share": rates.fallbacks,
            "packed_share": self.num_packed / self.num_pages,
        }
        return Findings(figures, self.rows)

    # Pass keys

    def ask(self, fillers: int, depth: float, *, beside: bool) -> None:
        """Hide a pass key in filler and ask for it, with each cache."""
        before, key = int(fillers * depth), str(10_137 + int(depth * 80_000))
        hidden = f"The pass key is {key}. Remember it. {key} is the pass key. "
        prompt = self.ids(FILLER * before + hidden + FILLER * (fillers - before))
        question = self.ids(QUESTION)
        row: Row = {"context": prompt.shape[1], "depth": depth, "key": key}
        for name, step in self.contenders(prompt, beside=beside):
            answer = self.answer(step, question)
            row[name] = answer if answer != row.get("exact") else "the same"
        self.num_asked += 1
        self.num_equal += row["chosen pages"] == "the same"
        self.rows.append(row)
        self.say(", ".join(f"{name} {value}" for name, value in row.items()))

    def answer(self, step: Callable[[torch.Tensor], torch.Tensor], question: torch.Tensor) -> str:
        """What comes behind a question, token by token, so that all of it is steps."""
        for token in question[0]:
            logits = step(token)
        found = []
        for _ in range(ANSWER_TOKENS):
            found.append(int(logits.argmax()))
            logits = step(torch.tensor(found[-1]))
        return str(self.tokenizer.decode(found)).strip()

    # Prose

    def read(self, num_tokens: int, num_steps: int) -> dict[str, float]:
        """Let each cache predict the last tokens of a text."""
        ids = self.ids(prose())[:, :num_tokens]
        prompt, rest = ids[:, : num_tokens - num_steps], ids[0, num_tokens - num_steps :]
        exact = torch.empty(0)
        figures: dict[str, float] = {}
        for name, step in self.contenders(prompt, beside=True):
            logits = torch.stack([step(token) for token in rest])
            loss = torch.nn.functional.cross_entropy(logits[:-1], rest[1:])
            if name == "exact":
                exact, exact_loss = logits, loss
            agreement = (logits.argmax(-1) == exact.argmax(-1)).float().mean().item()
            row = {"prose": num_tokens, "steps": num_steps, "contender": name, "agreement": agreement}
            self.rows.append(row | {"nats_lost_per_token": (loss - exact_loss).item()})
            if name == "chosen pages":
                figures = {"agreement": agreement, "nats_lost_per_token": (loss - exact_loss).item()}
        return figures

    # Caches

    def contenders(
        self, prompt: torch.Tensor, *, beside: bool
    ) -> Iterator[tuple[str, Callable[[torch.Tensor], torch.Tensor]]]:
        """Each way to go on behind a prompt, which is read once: its name, and a step from a token to logits."""
        from transformers import DynamicCache

        kept = KeptTokens()
        whole = DynamicCache(config=self.model.config)
        with attending(self.model, kept):
            kept.is_adding = beside
            self.model(prompt, cache=whole, logits_to_keep=1)
            for layer in whole.layers:
                fits = packed(layer.keys, layer.values)
                self.num_pages += len(fits)
                self.num_packed += int(fits.sum())
            yield "exact", self.stepper(copy.deepcopy(whole))
            kept.is_adding = False
            if beside:
                tokens = int(BUDGET * prompt.shape[1])
                kept.keep_recent(len(whole.layers), whole.layers[0].keys.shape[1], prompt.shape[1], tokens)
                yield "first and newest", self.stepper(copy.deepcopy(whole))
                kept.keep_heavy(tokens)
                yield "forgets once", self.stepper(copy.deepcopy(whole))
        with self.paged(whole, prompt) as cache:
            yield "chosen pages", self.stepper(cache)

    @contextmanager
    def paged(self, whole: Any, prompt: torch.Tensor) -> Iterator[PagedCache]:
        """A paged cache of the same content; the meter watches it."""
        cache, first = PagedCache(self.model.config, page_tokens=PAGE_TOKENS, kv_budget=BUDGET), prompt.shape[1] - END
        with cache.selecting(self.model):
            for index, layer in enumerate(whole.layers):
                cache.update(layer.keys[:, :, :first], layer.values[:, :, :first], index)
            self.model(prompt[:, first:], cache=cache, logits_to_keep=1)
            assert cache.selection is not None
            cache.selection.watch = self.watch
            yield cache
        cache.close()

    def watch(self, seen: Seen) -> None:
        """Let the meter see a decision."""
        self.meter(seen)

    def stepper(self, cache: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        """A step of the model with a cache: token to logits."""

        def step(token: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(token.view(1, 1), cache=cache).logits[0, -1]
            return logits

        return step

    def ids(self, text: str) -> torch.Tensor:
        """Tokens of a text, [1, n]."""
        found: torch.Tensor = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        return found


def packed(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Which pages of a layer [1, heads, tokens, dim] would be packed in bfloat16, bool [pages]."""
    count = keys.shape[2] // PAGE_TOKENS
    parts = [
        part[0, :, : count * PAGE_TOKENS].bfloat16().view(part.shape[1], count, -1).transpose(0, 1).reshape(count, -1)
        for part in (keys, values)
    ]
    pages = torch.cat(parts, 1)
    size = packed_bytes(pages.dtype, pages.shape[1])
    if size is None:
        raise BenchError(f"pages of {pages.shape[1]} elements are never packed: take another number of tokens")
    return pack_pages(pages.view(torch.uint8), torch.empty((count, size), dtype=torch.uint8))


def prose() -> str:
    """English text that comes with Python: its language reference."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return text[PROSE_FROM : PROSE_FROM + 40_000]
