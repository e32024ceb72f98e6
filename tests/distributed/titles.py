"""Import of a fork server that lets forks set their title, as `roll.strategy.vllm.preload` does."""

from __future__ import annotations

import setproctitle

setproctitle.getproctitle()
