"""Pipelines: one file reads like the algorithm box of a paper."""
