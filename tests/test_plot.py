"""The pictures of a run.  They are drawn for real and their pixels looked at."""

import sys

import pytest

from fmstream.core.plan import Prediction
from fmstream.core.telemetry import PassRecord, Span, Telemetry
from fmstream.errors import ConfigError
from fmstream.report import Report

image = pytest.importorskip("matplotlib.image")

from fmstream.report import plot  # noqa: E402

MIB = 2**20


def make_telemetry(units=20, passes=3):
    """Link-bound passes of 0.1 s: compute takes half of each unit's time, waiting the other half."""
    telemetry = Telemetry(started=0.0, policy="overlap_async", device="cpu", memory_bytes=MIB, weights_bytes=9 * MIB)
    step = 0.1 / units
    for number in range(passes):
        begin = 0.1 * number
        for unit in range(units):
            start = begin + unit * step
            telemetry.spans.append(Span(f"copy {unit % 2}", f"unit {unit}", start, start + step, MIB))
            telemetry.spans.append(Span("wait", f"unit {unit}", start, start + step / 2))
            telemetry.spans.append(Span("compute", f"block {unit}", start + step / 2, start + step))
        policy = "overlap_async" if number else "trace"
        predicted = Prediction(0.1, 0.05, 0.1, 0.1, "link-bound") if number else None
        telemetry.passes.append(
            PassRecord("unet", policy, begin, begin + 0.1, 0.05, 0.05, units * MIB, 0, MIB, 0, predicted)
        )
    return telemetry


def read(path):
    """The pixels as rows of (red, green, blue), from 0 to 255."""
    return (image.imread(path)[:, :, :3] * 255).round().astype(int)


def share(pixels, color, within=2):
    """Share of the picture that has a colour given as "#rrggbb", or one near to it."""
    wanted = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return (abs(pixels - wanted).max(axis=2) <= within).mean()


def draw(telemetry, tmp_path, **options):
    path = tmp_path / "timeline.png"
    plot.save_timeline_png(telemetry.spans, telemetry.passes, path, **options)
    return read(path)


def test_timeline_shows_all_lanes_in_their_colours(tmp_path):
    pixels = draw(make_telemetry(), tmp_path)
    assert pixels.shape[1] == 11 * plot.DOTS_PER_INCH
    for kind in ("compute", "wait", "copy"):
        for shade in plot.SHADES[kind]:
            assert share(pixels, shade) > 0.005, (kind, shade)


def test_dense_timeline_shades_by_busy_share(tmp_path):
    pixels = draw(make_telemetry(units=2000), tmp_path)
    # Compute and waiting are half busy everywhere: each is half as dark, and no block is drawn in the full shade.
    assert share(pixels, "#97b6da", within=30) > 0.08
    assert share(pixels, "#e8a4ad", within=30) > 0.08
    assert share(pixels, plot.SHADES["compute"][1]) == 0
    assert share(pixels, plot.SHADES["wait"][1]) == 0


@pytest.mark.parametrize(
    ("seconds", "label", "limits"),
    [
        (None, "ms since the start of pass 2 of unet", (0.096, 0.304)),
        ((0.0, 0.05), "ms since the first record", (0.0, 0.05)),
    ],
)
def test_window(seconds, label, limits):
    telemetry = make_telemetry()
    window = plot._choose_window(list(telemetry.spans), telemetry.passes, seconds)
    assert window.label == label
    assert (window.start, window.end) == pytest.approx(limits)


def test_title_says_regime_step_bound_and_gap():
    telemetry = make_telemetry()
    window = plot._choose_window(list(telemetry.spans), telemetry.passes, None)
    title, facts = plot._describe(telemetry.passes, list(telemetry.spans), window)
    assert title == "unet: link-bound"
    assert facts.split("   ") == ["policy overlap_async", "step 100 ms", "bound 100 ms", "gap 1.00x"]


def test_spans_without_passes_are_drawn(tmp_path):
    telemetry = make_telemetry()
    telemetry.passes.clear()
    assert share(draw(telemetry, tmp_path), plot.SHADES["compute"][0]) > 0.005


@pytest.mark.parametrize("seconds", [(5.0, 6.0), (2.0, 1.0)])
def test_seconds_without_spans_are_refused(tmp_path, seconds):
    with pytest.raises(ConfigError, match=r"no spans between 5\.000 s and 6\.000 s|give \(from, to\) with from < to"):
        draw(make_telemetry(), tmp_path, seconds=seconds)


def test_nothing_recorded_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw(Telemetry(started=0.0), tmp_path)


def test_report_picture_shows_bars_and_marks(tmp_path):
    path = tmp_path / "report.png"
    plot.save_report_png(Report.from_telemetry(make_telemetry(), {}), path)
    pixels = read(path)
    # Compute and waiting are one half of the upper bar each, the link fills the lower one.
    compute, wait, copy = (share(pixels, plot.SHADES[kind][0]) for kind in ("compute", "wait", "copy"))
    assert compute == pytest.approx(wait, rel=0.1)
    assert copy == pytest.approx(compute + wait, rel=0.1)
    assert compute > 0.02


def test_report_without_passes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no pass"):
        plot.save_report_png(Report.from_telemetry(Telemetry(started=0.0), {}), tmp_path / "report.png")


def test_missing_matplotlib_names_the_remedy(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib"):
        draw(make_telemetry(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_pyplot_is_not_imported(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    draw(make_telemetry(), tmp_path)
    assert "matplotlib.pyplot" not in sys.modules
