"""Command `roll data`: a look at the rows of a run as it trains on them."""
