"""The actors of a run: the scheduler, the compute actor, the prefetch workers."""
