"""Experts in vLLM: pushes replace them, prove them, and mend what a broken push left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from roll.core.errors import IncompleteWeightsError, WeightSyncError
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.transfer import send
from roll.weight_sync.transport_choice import new_channel
from tests.contract.engine_rig import Rig, assert_agrees, shake, start
from tests.tiny import save_tiny_model


def saved(model: PreTrainedModel, folder: Path) -> list[tuple[str, Tensor]]:
    """As a checkpoint has them, sorted by name: one tensor per expert, `down_proj` first."""
    model.save_pretrained(folder)
    return sorted(load_file(folder / "model.safetensors").items())


def push_half(rig: Rig, tensors: list[tuple[str, Tensor]], last: str) -> None:
    """A push whose sender fails after one of the tensors."""

    def parts() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            yield name, tensor
            if name == last:
                raise RuntimeError("the trainer failed")

    channel = new_channel("shared_memory", num_receivers=1, bucket_bytes=4096, timeout_s=30)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, channel, parts(), Manifest.of(tensors), verify=True)
        with pytest.raises(WeightSyncError, match=r"^vLLM of actor_infer.*the trainer failed"):
            rig.run(rig.engine.load_weights(channel, rig.version + 1, receiver=0, verify=True))
        with pytest.raises(RuntimeError):
            sending.result(timeout=60)


@pytest.mark.slow
def test_experts_are_replaced_also_after_a_push_that_broke_off(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path, experts=True)
    rig = start("vllm", path, loop, endpoint=None)
    try:
        assert_agrees(rig.generate(n=2)[0], rig.oracle)
        shake(rig.oracle, seed=1)
        tensors = saved(rig.oracle, tmp_path / "next")
        rig.push(tensors)
        assert_agrees(rig.generate(n=2)[0], rig.oracle)
        push_half(rig, tensors, "model.layers.1.mlp.experts.2.gate_proj.weight")
        with pytest.raises(IncompleteWeightsError):
            rig.generate()
        rig.push(tensors)
        assert_agrees(rig.generate(n=2)[0], rig.oracle)
    finally:
        rig.run(rig.engine.close())
