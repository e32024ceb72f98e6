"""Implicit process rewards: those of tokens, learned from the rewards of whole samples (PRIME,
arXiv 2502.01456)."""
