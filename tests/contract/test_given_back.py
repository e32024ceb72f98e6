"""What a backend keeps although nothing will read it: in host memory, and on a device between its
turns. Where the tests run nothing moves, so they look at what would."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from mcore_adapter.platform import adapt_to_cpu
from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import DeepspeedConfig, MegatronConfig
from roll.core.types import WorkerSpec
from roll.strategy.deepspeed.train import DeepspeedStrategy
from roll.strategy.fsdp2.train import Fsdp2Strategy
from roll.strategy.megatron import memory
from roll.strategy.megatron.train import MegatronStrategy
from tests.contract.backends import SCORE_BACKENDS, TrainBackend
from tests.contract.ranks import run_ranks
from tests.contract.train_job import train_batch
from tests.tiny import save_tiny_model


def scores(spec: WorkerSpec, folder: Path) -> dict[str, Any]:
    """Return the layers that FSDP has noted for a backward pass after each of three scores."""
    model = ModelConfig(path=str(folder.parent / "model"))
    strategy: Any = SCORE_BACKENDS["fsdp2"].build(spec, model, budget=40)
    assert isinstance(strategy, Fsdp2Strategy)
    found = []
    for _ in range(3):
        strategy.score(train_batch())
        root = cast(Any, strategy._model)._get_fsdp_state()
        states = root._state_ctx.all_states
        groups = [group for each in states for group in each._fsdp_param_groups]
        indices = sum(len(group._post_forward_indices) for group in groups)
        found.append((len(root._comm_ctx.post_forward_order), indices))
        assert all(group.is_sharded for group in groups)
    strategy.close()
    return {"noted": found}


def test_passes_of_a_frozen_model_leave_no_notes_for_a_backward_pass(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    # Two ranks, because one that computes in the dtype of its weights does without FSDP.
    for found in run_ranks(2, scores, tmp_path / "ranks", timeout_s=300):
        assert found["noted"] == [(0, 0)] * 3


def offloaded(spec: WorkerSpec, folder: Path) -> dict[str, Any]:
    """Return the tensors of DeepSpeed's optimizer that are on the device and not among those that
    move, if the optimizer's states are in host memory."""
    settings = {"stage": 2, "offload_optimizer": True}
    backend = TrainBackend("", DeepspeedConfig, (), settings=settings)
    strategy = backend.build(spec, ModelConfig(path=str(folder.parent / "model")))
    assert isinstance(strategy, DeepspeedStrategy)
    known = {tensor.untyped_storage().data_ptr() for tensor in strategy.states()}
    zero = strategy._engine.optimizer
    buffer = zero.temp_grad_buffer_for_gpu_offload
    assert buffer.numel() == max(p.numel() for p in strategy._model.parameters())
    strategy.close()
    return {"moves": buffer.untyped_storage().data_ptr() in known}


def test_the_buffer_of_gradients_of_zero_offload_leaves_the_device(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    (found,) = run_ranks(1, offloaded, tmp_path / "ranks", timeout_s=300)
    assert found["moves"]


def angles(spec: WorkerSpec, folder: Path) -> dict[str, Any]:
    """Return which angles of rows there are before and after a model leaves its device."""
    adapt_to_cpu()
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    rotary = RotaryEmbedding(8, 1.0, use_cpu_initialization=True)
    kept = [weakref.ref(rotary(length)) for length in (16, 24)]
    before = [each() is not None for each in kept]
    memory.offload(cast(Any, SimpleNamespace(chunks=[rotary])), None)
    after = [each() is not None for each in kept]
    return {"before": before, "after": after, "again": torch.equal(rotary(16), rotary(24)[:16])}


def test_rotary_angles_leave_the_device_with_a_megatron_model(tmp_path: Path) -> None:
    (found,) = run_ranks(1, angles, tmp_path / "ranks", timeout_s=300)
    assert found["before"] == [True, True]  # Megatron-Core keeps them
    assert found["after"] == [False, False]
    assert found["again"]


def gathered(spec: WorkerSpec, folder: Path) -> dict[str, Any]:
    """Return how many tensors Megatron-Core keeps to gather tokens in, before and after a model
    leaves its device, and whether a pass after that computes the same."""
    from megatron.core import parallel_state

    model = ModelConfig(path=str(folder.parent / "model"))
    settings = {"tp": 2, "sequence_parallel": True}
    strategy = TrainBackend("", MegatronConfig, (), settings=settings).build(spec, model)
    assert isinstance(strategy, MegatronStrategy)
    first = strategy.score(train_batch()).logprobs_BT
    kept = len(parallel_state.get_global_memory_buffer().buffer)
    memory.offload(strategy._model, None)
    left = len(parallel_state.get_global_memory_buffer().buffer)
    again = strategy.score(train_batch()).logprobs_BT
    strategy.close()
    return {"kept": kept, "left": left, "equal": torch.equal(first, again)}


def test_what_megatron_gathers_tokens_in_leaves_the_device(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    for found in run_ranks(2, gathered, tmp_path / "ranks", timeout_s=300):
        assert found["kept"]
        assert not found["left"]
        assert found["equal"]
