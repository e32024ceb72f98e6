"""Tensors of a checkpoint that stay in its files until a rank copies its part of them."""
