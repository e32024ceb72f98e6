"""Inference with vLLM's asynchronous engine."""
