"""Estimate of the memory that a run needs on each device (docs/memory.md)."""
