"""The command line: `roll examples|run|check|show|migrate|merge|report|reward|env|sandbox|doctor`.
Importing this package loads nothing heavy."""

from roll.cli.app import app, main
from roll.cli.examples import start_pipeline
from roll.cli.shared import reported

__all__ = ["app", "main", "reported", "start_pipeline"]
