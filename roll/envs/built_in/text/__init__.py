"""Environments of words: a shop, a house, questions with a search."""
