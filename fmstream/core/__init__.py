"""Bookkeeping that knows no torch: pages, the window, traces, plans."""
