"""Conversion of conversations to tokens with chat templates, and choice of the trained tokens."""
