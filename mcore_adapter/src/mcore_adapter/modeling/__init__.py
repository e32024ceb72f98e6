"""Megatron-Core models, built from Hugging Face configs."""
