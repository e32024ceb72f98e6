"""Environments on boards: mazes, puzzles, and games for two."""
