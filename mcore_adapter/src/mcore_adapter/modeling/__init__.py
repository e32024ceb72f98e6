"""Hugging Face configs -> Megatron-Core models."""
