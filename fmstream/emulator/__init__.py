"""An emulated accelerator: the PyTorch device ``emu`` with virtual time, a link, a memory limit and a race checker."""

from fmstream.emulator.cards import CARDS, Card, card
from fmstream.emulator.checker import Report, SyncError
from fmstream.emulator.dry import DryValueError, dry_parameters
from fmstream.emulator.dry_host import dry_host
from fmstream.emulator.guard import host_guard
from fmstream.emulator.installation import install, machine, reset, uninstall
from fmstream.emulator.machine import Machine, Statistics
from fmstream.emulator.pins import PinError

__all__ = [
    "CARDS",
    "Card",
    "DryValueError",
    "Machine",
    "PinError",
    "Report",
    "Statistics",
    "SyncError",
    "card",
    "dry_host",
    "dry_parameters",
    "host_guard",
    "install",
    "machine",
    "reset",
    "uninstall",
]
