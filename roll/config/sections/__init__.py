"""Sections of a run file, one class each."""
