"""Rules between the parts of a run file, and notices about settings that are likely mistakes."""
