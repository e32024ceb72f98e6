"""Sections of a run file, one class per section."""
