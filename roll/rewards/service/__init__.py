"""Calls to services over HTTP, with retries and limits."""
