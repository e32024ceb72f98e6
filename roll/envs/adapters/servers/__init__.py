"""Adapters of servers: the environment lives behind an address, and its methods are `async`."""
