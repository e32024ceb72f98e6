"""What this framework adds to vLLM's worker: its `worker_extension_cls`, of several parts."""

from __future__ import annotations

from typing import Any

from roll.strategy.vllm.worker_side.adapter import AdapterLoader
from roll.strategy.vllm.worker_side.extension import WeightLoader
from roll.strategy.vllm.worker_side.prefill import PrefillCounter


class RollWorker(WeightLoader, AdapterLoader, PrefillCounter):
    """Mixed into vLLM's worker; `lora_config` is its."""

    lora_config: Any

    def roll_load_weights(self, *arguments: Any) -> dict[str, Any]:
        """As `WeightLoader` does it; an adapter stays."""
        report = super().roll_load_weights(*arguments)
        if self.lora_config is not None:
            self.roll_restore_adapter(self.lora_config.max_lora_rank)
        return report
