"""Rewards that compare the text of a response with another, a pattern, a schema or a number."""
