"""Rewards that find the short answer of a response and compare it with the right one."""
