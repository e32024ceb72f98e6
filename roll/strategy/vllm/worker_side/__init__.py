"""Code that runs inside vLLM's own worker processes."""
