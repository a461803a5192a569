"""The Chrome trace of a run."""

import json

from fmstream.core.telemetry import Span
from fmstream.report.timeline import order_lanes, save_chrome_trace

SPANS = [
    Span("copy 10", "unit 2", 11.0, 11.5, 300),
    Span("copy 2", "unit 1", 10.5, 10.75, 200),
    Span("wait", "unit 1", 10.25, 10.75),
    Span("compute", "block.0", 10.0, 10.25),
]


def load(spans, tmp_path):
    path = tmp_path / "trace.json"
    save_chrome_trace(spans, path)
    return json.loads(path.read_text())["traceEvents"]


def test_spans_become_complete_events_in_microseconds(tmp_path):
    events = [event for event in load(iter(SPANS), tmp_path) if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in events] == [
        ("block.0", 0.0, 250_000.0),
        ("unit 1", 250_000.0, 500_000.0),
        ("unit 1", 500_000.0, 250_000.0),
        ("unit 2", 1_000_000.0, 500_000.0),
    ]
    assert [event["args"]["bytes"] for event in events] == [0, 0, 200, 300]
    assert [event["cat"] for event in events] == ["compute", "wait", "copy", "copy"]


def test_each_lane_is_a_named_thread_in_order(tmp_path):
    events = load(SPANS, tmp_path)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {1: "compute", 2: "wait", 3: "copy 2", 4: "copy 10"}
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert order == {1: 1, 2: 2, 3: 3, 4: 4}
    lanes = {names[event["tid"]] for event in events if event["ph"] == "X"}
    assert lanes == set(names.values())
    assert len({event["pid"] for event in events}) == 1


def test_every_event_has_what_the_format_asks_for(tmp_path):
    for event in load(SPANS, tmp_path):
        assert event.keys() >= {"ph", "name", "pid", "tid", "args"}
        assert event["ph"] in {"X", "M"}
        if event["ph"] == "X":
            assert event["dur"] >= 0


def test_no_spans_make_a_valid_trace(tmp_path):
    assert [event["name"] for event in load([], tmp_path)] == ["process_name"]


def test_unknown_lanes_come_last():
    assert order_lanes([*SPANS, Span("gather", "", 0, 1)])[-1] == "gather"
