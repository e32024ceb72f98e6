"""Backends for training, scoring and generation, behind the protocols in `interfaces.py`."""
