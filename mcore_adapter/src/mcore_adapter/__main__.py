"""`python -m mcore_adapter` is the command line."""

from mcore_adapter.cli import main

if __name__ == "__main__":
    main()
