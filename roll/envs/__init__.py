"""Environments for agents: what an environment is, those built in, and the hosts that run them."""
