"""Implementation of the commands of `roll`: launch, check, doctor, merge."""
