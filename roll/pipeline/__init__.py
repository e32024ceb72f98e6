"""Pipelines, one file for each: the file reads like the algorithm box of a paper."""
