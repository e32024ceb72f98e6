"""Formats in which model families write calls of tools, one module each."""
