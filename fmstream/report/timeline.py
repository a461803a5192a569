"""The timeline of a run for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fmstream.core.telemetry import Span

PROCESS_ID = 1


def order_lanes(spans: Iterable[Span]) -> list[str]:
    """The lanes that occur, from top to bottom: compute, wait, stages on the host, the copy workers, others by name."""
    lanes = {span.lane for span in spans}
    return sorted(lanes, key=_lane_key)


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """Spans in the Trace Event Format: complete events ("X"), times in microseconds since the earliest start."""
    lanes = order_lanes(spans)
    thread_ids = {lane: index for index, lane in enumerate(lanes, start=1)}
    origin = min((span.start for span in spans), default=0.0)
    events: list[dict[str, Any]] = [_metadata("process_name", 0, name="fmstream")]
    for lane, thread_id in thread_ids.items():
        events.append(_metadata("thread_name", thread_id, name=lane))
        events.append(_metadata("thread_sort_index", thread_id, sort_index=thread_id))
    events += [_complete(span, thread_ids[span.lane], origin) for span in sorted(spans, key=lambda span: span.start)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_chrome_trace(spans: Iterable[Span], path: str | Path) -> None:
    """Write spans as a Chrome trace (JSON)."""
    text = json.dumps(chrome_trace(list(spans)), separators=(",", ":"), allow_nan=False)
    Path(path).write_text(text, encoding="utf-8")


def _lane_key(lane: str) -> tuple[int, int, str]:
    kind, _, number = lane.partition(" ")
    rank = {"compute": 0, "wait": 1, "host": 2, "copy": 3}.get(kind, 4)
    return rank, int(number) if number.isdecimal() else 0, lane


def _metadata(what: str, thread_id: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": PROCESS_ID, "tid": thread_id, "args": args}


def _complete(span: Span, thread_id: int, origin: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.lane.partition(" ")[0],
        "pid": PROCESS_ID,
        "tid": thread_id,
        "ts": round((span.start - origin) * 1e6, 3),
        "dur": round(max(span.end - span.start, 0.0) * 1e6, 3),
        "args": {"bytes": span.num_bytes},
    }
