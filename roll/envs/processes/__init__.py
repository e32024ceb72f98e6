"""Environments in processes of their own: one process for each episode, with any interpreter."""
