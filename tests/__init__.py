"""Tests, and what they share: helpers are imported as `tests.<module>`."""
