"""Parts of the algorithm that users bring: their bases, and the calls of their code."""
