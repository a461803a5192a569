"""Diagnosis of the machine: link, cards, memory, builds.  It reads and measures, and changes no setting."""
