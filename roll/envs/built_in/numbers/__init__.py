"""Environments about numbers: arithmetic, guesses, cards and bets."""
