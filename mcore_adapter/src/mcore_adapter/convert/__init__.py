"""Hugging Face tensors <-> Megatron tensors <-> their shards."""
