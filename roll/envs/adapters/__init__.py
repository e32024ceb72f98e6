"""Adapters: environments of other packages and of servers, by the prefix of their name."""
