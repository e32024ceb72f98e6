"""A Ray of the run's own: only the processes that a run has a use for."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
from ray._private import parameter, services

# Ray's state service, its autoscaler and its log monitor take 170 MB, and cores from those who
# compute: `ray start` has switches for two of them, `ray.init` for none. Whoever wants them, for
# `ray status` or `ray list actors`, starts a Ray with them and lets runs join it.


def init(**options: Any) -> None:
    """`ray.init`, which leaves this process its signal handlers."""
    main = threading.current_thread() is threading.main_thread()
    previous = signal.getsignal(signal.SIGTERM)
    ray.init(logging_level=logging.ERROR, **options)
    if main:
        # Ray puts its own handler in place, which exits at once, past all cleanups.
        signal.signal(signal.SIGTERM, previous)


def start(*, log_to_driver: bool, **options: Any) -> None:
    """A Ray on this machine that ends with this process."""
    with _few_processes(log_monitor=log_to_driver):
        init(address="local", include_dashboard=False, log_to_driver=log_to_driver, **options)


@contextmanager
def _few_processes(*, log_monitor: bool) -> Iterator[None]:
    params, start_api_server = parameter.RayParams, services.start_api_server
    parameter.RayParams = partial(params, include_log_monitor=log_monitor, no_monitor=True)
    # What it returns itself where the service does not come up, which Ray can do without.
    services.start_api_server = lambda *args, **kwargs: (None, None)
    try:
        yield
    finally:
        parameter.RayParams, services.start_api_server = params, start_api_server
