"""Runtime of `roll eval`: the engines and rewards of a run, without a trainer."""
