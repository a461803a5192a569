"""How many planted faults the memory test's default suite finds in simulated memory, and what it alarms about."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch import Tensor

from bench.contract import Bar, Findings, Row, Workplace, register
from bench.faulty_memory import COUPLED_NEIGHBOURS, NOW_AND_THEN, PERMANENT, Make, Memories
from fmstream.doctor.memtest import ROUNDS
from fmstream.doctor.patterns import DEFAULT, Pattern, Sweep, find_patterns, make_sweeps
from fmstream.doctor.sweeping import check_sweep, write_sweep

CLAIM: Final = (
    "The default suite of the memory test finds 99.5 % of every permanent kind of fault and 90 % of bits that 1 % of "
    "their reads see wrong, and raises no false alarm."
)
BARS: Final = {
    "permanent": Bar(at_least=0.995),
    "intermittent": Bar(at_least=0.90),
    "false_alarms": Bar(at_most=0),
}
FAULTS: Final = 2000
"""Of each kind, in quick runs too."""
BATCH: Final = 1000
"""Memories in step under one seed."""
SOUND: Final = 1000
SOUND_BATCH: Final = 100
CHUNKS: Final = 8
"""Launches for one pass over a simulated memory."""
CONTRAST: Final = "deadbeef"


@register("memtest_detection", CLAIM, BARS)
def run(place: Workplace) -> Findings:
    """Plant faults; a quick run has smaller memories and as many faults."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(place, num_words=256 if place.quick else 2048)
    finally:
        torch.set_num_threads(before)


def measure(place: Workplace, num_words: int, faults: int = FAULTS, sound: int = SOUND) -> Findings:
    """Shares found of each kind, by the suite, by its patterns alone, and by one word written everywhere."""
    seed = secrets.randbits(31)
    place.say(f"seed {seed}")
    source = torch.Generator().manual_seed(seed)
    rows: list[Row] = []
    for kind, make in {**PERMANENT, "coupled neighbours": COUPLED_NEIGHBOURS, "intermittent": NOW_AND_THEN}.items():
        rows.append(_row(kind, detect(make, faults, num_words, source)))
        place.say(f"{kind}: {rows[-1]['suite']:.4f} found")
    found = {str(row["fault"]): float(row["suite"]) for row in rows}
    alarms, contrast = sound_alarms(sound, num_words, source)
    rows.append({"fault": f"none, in {sound} memories", "suite": alarms / sound, CONTRAST: contrast / sound})
    figures = {
        "permanent": min(found[kind] for kind in PERMANENT),
        "intermittent": found["intermittent"],
        "false_alarms": alarms,
        "coupled_neighbours": found["coupled neighbours"],
        "deadbeef_permanent": min(float(row[CONTRAST]) for row in rows if row["fault"] in PERMANENT),
        "seed": seed,
    }
    return Findings(figures, rows)


def _row(kind: str, found: dict[str, Tensor]) -> Row:
    suite = torch.stack([found[name] for name in DEFAULT]).any(0)
    shares = {name: float(which.float().mean()) for name, which in found.items()}
    return {"fault": kind, "suite": float(suite.float().mean()), CONTRAST: shares.pop(CONTRAST), **shares}


def detect(make: Make, faults: int, num_words: int, source: torch.Generator) -> dict[str, Tensor]:
    """For each pattern, which of so many memories it found at fault."""
    found: dict[str, list[Tensor]] = {name: [] for name in (*DEFAULT, CONTRAST)}
    for first in range(0, faults, BATCH):
        count = min(BATCH, faults - first)
        memories = make(count, num_words, num_words // CHUNKS, source)
        for name, which in examine(memories, _seed(source)).items():
            found[name].append(which)
    return {name: torch.cat(parts) for name, parts in found.items()}


def examine(memories: Memories, seed: int) -> dict[str, Tensor]:
    """Run the default suite, and a constant word as often as the suite checks."""
    count = memories.rows.numel()
    patterns = find_patterns(DEFAULT)
    found = {name: torch.zeros(count, dtype=torch.bool) for name in (*DEFAULT, CONTRAST)}
    for round_number in range(1, ROUNDS + 1):
        for pattern in patterns:
            sweep_all(memories, make_sweeps(pattern, seed, round_number), found[pattern.name])
    checks = ROUNDS * sum(pattern.num_sweeps for pattern in patterns)
    (contrast,) = find_patterns([CONTRAST])
    memories.chunk_words = memories.num_words  # in which order a constant is written makes no difference
    sweep_all(memories, _repeated(contrast, checks), found[CONTRAST])
    return found


def _repeated(pattern: Pattern, times: int) -> Iterator[Sweep]:
    (sweep,) = make_sweeps(pattern, 0, 0)
    for _ in range(times):
        yield sweep


def sweep_all(memories: Memories, sweeps: Iterable[Sweep], found: Tensor) -> None:
    """Write and check as the memory test does, and mark in ``found`` each memory that gave a wrong word."""

    def compare(start: int, actual: Tensor, expected: Tensor) -> None:
        found.logical_or_((actual != expected).any(1))

    for sweep in sweeps:
        write_sweep(memories, sweep, lambda _: None)
        check_sweep(memories, sweep, compare, lambda _: None)


def sound_alarms(sound: int, num_words: int, source: torch.Generator) -> tuple[int, int]:
    """How many sound memories, of several sizes, the suite and the constant word take for faulty."""
    alarms = contrast = 0
    for first in range(0, sound, SOUND_BATCH):
        count = min(SOUND_BATCH, sound - first)
        words = num_words // 2 + _seed(source) % num_words
        memories = Memories(count, words, 1 + words // CHUNKS, source)
        found = examine(memories, _seed(source))
        contrast += int(found.pop(CONTRAST).sum())
        alarms += int(torch.stack(list(found.values())).any(0).sum())
    return alarms, contrast


def _seed(source: torch.Generator) -> int:
    return int(torch.randint(0, 1 << 31, (), generator=source))
