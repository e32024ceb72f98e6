"""Sandboxes and languages of programs, and programs that read standard input."""
