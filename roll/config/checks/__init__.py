"""Rules between the parts of a run file, and notes on settings that are likely to be mistakes."""
