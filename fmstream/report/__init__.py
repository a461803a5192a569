"""What a run did, in numbers, sentences and pictures.  Knows no torch; rich and matplotlib are imported when used."""

from fmstream.report.progress import LiveProgress, Progress, Snapshot, make_progress, snapshot
from fmstream.report.report import Report, describe_environment
from fmstream.report.timeline import save_chrome_trace

__all__ = [
    "LiveProgress",
    "Progress",
    "Report",
    "Snapshot",
    "describe_environment",
    "make_progress",
    "save_chrome_trace",
    "snapshot",
]
