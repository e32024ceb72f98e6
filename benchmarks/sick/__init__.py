"""Small real runs that are ill on purpose, and healthy ones, for the alarms of `roll report`."""
