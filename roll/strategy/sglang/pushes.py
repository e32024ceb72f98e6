"""`push_weights`: lets SGLang's schedulers receive a push; runs in SGLang's main process."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from roll.core.errors import EngineError
from roll.strategy.sglang.extension import LOADER, Answer, Push


async def push_weights(manager: Any, push: Push, tp: int) -> list[Answer]:
    """Run `extension.load_pushed_weights` on every rank; return the ranks' answers in rank order.

    Args:
        manager: SGLang's `TokenizerManager`, whose generation is paused.
        tp: number of ranks.

    Raises:
        EngineError: SGLang refused the update.
    """
    from sglang.srt.managers.io_struct import (
        BeginWeightUpdateReqInput,
        EndWeightUpdateReqInput,
        UpdateWeightsFromTensorReqInput,
    )
    from sglang.srt.utils import MultiprocessingSerializer

    with tempfile.TemporaryDirectory(prefix="push-") as folder:
        payload = MultiprocessingSerializer.serialize([(push.to_json(folder), torch.empty(0))])
        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload] * tp,
            load_format=LOADER,
            flush_cache=False,
            selector="target",
        )
        begin = BeginWeightUpdateReqInput(selector="target")
        _require(await manager.begin_weight_update(begin))
        try:
            _require(await manager.update_weights_from_tensor(update))
        finally:
            _require(await manager.end_weight_update(EndWeightUpdateReqInput()))
        # SGLang has answered, so all ranks have finished and written their files.
        files = (Path(folder) / f"{rank}.json" for rank in range(tp))
        return [Answer(**json.loads(file.read_text())) for file in files]


def _require(outcome: tuple[bool, str]) -> None:
    """Raise EngineError if SGLang reports that a step of the update failed."""
    done, message = outcome
    if not done:
        raise EngineError(f"SGLang refuses new weights: {message}")
