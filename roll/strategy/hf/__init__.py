"""Plain Hugging Face: scoring, and generation without an engine."""
