"""Inference with SGLang, which runs in a process of its own."""
