"""The level `remote`: programs run on other hosts, which are asked over HTTP."""
