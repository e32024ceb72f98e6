"""Tools of agents: what a tool is, formats of calls, built-in tools, the environment `tools`."""
