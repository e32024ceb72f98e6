"""The command line `roll`. Importing this package loads nothing heavy."""

from roll.cli.app import app, main
from roll.cli.examples import start_pipeline
from roll.cli.shared import reported

__all__ = ["app", "main", "reported", "start_pipeline"]
