"""Workers of rewards that ask a service."""
