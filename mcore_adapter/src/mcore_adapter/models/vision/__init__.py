"""Families of models that see: a language model of another family, and a vision tower."""
