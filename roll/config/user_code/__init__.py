"""Users' code that a run file names by import path: how it is found, and its errors."""
