"""Errors of the sandbox."""


class SandboxError(Exception):
    """The sandbox could not run a program; says nothing about the program."""


class NoLevelError(SandboxError):
    """No level that was asked for works on this machine. The message names what is missing."""


class WorkerLostError(SandboxError):
    """A worker or its template ended, or gives no answer. Another may run the same job."""
