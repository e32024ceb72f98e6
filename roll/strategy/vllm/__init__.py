"""vLLM, asynchronous engine."""
