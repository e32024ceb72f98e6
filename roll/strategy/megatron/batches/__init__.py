"""Micro-batches of Megatron-Core: their shapes, and the division of a batch into them."""
