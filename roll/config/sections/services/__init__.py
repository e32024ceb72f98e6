"""Settings of services that rewards ask."""
