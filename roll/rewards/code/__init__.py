"""Verdicts on programs that a policy has written. They are made outside of the sandbox."""
