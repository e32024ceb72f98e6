"""Losses and loss terms per token, one file per method."""
