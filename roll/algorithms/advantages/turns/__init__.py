"""Advantages of turns of episodes."""
