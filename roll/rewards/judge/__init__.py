"""Rewards that a model decides: the question, the answer, and how it is read."""
