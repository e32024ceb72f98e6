"""Is a run healthy: how its metrics went, and alarms in words. Pure functions of its records."""
