"""Entry point of `python -m mcore_adapter`, which runs the command line."""

from mcore_adapter.cli import main

if __name__ == "__main__":
    main()
