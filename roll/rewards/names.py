"""Names of the built-in rewards, known without loading what they need."""

BUILT_IN = ("exact", "math")
"""What `fn` may hold besides an import path; `roll.rewards.loading` has the functions."""
