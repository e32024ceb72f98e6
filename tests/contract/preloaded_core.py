"""Imports of a server whose forks are vLLM's cores in tests; see `forked_cores.py`."""

import gc
import sys

sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # as in a run's fork server

import setproctitle  # noqa: E402

import roll.strategy.vllm.preload  # noqa: E402, F401

setproctitle.getproctitle()  # must find the title before a fork replaces the environment
gc.collect()
gc.freeze()
