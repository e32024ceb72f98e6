"""Adapters of packages. They are imported by other interpreters, too, so they stand alone: of roll,
they import only one another, relatively. A package itself is imported by `prepare` alone."""
