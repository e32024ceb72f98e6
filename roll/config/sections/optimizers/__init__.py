"""Settings of optimizers: what all have, the kinds, and which backend has which kind."""
