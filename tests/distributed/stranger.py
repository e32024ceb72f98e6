"""Somebody on the network who knows where a Ray listens: tries to run a task there.

Run as a program (`python -m tests.distributed.stranger HOST:PORT FILE`), without the environment
of the run; the task would write FILE.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ray

from roll.distributed.on_ray.token import names_a_token


def intrude(path: str) -> None:
    Path(path).write_text("was here")


def main(address: str, path: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False)
        task = ray.remote(num_cpus=0)(intrude)  # the pools of the run hold all
        ray.get(task.remote(path), timeout=60)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test reads it
        said = "refused for want of the token" if names_a_token(error) else repr(error)
    else:
        said = "intruded"
    sys.stdout.write(f"{said}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
