"""What is shown while a run is under way."""

import io

import pytest
from rich.console import Console

from fmstream.core.telemetry import PassRecord, Telemetry
from fmstream.errors import ConfigError
from fmstream.report.progress import GuardedProgress, LiveProgress, Snapshot, make_progress, snapshot

SHOT = Snapshot("unet", 3, 4, 1.25, 2e9, 2**30, 0.4)


def make_console(**options):
    return Console(file=io.StringIO(), width=100, color_system=None, **options)


def test_snapshot_of_nothing():
    empty = snapshot(Telemetry(link_bytes=5))
    assert empty == Snapshot(streamed_bytes=5)
    assert str(empty) == "5 B streamed, no pass has ended"


def test_snapshot_takes_the_recent_passes_of_the_current_root():
    passes = [PassRecord("text", "trace", 0, 1, 1.0, 0.0, 7, 0, 0)]
    passes += [PassRecord("unet", "trace", 1, 101, 1.0, 99.0, 9999, 0, 0)]
    passes += [PassRecord("unet", "sync", 101 + 2 * n, 103 + 2 * n, 1.5, 0.5, 100, 0, 0) for n in range(8)]
    shot = snapshot(Telemetry(passes=passes, link_bytes=1000))
    assert shot == Snapshot("unet", 9, 10, 2.0, 50.0, 1000, 0.25)


def test_snapshot_of_passes_without_length_has_no_rate():
    shot = snapshot(Telemetry(passes=[PassRecord("unet", "sync", 1, 1, 0.0, 0.0, 5, 0, 0)]))
    assert (shot.seconds_per_pass, shot.bytes_per_second, shot.wait_share) == (0.0, None, None)
    assert str(shot) == "unet pass 1  0 s/pass  0 B streamed"


def test_snapshot_reads_as_one_line():
    assert str(SHOT) == "unet pass 3  1.25 s/pass  2.00 GB/s  1.00 GiB streamed  waiting 40 %"


def test_file_gets_one_line_at_the_end():
    console = make_console()
    progress = LiveProgress(console)
    progress.open("[svd]")
    progress.update(SHOT)
    assert console.file.getvalue() == ""
    progress.close()
    assert console.file.getvalue() == f"[svd]: {SHOT}\n"


def test_file_gets_nothing_if_no_pass_ended():
    console = make_console()
    progress = LiveProgress(console)
    progress.open("svd")
    progress.update(Snapshot())
    progress.close()
    assert console.file.getvalue() == ""


def test_terminal_shows_each_update_and_ends_with_a_line():
    console = make_console(force_terminal=True, _environ={"TERM": "xterm"})
    progress = LiveProgress(console)
    progress.open("svd")
    progress.update(SHOT)
    shown = console.file.getvalue()
    assert "svd  starting" in shown
    assert f"svd  {SHOT}" in shown
    progress.close()
    progress.close()
    assert console.file.getvalue().endswith(f"svd: {SHOT}\n")
    assert console.file.getvalue().count(f"svd: {SHOT}") == 1


def test_display_goes_to_standard_error(capsys):
    progress = LiveProgress()
    progress.open("svd")
    progress.update(SHOT)
    progress.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("svd: unet pass 3")


class Broken:
    def __init__(self):
        self.calls = 0

    def open(self, title):
        self.calls += 1

    def update(self, snapshot):
        self.calls += 1
        raise BrokenPipeError("gone")

    def close(self):
        self.calls += 1


def test_failing_display_is_switched_off_and_noted():
    display, notes = Broken(), []
    progress = GuardedProgress(display, notes.append)
    progress.open("svd")
    progress.update(SHOT)
    progress.update(SHOT)
    progress.close()
    assert display.calls == 2
    assert notes == ["the progress display Broken failed and was switched off: BrokenPipeError('gone')"]


def test_closed_terminal_does_not_reach_the_run():
    console, notes = make_console(), []
    progress = GuardedProgress(LiveProgress(console), notes.append)
    progress.open("svd")
    progress.update(SHOT)
    console.file.close()
    progress.close()
    assert len(notes) == 1
    assert "LiveProgress failed" in notes[0]


@pytest.mark.parametrize("setting", [None, False])
def test_no_progress(setting):
    assert make_progress(setting, [].append) is None


@pytest.mark.parametrize("setting", [True, Broken()])
def test_progress_is_guarded(setting):
    assert isinstance(make_progress(setting, [].append), GuardedProgress)


def test_what_is_no_display_is_refused():
    with pytest.raises(ConfigError, match="progress is 'yes': give True, False or an object with open"):
        make_progress("yes", [].append)
