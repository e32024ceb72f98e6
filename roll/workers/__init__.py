"""The workers of all roles: each holds a strategy (or an engine, or a reward) and offers the
methods that the driver calls on it."""
