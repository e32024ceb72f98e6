"""`roll chat`: talk to the policy of a run, or to a model, in the terminal or through a pipe."""
