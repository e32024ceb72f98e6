"""Advantage estimators, one file per family of methods."""
