"""Shared nouns: samples, batches, metrics, errors."""
