"""Parts of a model that training treats apart from the rest."""
