"""Environments that run programs of the policy, in the sandbox."""
