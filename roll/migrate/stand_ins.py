"""Rewards that nothing here computes: a server of the user must, so that nothing else is trained on
in their place."""

from __future__ import annotations

from roll.migrate.job import Job

STAND_IN = "http://127.0.0.1:9000/{name}"
"""Address of the server."""
KEY = "REWARD_SERVER_KEY"
"""Environment variable with its key."""


def put_stand_in(job: Job, name: str, tag: str | None, url: str | None = None, *keys: str) -> None:
    """Write a reward that a server of the user must compute, because nothing here computes it.

    Args:
        name: name of the reward.
        tag: its only tag; None if its tags are written already.
        url: address of the server, if the file knows one.
    """
    known = url is not None and url.startswith(("http://", "https://"))
    job.put(f"rewards.{name}.remote.url", url if known else STAND_IN.format(name=name), *keys)
    job.put(f"rewards.{name}.remote.api_key_env", KEY, note="drop it if the server wants no key")
    if tag is not None:
        job.put(f"rewards.{name}.tags", [tag])
    job.ask(
        f"rewards.{name}: has no counterpart; compute it behind a server (docs/rewards.md, "
        "`remote`), or name a reward of this framework or a function of your own (`fn`)"
    )
