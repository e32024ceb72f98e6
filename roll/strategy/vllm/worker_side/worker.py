"""`RollWorker`: the framework's extension of vLLM's worker (`worker_extension_cls`)."""

from __future__ import annotations

from typing import Any

from roll.strategy.vllm.outputs.plain_logprobs import PlainLogprobs
from roll.strategy.vllm.worker_side.adapter import AdapterLoader
from roll.strategy.vllm.worker_side.extension import WeightLoader
from roll.strategy.vllm.worker_side.norms import NormKernels
from roll.strategy.vllm.worker_side.prefill import PrefillCounter
from roll.strategy.vllm.worker_side.seeds import SeedBlocks


class RollWorker(
    WeightLoader, AdapterLoader, PrefillCounter, NormKernels, PlainLogprobs, SeedBlocks
):
    """Base class that vLLM adds to its worker's class, made of several parts.

    The worker provides `lora_config`, None without adapters.
    """

    lora_config: Any

    def roll_load_weights(self, *arguments: Any) -> dict[str, Any]:
        """Replace all weights as `WeightLoader` does, and restore the adapter afterwards."""
        report = super().roll_load_weights(*arguments)
        if self.lora_config is not None:
            self.roll_restore_adapter(self.lora_config.max_lora_rank)
        return report
