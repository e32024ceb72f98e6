"""Outputs of vLLM on their way from its core to the process that owns the engine."""
