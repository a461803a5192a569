"""Machines, sound and faulty, and what the doctor has to say of each: importing a subject adds its machines."""

from tests.doctor.scenario import SCENARIOS, Scenario
from tests.doctor.scenarios import card, host, link, misread, software, sound, windows

__all__ = ["SCENARIOS", "Scenario", "card", "host", "link", "misread", "software", "sound", "windows"]
