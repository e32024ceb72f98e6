"""Data types that all layers share (samples, batches, metrics, errors) and small helpers."""
