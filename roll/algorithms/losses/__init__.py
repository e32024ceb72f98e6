"""Per-token loss terms, one file per idea."""
