"""Episodes, in which the policy and an environment take turns."""
