"""Rewards for the form of a response: format, length, repetition, hygiene."""
