"""`python -m roll.cli`: the command `roll` where it is not installed."""

from roll.cli.app import main

main()
