"""Vision part of a model: its files, its parts, and what it makes of pictures."""
