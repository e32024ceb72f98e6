"""Conversion between Hugging Face tensors, full Megatron tensors and the shards of the latter."""
