"""Trials of keys and values in pages: spill, recall and the file tier, beside a plain cache."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fmstream.doors.inputs import cache_name
from fmstream.doors.run import run
from fmstream.doors.stream import smallest_memory
from fmstream.report.units import format_bytes
from fmstream.validate.outcome import Mismatch, Outcome, Verdict, expect
from fmstream.validate.place import Place
from fmstream.validate.weights import differing

if TYPE_CHECKING:
    from fmstream.payloads.kv.cache import KvStatistics, PagedCache

PART: Final = "keys and values"
VOCABULARY: Final = 256
LAYERS: Final = 6
PROMPT: Final = 240
NEW: Final = 24
"""Tokens of the prompt, and those that are decoded one by one."""
PAGE_TOKENS: Final = 16
LAYER_PAGES: Final = -(-(PROMPT + NEW) // PAGE_TOKENS)
POOL_PAGES: Final = LAYER_PAGES + 6
"""Pages of fast memory: the layer that is being computed, and few more."""
PAGE_BYTES: Final = 2 * 2 * PAGE_TOKENS * 64 * 4
"""Keys and values, 2 heads of 64 float32 each."""
BEAMS: Final = 3
OPTIONS: Final[dict[str, Any]] = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": None,
}
_DECODED: Final = f"{NEW} tokens after {PROMPT}, and all keys and values, equal bit for bit"


def try_kv(place: Place) -> Iterator[Outcome]:
    """Decode with a small model whose context does not fit the pool, in every way."""
    missing = missing_library()
    if missing:
        yield Outcome(PART, "pages", Verdict.NOT_RUN, missing)
        return
    tries: dict[str, Callable[[str], str]] = {
        "pages in host memory": _in_memory,
        "pages in a file": _in_file,
        "beams": _beams,
        "with streamed weights": _with_weights,
    }
    for name, trial in tries.items():
        yield place.carry_out(PART, name, torch.no_grad()(trial))
    if place.has_pins:
        yield _try_packed(place)


def _try_packed(place: Place) -> Outcome:
    """Pages that cross the link packed, where the device can unpack them."""
    from fmstream.device.page_packing import why_not_unpacked

    name = "packed pages"
    why_not = why_not_unpacked(torch.device(place.device), PAGE_BYTES // 4)
    if why_not is not None:
        return Outcome(PART, name, Verdict.NOT_RUN, f"the kernel that unpacks them was not built: {why_not}")
    return place.carry_out(PART, name, torch.no_grad()(_packed))


def missing_library() -> str:
    """Why keys and values cannot be tried here, or nothing."""
    try:
        import fmstream.payloads.kv.compat  # noqa: F401
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed: pip install 'transformers>=5'"
    except ImportError as error:
        return str(error)
    return ""


def make_model(dtype: torch.dtype = torch.float32) -> Any:
    """A small Llama on the CPU, always with the same weights."""
    library: Any = importlib.import_module("transformers")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": LAYERS}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = library.LlamaConfig(vocab_size=VOCABULARY, **heads, **sizes)
        return library.LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)


def make_prompt() -> Tensor:
    """Token ids [1, PROMPT] on the CPU."""
    return torch.randint(2, VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(2))


def greedy(model: Any, cache: Any) -> list[Tensor]:
    """Logits of the prompt's last token and of those decoded after it, [1, VOCABULARY] each, on the model's device."""
    name, ids, found = cache_name(model), make_prompt().to(model.device), []
    for _ in range(NEW):
        found.append(model(ids, **{name: cache}, use_cache=True, logits_to_keep=1).logits[:, -1])
        ids = found[-1].argmax(-1, keepdim=True)
    return found


# Trials


def _in_memory(device: str) -> str:
    return f"{_DECODED}; {_moves(_decode(device))}"


def _in_file(device: str) -> str:
    with tempfile.TemporaryDirectory(prefix="fmstream-") as folder:
        did = _decode(device, kv_host_memory=LAYER_PAGES * PAGE_BYTES, spill_dir=folder)
        left = os.listdir(folder)
        expect(not left, f"{left} are left in the folder of the file")
    expect(did.file_written_bytes > 0 < did.file_read_bytes, "no page went through the file: nothing was tried")
    return f"{_DECODED}; {_moves(did)}, {format_bytes(did.file_read_bytes)} of it read from a file"


def _packed(device: str) -> str:
    did = _decode(device, torch.bfloat16)
    expect(did.packed_pages > 0, f"none of {did.host_pages} pages was packed: nothing was tried")
    return f"{_DECODED}; {_moves(did)}, {did.packed_pages} of {did.host_pages} pages in host memory packed"


def _beams(device: str) -> str:
    from transformers import DynamicCache

    model = make_model().to(device)
    expected = _generate(model, DynamicCache(config=model.config), num_beams=BEAMS)
    cache = _paged(model, BEAMS * LAYER_PAGES + 6)
    try:
        found = _generate(model, cache, num_beams=BEAMS)
        cache.check()
        did = cache.statistics()
    finally:
        cache.close()
    expect(torch.equal(found, expected), f"{differing(found, expected)} of the tokens differ from a plain cache's")
    return f"{BEAMS} beams of {NEW} tokens equal; {_moves(did)}"


def _with_weights(device: str) -> str:
    """Weights stream and keys and values are paged within one ``generate``."""
    from transformers import DynamicCache

    model, ids = make_model(), make_prompt()
    twin = make_model().to(device)
    expected = _generate(twin, DynamicCache(config=model.config))
    del twin
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    least = smallest_memory(model)
    config = {"kv_cache_max_pages": POOL_PAGES, "page_tokens": PAGE_TOKENS}
    memory = least + (total - least) // 4
    done = run(
        model, ids.to(device), method="generate", memory=memory, device=device, config=config, call_kwargs=OPTIONS
    )
    found, streamed = done.output.cpu(), done.report.totals.streamed_bytes
    expect(torch.equal(found, expected), f"{differing(found, expected)} of the tokens differ from the unstreamed run's")
    expect(streamed > total, f"{streamed} bytes of weights were streamed in {NEW} tokens: nothing was tried")
    expect(any("lay in pages" in note for note in done.report.notes), "no cache was paged: nothing was tried")
    return (
        f"{NEW} tokens equal; {format_bytes(streamed)} of weights streamed in "
        f"{format_bytes(memory)} of memory while keys and values were paged"
    )


def _generate(model: Any, cache: Any, **options: Any) -> Tensor:
    """Prompt and new tokens on the CPU."""
    given = OPTIONS | options | {cache_name(model): cache}
    tokens: Tensor = model.generate(make_prompt().to(model.device), **given).cpu()
    return tokens


def _decode(device: str, dtype: torch.dtype = torch.float32, **options: Any) -> KvStatistics:
    """Decode with a plain and with a paged cache; raises `Mismatch` unless logits and contents are equal."""
    from transformers import DynamicCache

    model = make_model(dtype).to(device)
    plain = DynamicCache(config=model.config)
    expected = [logits.cpu() for logits in greedy(model, plain)]
    cache = _paged(model, POOL_PAGES, **options)
    try:
        found = [logits.cpu() for logits in greedy(model, cache)]
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True), start=1):
            if not torch.equal(ours, theirs):
                again = greedy(model, DynamicCache(config=model.config))[number - 1].cpu()
                raise Mismatch(
                    f"token {number}: {differing(ours, theirs)} differ from a plain cache's; a second run with a plain "
                    + ("cache gave the same as the first" if torch.equal(again, theirs) else "cache differs as well")
                )
        did = cache.statistics()
        compare_contents(cache, plain)
        return did
    finally:
        cache.close()


def _paged(model: Any, pages: int, **options: Any) -> PagedCache:
    from fmstream.payloads.kv.cache import PagedCache

    return PagedCache(model.config, pages, page_tokens=PAGE_TOKENS, **options)


def compare_contents(cache: PagedCache, plain: Any) -> None:
    """Raise `Mismatch` unless every layer holds the bits of a plain cache's, and the cache keeps its laws."""
    for index, (paged, other) in enumerate(zip(cache.layers, plain.layers, strict=True)):
        for name in ("keys", "values"):
            ours, theirs = getattr(paged, name).cpu(), getattr(other, name).cpu()
            expect(torch.equal(ours, theirs), f"{name} of layer {index}: {differing(ours, theirs)} are not as written")
    cache.check()


def _moves(did: KvStatistics) -> str:
    """What was moved, in words; raises `Mismatch` where nothing was, for then nothing was tried."""
    expect(did.spilled_bytes > 0 < did.recalled_bytes, "no page was spilled and recalled: nothing was tried")
    return (
        f"{format_bytes(did.spilled_bytes)} spilled and {format_bytes(did.recalled_bytes)} recalled with "
        f"{format_bytes(did.device_bytes)} on the device"
    )
