"""What this framework adds to vLLM's worker: its `worker_extension_cls`, of several parts."""

from __future__ import annotations

from roll.strategy.vllm.adapter import AdapterLoader
from roll.strategy.vllm.extension import WeightLoader


class RollWorker(WeightLoader, AdapterLoader):
    """Mixed into vLLM's worker."""
