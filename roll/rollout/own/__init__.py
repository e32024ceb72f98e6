"""Parts of the rollout that users bring: their bases, and the calls of their code."""
