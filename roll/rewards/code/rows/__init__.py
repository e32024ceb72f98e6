"""Cases of a row, and the program of a response."""
