"""Translation of run files of ROLL."""
