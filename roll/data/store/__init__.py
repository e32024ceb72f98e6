"""Rows on disk: tokenized in parallel once, kept by the hash of all that they depend on."""
