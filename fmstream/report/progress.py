"""What is shown while a run is under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from fmstream.core.telemetry import Telemetry
from fmstream.errors import ConfigError
from fmstream.report.units import format_bytes, format_rate, format_seconds, format_share

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

RECENT_PASSES = 8
"""Passes of the current root over which rates are taken."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment.

    Attributes:
        root: the root of the last pass that ended, "" before the first.
        pass_number: passes of that root that have ended.
        passes: passes of all roots that have ended.
        seconds_per_pass: mean over the recent passes of the root, None before the first.
        bytes_per_second: bytes streamed over the wall time of these passes, None before the first.
        streamed_bytes: bytes over the link since the start.
        wait_share: share of the recent passes in which the compute actor waited for weights.
    """

    root: str = ""
    pass_number: int = 0
    passes: int = 0
    seconds_per_pass: float | None = None
    bytes_per_second: float | None = None
    streamed_bytes: int = 0
    wait_share: float | None = None

    def __str__(self) -> str:
        if self.seconds_per_pass is None:
            return f"{format_bytes(self.streamed_bytes)} streamed, no pass has ended"
        parts = [f"{self.root} pass {self.pass_number}", f"{format_seconds(self.seconds_per_pass)}/pass"]
        if self.bytes_per_second is not None:
            parts.append(format_rate(self.bytes_per_second))
        parts.append(f"{format_bytes(self.streamed_bytes)} streamed")
        if self.wait_share is not None:
            parts.append(f"waiting {format_share(self.wait_share)}")
        return "  ".join(parts)


def snapshot(telemetry: Telemetry) -> Snapshot:
    """Telemetry at this moment; it may be appended to meanwhile."""
    passes = list(telemetry.passes)
    if not passes:
        return Snapshot(streamed_bytes=telemetry.link_bytes)
    root = passes[-1].root
    of_root = [record for record in passes if record.root == root]
    recent = of_root[-RECENT_PASSES:]
    seconds = sum(record.seconds for record in recent)
    timed = seconds > 0
    return Snapshot(
        root=root,
        pass_number=len(of_root),
        passes=len(passes),
        seconds_per_pass=seconds / len(recent),
        bytes_per_second=sum(record.streamed_bytes for record in recent) / seconds if timed else None,
        streamed_bytes=telemetry.link_bytes,
        wait_share=sum(record.wait_seconds for record in recent) / seconds if timed else None,
    )


@runtime_checkable
class Progress(Protocol):
    """Told how a run goes; all calls come from the scheduler's thread."""

    def open(self, title: str) -> None:
        """The run begins."""

    def update(self, snapshot: Snapshot) -> None:
        """The run has come this far; called a few times a second."""

    def close(self) -> None:
        """The run has ended, also by an error."""


class LiveProgress:
    """One live line on a terminal; elsewhere one line at the end.  Writes to standard error by default."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._live: Live | None = None
        self._title = ""
        self._last: Snapshot | None = None

    def open(self, title: str) -> None:
        """Show the title on a terminal."""
        from rich.console import Console
        from rich.live import Live

        self._title, self._last = title, None
        self._console = self._console or Console(stderr=True, highlight=False)
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # No thread of its own and no redirection: the pipeline's own bars and prints go on as they are.
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
            self._show("starting")

    def update(self, snapshot: Snapshot) -> None:
        """Redraw the line."""
        self._last = snapshot
        self._show(str(snapshot))

    def close(self) -> None:
        """Replace the live line by a last one, if any pass has ended."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        last, self._last = self._last, None
        if last is not None and last.passes and self._console is not None:
            self._console.print(f"{self._title}: {last}", markup=False, soft_wrap=True)

    def _show(self, line: str) -> None:
        if self._live is not None:
            from rich.text import Text

            text = Text.assemble((f"{self._title}  ", "bold"), line, no_wrap=True, overflow="ellipsis")
            self._live.update(text, refresh=True)


class GuardedProgress:
    """Keeps failures of a display out of the run: after the first one it is told nothing more, and the user is told."""

    def __init__(self, display: Progress, note: Callable[[str], None]) -> None:
        self._display: Progress | None = display
        self._note = note

    def open(self, title: str) -> None:
        """Forward."""
        self._guard(lambda display: display.open(title))

    def update(self, snapshot: Snapshot) -> None:
        """Forward."""
        self._guard(lambda display: display.update(snapshot))

    def close(self) -> None:
        """Forward."""
        self._guard(lambda display: display.close())

    def _guard(self, call: Callable[[Progress], None]) -> None:
        if self._display is None:
            return
        try:
            call(self._display)
        except Exception as error:  # a display is the user's code, and no reason to end a run
            name, self._display = type(self._display).__name__, None
            self._note(f"the progress display {name} failed and was switched off: {error!r}")


def make_progress(setting: bool | Progress | None, note: Callable[[str], None]) -> Progress | None:
    """The display for a ``progress=`` option: True is a live line, False or None is none; others are used as they are.

    Failures of the display go to ``note`` as a sentence (``telemetry.notes.append``) and never into the run.  Raises
    ``ConfigError`` for what is no display.
    """
    if setting is None or setting is False:
        return None
    display = LiveProgress() if setting is True else setting
    if not isinstance(display, Progress):
        raise ConfigError(f"progress is {setting!r}: give True, False or an object with open(), update() and close()")
    return GuardedProgress(display, note)
