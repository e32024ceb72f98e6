"""`roll reward try`: the rewards of a run on responses, without the policy."""
