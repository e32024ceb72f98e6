"""Data files as tokens, and which examples make a step."""
