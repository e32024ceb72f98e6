"""Translation of run files of verl."""
