"""Benchmarks of one GPU; `all.py` runs all of them."""
