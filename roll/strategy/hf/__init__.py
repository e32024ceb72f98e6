"""Scoring and generation with plain Hugging Face forward passes."""
