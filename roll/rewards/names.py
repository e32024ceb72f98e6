"""Names of the built-in rewards, in a module that imports none of their dependencies."""

BUILT_IN = ("exact", "math")
"""Values of `fn` that are not import paths; the functions are in `roll.rewards.loading`."""
