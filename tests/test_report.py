"""The numbers, the advice, the saved form and the table of a report, from telemetry made by hand."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from fmstream.core.plan import Prediction
from fmstream.core.telemetry import PassRecord, Span, Telemetry
from fmstream.errors import ConfigError
from fmstream.report import Report, describe_environment
from fmstream.report.intervals import intersect, length, merge, overlap
from fmstream.report.report import SCHEMA
from fmstream.report.units import format_bytes, format_rate, format_seconds

GIB = 2**30
ENVIRONMENT = {"fmstream": "1.0", "torch": "2.9", "python": "3.11", "platform": "Linux x86_64"}


def make_pass(start, seconds, compute, streamed=8 * GIB, *, root="unet", policy="overlap_async", predicted=4.4, **more):
    expected = None if policy == "trace" else Prediction(predicted, 1.0, 4.0, 4.0, "link-bound")
    fields = {"resident_bytes": 4 * GIB, "window_bytes": GIB, "predicted": expected, **more}
    return PassRecord(root, policy, start, start + seconds, compute, seconds - compute, streamed, **fields)


def make_telemetry(**changes):
    """A link-bound run: 8 GiB a pass at 2 GiB/s are 4 s, compute is 1 s."""
    telemetry = Telemetry(
        started=0.0,
        ended=30.0,
        policy="overlap_async",
        device="cpu",
        weights_bytes=12 * GIB,
        memory_bytes=5 * GIB,
        file_bytes=11 * GIB,
        ram_bytes=GIB,
        smallest_bytes=GIB,
        link_seconds=24.0,
        link_bytes=40 * GIB,
        replans=1,
        peak_rss_bytes=6 * GIB,
        passes=[
            make_pass(0, 10, 1.0, policy="trace"),
            make_pass(10, 6, 1.0),
            make_pass(16, 4, 1.0),
            make_pass(20, 4, 0.9),
            make_pass(24, 5, 1.1),
        ],
    )
    # Two workers at once: 24 GiB in 12 s, although each was busy for 12 s.
    telemetry.spans.extend(Span(f"copy {worker}", "unit", 16.0, 28.0, 12 * GIB) for worker in range(2))
    for name, value in changes.items():
        setattr(telemetry, name, value)
    return telemetry


def make_report(**changes):
    return Report.from_telemetry(make_telemetry(**changes), ENVIRONMENT)


def advice(report, word):
    return [sentence for sentence in report.advice if word in sentence]


def test_row_takes_medians_of_the_planned_passes_after_the_first():
    (row,) = make_report().roots
    assert (row.root, row.policy, row.passes, row.traced_passes, row.measured_passes) == (
        "unet",
        "overlap_async",
        5,
        1,
        3,
    )
    assert (row.step_seconds, row.compute_seconds, row.wait_seconds) == (4.0, 1.0, pytest.approx(3.1))
    assert (row.traced_seconds, row.first_seconds, row.total_seconds) == (10.0, 6.0, 29.0)
    assert (row.streamed_bytes, row.resident_bytes, row.window_bytes) == (8 * GIB, 4 * GIB, GIB)


def test_row_has_bound_gap_and_prediction():
    (row,) = make_report().roots
    assert row.link_bytes_per_second == pytest.approx(2 * GIB)
    assert row.link_seconds == pytest.approx(4.0)
    assert row.link_busy_share == pytest.approx(12 / 13)
    assert row.bound_seconds == pytest.approx(4.0)
    assert row.gap == pytest.approx(1.0)
    assert row.predicted_seconds == 4.4
    assert row.prediction_error == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("compute", "regime"), [(1.0, "link-bound"), (3.7, "balanced"), (4.3, "balanced"), (6.0, "compute-bound")]
)
def test_regime_is_the_larger_of_compute_and_link(compute, regime):
    passes = [make_pass(start, max(compute, 4.0), compute) for start in (10, 16, 22)]
    (row,) = make_report(passes=passes).roots
    assert row.regime == regime
    assert row.bound_seconds == pytest.approx(max(compute, 4.0))


def test_resident_root_is_bound_by_compute_alone():
    report = make_report(passes=[make_pass(start, 2, 2.0, 0) for start in (10, 16, 20)])
    (row,) = report.roots
    assert (row.regime, row.bound_seconds, row.gap, row.link_bytes_per_second) == ("resident", 2.0, 1.0, None)
    assert advice(report, "unet is resident: nothing is streamed, all fits; compute takes 2.00 s a step.")
    assert not advice(report, "memory +")


def test_rate_without_spans_is_that_of_the_workers_and_without_copies_unknown():
    telemetry = make_telemetry(link_seconds=20.0)
    telemetry.spans.clear()
    (row,) = Report.from_telemetry(telemetry, {}).roots
    assert row.link_bytes_per_second == pytest.approx(2 * GIB)
    assert row.link_busy_share is None
    telemetry.link_seconds = 0.0
    report = Report.from_telemetry(telemetry, {})
    (row,) = report.roots
    assert (row.regime, row.bound_seconds, row.gap) == ("unknown", None, None)
    assert report.totals.link_busy_share is None
    assert advice(report, "no copy was timed")
    assert "unknown" in str(report)


def test_root_that_was_only_traced_is_marked_and_gets_no_model():
    report = make_report(passes=[make_pass(0, 10, 1.0, policy="trace", root="text_encoder")])
    (row,) = report.roots
    assert (row.policy, row.step_seconds, row.measured_passes) == ("trace", 10.0, 1)
    assert (row.first_seconds, row.predicted_seconds, row.prediction_error) == (None, None, None)
    assert advice(report, "text_encoder: 1 pass, loaded on demand")
    assert not advice(report, "modelled")


def test_single_planned_pass_stands_for_itself():
    (row,) = make_report(passes=make_telemetry().passes[:2]).roots
    assert (row.policy, row.step_seconds, row.measured_passes) == ("overlap_async", 6.0, 1)


def test_passes_of_an_earlier_policy_are_left_out():
    early = [make_pass(0, 9, 1.0, policy="sync"), make_pass(9, 9, 1.0, policy="sync")]
    (row,) = make_report(passes=[*early, make_pass(18, 5, 1.0), make_pass(23, 4, 1.0)]).roots
    assert (row.policy, row.step_seconds) == ("overlap_async", 4.0)


def test_roots_stand_in_order_of_their_first_pass():
    passes = [make_pass(0, 1, 1.0, root="text_encoder"), make_pass(1, 4, 1.0), make_pass(5, 1, 1.0, root="vae.decoder")]
    assert [row.root for row in make_report(passes=passes).roots] == ["text_encoder", "unet", "vae.decoder"]


def test_totals():
    totals = make_report(wasted_bytes=GIB).totals
    assert (totals.wall_seconds, totals.passes, totals.replans, totals.traced_seconds) == (30.0, 5, 1, 10.0)
    assert (totals.streamed_bytes, totals.wasted_bytes) == (40 * GIB, GIB)
    assert totals.compute_seconds == pytest.approx(5.0)
    assert totals.wait_share == pytest.approx(24 / 30)
    assert totals.link_busy_share == pytest.approx(12 / 30)
    assert totals.link_idle_share == pytest.approx(18 / 30)
    assert totals.idle_traced_seconds == pytest.approx(10.0)
    assert totals.idle_planned_seconds == pytest.approx(7.0)
    assert totals.idle_outside_seconds == pytest.approx(1.0)


def test_wall_of_an_open_handle_ends_with_its_last_record():
    assert make_report(ended=None).totals.wall_seconds == 29.0


def test_shares_cover_only_what_the_kept_spans_cover():
    telemetry = make_telemetry()
    telemetry.spans = type(telemetry.spans)(
        [Span("copy 0", "unit", 15.0, 20.0, GIB), Span("copy 0", "unit", 20.0, 25.0, GIB)], maxlen=2
    )
    totals = Report.from_telemetry(telemetry, {}).totals
    assert totals.link_busy_share == pytest.approx(5 / 10)
    assert totals.idle_traced_seconds == 0.0


def test_faults_are_sorted_by_bytes_then_name():
    faults = {("b", "x"): [1, 5], ("a", "x"): [3, 5], ("c", "y"): [1, 2 * GIB]}
    report = make_report(faults=faults)
    assert [(fault.param, fault.count) for fault in report.faults] == [("c", 1), ("a", 3), ("b", 1)]
    assert advice(report, "Reads outside the plan: 5, 2.00 GiB; most by y of c")


def test_few_faults_and_little_waste_are_not_spoken_of():
    report = make_report(faults={("a", "x"): [1, 1024]}, wasted_bytes=GIB)
    assert not advice(report, "Reads outside the plan")
    assert not advice(report, "dropped unused")


def test_large_waste_is_named():
    assert advice(make_report(wasted_bytes=10 * GIB), "10.0 GiB were loaded ahead and dropped unused, 25 %")


def test_link_bound_advice_says_what_memory_would_bring():
    report = make_report()
    assert advice(report, "unet is link-bound: 8.00 GiB over the link at 2.15 GB/s take 4.00 s")
    # 1 s of compute hides 2 of the 8 GiB, so 6 more must be resident.
    assert advice(report, "memory + 6.00 GiB would bring the step to 1.00 s (modelled); each GiB saves 500 ms.")


def test_no_more_memory_is_advised_than_makes_all_fit():
    passes = [make_pass(start, 4, 0.1) for start in (16, 20, 24)]
    assert advice(make_report(passes=passes), "memory + 7.00 GiB would bring the step to 100 ms (modelled)")


def test_memory_advice_far_from_the_bound_speaks_of_the_bound():
    passes = [make_pass(start, 6, 1.0) for start in (10, 16, 22)]
    report = make_report(passes=passes)
    assert report.roots[0].gap == pytest.approx(1.5)
    assert advice(report, "would bring the bound of a step from 4.00 s to 1.00 s (modelled)")


def test_naive_policy_is_advised_to_overlap():
    passes = [make_pass(start, 5, 1.0, 12 * GIB, policy="sync", resident_bytes=0) for start in (10, 16, 21)]
    report = make_report(policy="sync", passes=passes)
    # W - M is 7 GiB: 3.5 s at 2 GiB/s.
    assert advice(report, "policy 'overlap_async' would bring the step from 5.00 s to 3.50 s at best (modelled)")
    assert not advice(make_report(), "policy 'overlap_async'")


def test_compute_bound_run_is_told_what_memory_it_could_spare():
    passes = [make_pass(start, 5, 5.0) for start in (10, 16, 21)]
    # 5 s of link time carry 10 GiB, 8 are streamed.
    assert advice(make_report(passes=passes), "memory - 2.00 GiB would keep the step (modelled)")
    assert advice(make_report(passes=passes, smallest_bytes=4 * GIB), "memory - 1.00 GiB would keep the step")
    assert not advice(make_report(), "memory -")


def test_idle_tracing_and_wrong_prediction_are_named():
    report = make_report(
        passes=[*make_telemetry().passes[:2], *(make_pass(s, 4, 1.0, predicted=2.0) for s in (16, 20))]
    )
    assert advice(report, "The link was idle 60 % of the run")
    assert advice(report, "Learning the order of use took 10.0 s, 33 % of the run")
    assert advice(report, "the plan expected 2.00 s a step, measured were 4.00 s")
    assert not advice(make_report(), "the plan expected")


def test_empty_telemetry():
    report = Report.from_telemetry(Telemetry(started=1.0), {})
    assert report.roots == ()
    assert (report.totals.wall_seconds, report.totals.wait_share, report.totals.link_busy_share) == (0.0, 0.0, None)
    assert report.advice == ("No pass was recorded: no module was called, so there is nothing to say about speed.",)
    assert "0 passes" in str(report)
    assert Report.from_dict(json.loads(report.to_json())) == report


def test_pass_of_no_length_divides_by_nothing():
    (row,) = make_report(passes=[make_pass(16, 0, 0.0, 0)]).roots
    assert (row.gap, row.prediction_error) == (None, None)


def test_round_trip_through_a_file(tmp_path):
    report = make_report(faults={("a", "x"): [1, GIB]}, notes=["a note"])
    path = tmp_path / "report.json"
    report.save(path)
    assert Report.load(path) == report
    assert json.loads(path.read_text())["schema"] == SCHEMA


def test_report_is_of_plain_values_and_frozen():
    report = make_report()
    assert json.loads(report.to_json())["roots"][0]["root"] == "unet"
    with pytest.raises(AttributeError):
        report.policy = "sync"  # type: ignore[misc]


def test_newer_schema_is_refused():
    data = {**make_report().to_dict(), "schema": SCHEMA + 1}
    with pytest.raises(ConfigError, match=rf"schema {SCHEMA + 1}, this fmstream reads up to {SCHEMA}: upgrade"):
        Report.from_dict(data)


@pytest.mark.parametrize("data", [None, [], "x", {}, {"schema": "1"}, {"schema": 0}, {"schema": True}, {"schema": 1}])
def test_what_is_no_report_is_refused(data):
    with pytest.raises(ConfigError, match="not an fmstream report"):
        Report.from_dict(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": 3}, r"report\.policy is '3', expected str"),
        ({"roots": 3}, r"report\.roots is '3', expected a list"),
        ({"roots": [[]]}, r"report\.roots\[0\] is '\[\]', expected an object"),
        ({"versions": []}, r"report\.versions is '\[\]', expected an object"),
        ({"notes": [None]}, r"report\.notes\[0\] is 'None', expected str"),
        ({"memory_bytes": 1.5}, r"report\.memory_bytes is '1\.5', expected int"),
        ({"surplus": 1}, r"unknown fields \['surplus'\]"),
    ],
)
def test_wrong_field_is_named(change, message):
    with pytest.raises(ConfigError, match=message):
        Report.from_dict({**make_report().to_dict(), **change})


def test_wrong_regime_is_named():
    data = json.loads(make_report().to_json())
    data["roots"][0]["regime"] = "swift"
    with pytest.raises(ConfigError, match=r"roots\[0\]\.regime is 'swift', expected one of compute-bound"):
        Report.from_dict(data)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_file_that_is_no_json_is_refused_by_name(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.json: not an fmstream report"):
        Report.load(path)


def test_text_is_a_plain_table_of_100_columns():
    report = make_report(faults={(f"unet.{index}", "pipeline"): [1, index] for index in range(12)}, notes=["a note"])
    roots = (*report.roots, replace(report.roots[0], root="text_encoder_with_a_long.name.of.a.module"))
    text = str(replace(report, roots=roots))
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 100
    for part in ("unet", "4.00 s", "1.00x", "link-bound", "2.15 GB/s", "4.40 s +10 %", "4 more", "- a note", "92 %"):
        assert part in text
    assert next(line.split() for line in str(report).splitlines() if line.startswith("unet  ")) == [
        *("unet", "overlap_async", "5", "4.00", "s", "1.00", "s", "3.10", "s", "4.00", "s", "1.00x", "link-bound")
    ]
    assert max(map(len, report.render(width=140).splitlines())) <= 140


def test_names_are_not_markup():
    report = replace(make_report(notes=["see [bold]x[/]"]), policy="[red]p")
    assert "policy [red]p" in str(report)
    assert "see [bold]x[/]" in str(report)


def test_environment_names_versions_only():
    environment = describe_environment()
    assert list(environment) == ["fmstream", "torch", "python", "platform"]
    assert all(environment.values())


def test_report_layer_imports_neither_torch_nor_rich_nor_matplotlib():
    code = (
        "import sys, fmstream.report, fmstream.report.plot; print({'torch', 'rich', 'matplotlib'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_intervals():
    merged = merge([(5, 6), (0, 2), (1, 3), (3, 4), (8, 8), (9, 7)])
    assert merged == [(0, 4), (5, 6)]
    assert length(merged) == 5
    assert intersect(merged, [(1, 2), (3, 5.5)]) == [(1, 2), (3, 4), (5, 5.5)]
    assert [overlap(pair, merged) for pair in ((-1, 1), (3, 9), (4, 5), (6, 7))] == [1, 2, 0, 0]
    assert overlap((0, 1), []) == 0


def test_units():
    sizes = (0, 512, 1536, 999 * 2**20, 2**30, 13 * 2**40)
    assert [format_bytes(size) for size in sizes] == ["0 B", "512 B", "1.50 KiB", "999 MiB", "1.00 GiB", "13.0 TiB"]
    assert [format_rate(rate) for rate in (2.154e9, 31e6)] == ["2.15 GB/s", "31.0 MB/s"]
    seconds = (0, 61.23, 123.4, 0.0034, 0.00025, 0.99996)
    assert [format_seconds(value) for value in seconds] == ["0 s", "61.2 s", "123 s", "3.40 ms", "250 us", "1.00 s"]
