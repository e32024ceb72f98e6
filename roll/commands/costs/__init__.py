"""Costs of a run before it starts: tokens, hours by a stated or measured rate, money
(docs/costs.md)."""
