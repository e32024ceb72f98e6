"""Hugging Face checkpoints in Megatron-Core parallel layouts, and back."""

__version__ = "0.1.0"
