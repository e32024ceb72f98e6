"""Helpers to run a sharded model: log-probabilities, packed sequences and the pipeline schedule."""
