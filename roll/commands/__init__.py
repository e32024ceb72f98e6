"""Services of the command line: launch, check, doctor, merge."""
