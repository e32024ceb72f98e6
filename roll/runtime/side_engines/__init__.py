"""Engines beside those of the policy: judges, and opponents in games."""
