"""vLLM beyond the suite of all engines: parallel ranks, adapters, guessing ahead."""

from __future__ import annotations

import asyncio
import copy
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from roll.config.sections.engines import NgramSpeculationConfig, VllmConfig
from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError, EngineError, WeightSyncError
from roll.core.types import WorkerPart
from roll.platform.processes import descendants
from roll.strategy.vllm.arguments import engine_arguments
from roll.strategy.vllm.outputs.gathered import MOST_STEPS
from tests.contract.engine_rig import (
    PROMPT,
    SPEC,
    assert_agrees,
    assert_agrees_by_version,
    assert_sees,
    request,
    rescore,
    shake,
    start,
    weights_of,
)
from tests.tiny import save_tiny_model
from tests.vision_models import save_vision_model, seen_row


def adapter_of(
    model: PreTrainedModel, rank: int, seed: int, inside: str = "model"
) -> list[tuple[str, Tensor]]:
    """PEFT's names and shapes, for one layer of each kind of the language model at this path."""
    g = torch.Generator().manual_seed(seed)
    tensors = []
    for path in ("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj", "layers.1.mlp.up_proj"):
        rows, columns = model.get_submodule(f"{inside}.{path}").weight.shape
        for part, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
            name = f"base_model.model.{inside}.{path}.{part}.weight"
            tensors.append((name, torch.randn(shape, generator=g) * 0.2))
    return tensors


def merged(
    model: PreTrainedModel, adapter: list[tuple[str, Tensor]], alpha: float
) -> PreTrainedModel:
    """LoRA by its definition: W + alpha / r * B A."""
    model = copy.deepcopy(model)
    parts = dict(adapter)
    for name, a in adapter:
        if "lora_A" in name:
            b = parts[name.replace("lora_A", "lora_B")]
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            with torch.no_grad():
                model.get_submodule(path).weight += alpha / a.shape[0] * (b @ a)
    return model


@pytest.mark.parametrize("node", [0, 1])
def test_vllm_understands_an_engine_on_two_nodes(tmp_path: Path, node: int) -> None:
    """Two ranks on each: a stage, as consecutive devices are."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    parts = (WorkerPart(3, "10.0.0.3", (0, 1)), WorkerPart(4, "10.0.0.4", (0, 1)))
    spec = replace(SPEC, parts=parts, part=node, rendezvous="10.0.0.3:24000")
    arguments = engine_arguments(
        VllmConfig(tp=2, pp=2),
        ModelConfig(path=str(save_tiny_model(tmp_path, tied=False))),
        dtype="float32",
        max_model_len=64,
        spec=spec,
        cpu_token_bytes=64,
        overrides={},
    )
    config = AsyncEngineArgs(**arguments).create_engine_config(headless=node > 0).parallel_config
    assert (config.nnodes_within_dp, config.node_rank_within_dp) == (2, node)
    assert (config.world_size, config.local_world_size) == (4, 2)
    assert (config.master_addr, config.master_port) == ("10.0.0.3", 24000)
    assert config.distributed_executor_backend == "mp"
    assert config.assigned_physical_gpu_ids == [0, 1]


@pytest.mark.slow
def test_the_process_groups_of_an_engine_of_one_process_share_a_thread(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    rig = start("vllm", save_tiny_model(tmp_path, tied=False), loop, endpoint=None)
    try:
        assert_agrees(rig.generate()[0], rig.oracle)
        threads = [
            name.read_text().strip()
            for pid in descendants(os.getpid())
            for name in Path(f"/proc/{pid}/task").glob("*/comm")
        ]
        assert threads.count("gloo_tcp_loop") == 1
    finally:
        rig.run(rig.engine.close())


@pytest.mark.slow
def test_tokens_of_many_steps_come_at_once_and_an_abort_returns_those_that_wait(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    rig = start("vllm", save_tiny_model(tmp_path, tied=False), loop, endpoint=None)
    try:
        processor = rig.engine._engine.output_processor  # type: ignore[attr-defined]
        messages, of_vllm = [], processor.process_outputs

        def process(outputs: list[Any], *more: Any, **further: Any) -> Any:
            messages.append([len(output.new_token_ids) for output in outputs])
            return of_vllm(outputs, *more, **further)

        processor.process_outputs = process
        written = rig.generate(n=3, tokens=8 * MOST_STEPS, ignore_eos=True)
        assert len(messages) < 2 * 8, "a message for each step"
        assert sum(map(sum, messages)) == sum(map(len, written)) == 3 * 8 * MOST_STEPS
        for completion in written:
            assert_agrees(completion, rig.oracle)
        lengths: list[int] = []
        while not any(length % MOST_STEPS for length in lengths) and len(lengths) < 30:
            rig.generate(tokens=1)  # its end empties the core
            running = request(tokens=400, ignore_eos=True)
            future = rig.submit(rig.engine.generate(running))
            time.sleep(0.02 * (1 + len(lengths)))  # a busy machine may not have begun by then
            rig.run(rig.engine.abort(running.id))
            lengths.append(len(future.result(timeout=60)[0]))
        assert any(length % MOST_STEPS for length in lengths), f"only whole messages: {lengths}"
    finally:
        rig.run(rig.engine.close())


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_compiled_layers_compute_with_the_weights_of_the_last_push(
    loop: asyncio.AbstractEventLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # of other engines of this process
    path = save_tiny_model(tmp_path / "model", tied=False)
    with monkeypatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
        rig = start("vllm", path, loop, endpoint=None, enforce_eager=False, tp=tp)
    try:
        assert list((tmp_path / "code").rglob("*.so")), "nothing was compiled"
        assert_agrees(rig.generate(n=2)[0], rig.oracle)
        for seed in (1, 2):
            shake(rig.oracle, seed=seed)
            rig.push(weights_of(rig.oracle), receivers=tp)
            for completion in rig.generate(n=3, tokens=40, ignore_eos=True):
                assert_agrees(completion, rig.oracle)
    finally:
        rig.run(rig.engine.close())


@pytest.mark.slow
def test_two_tensor_parallel_ranks_agree_with_hugging_face_over_pushes_and_adapters(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path, tied=False)
    rig = start("vllm", path, loop, tp=2, max_lora_rank=8, endpoint=None)
    try:
        assert_agrees(rig.generate(n=2)[0], rig.oracle)
        shake(rig.oracle, seed=1)
        sent, loaded = rig.push(weights_of(rig.oracle), receivers=2)
        assert loaded.checksum == sent.checksum
        assert_agrees(rig.generate(n=2)[0], rig.oracle)
        models = {rig.version: copy.deepcopy(rig.oracle)}
        future = rig.submit(rig.engine.generate(request(n=2, tokens=300, ignore_eos=True)))
        for rank in (4, 8):
            rig.wait_until_written(30)
            adapter = adapter_of(rig.oracle, rank, seed=rank)
            rig.push(adapter, receivers=2, alpha=16.0)
            models[rig.version] = merged(rig.oracle, adapter, 16.0)
        for completion in future.result(timeout=600):
            assert_agrees_by_version(completion, models)
        unknown = [(n.replace("layers.1", "layers.7"), t) for n, t in adapter]
        with pytest.raises(WeightSyncError, match=r"no module .*layers.7"):
            rig.push(unknown, receivers=2, alpha=16.0)
        shake(rig.oracle, seed=2)
        rig.push(weights_of(rig.oracle), receivers=2)
        assert_agrees(rig.generate(n=2)[0], merged(rig.oracle, adapter, 16.0))
    finally:
        rig.run(rig.engine.close())


@pytest.mark.slow
def test_two_ranks_see_pictures_with_an_adapter_on_the_language_model(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    path, row = save_vision_model(tmp_path, "qwen3_vl"), seen_row("qwen3_vl", ((2, 3), (3, 2)))
    rig = start("vllm", path, loop, tp=2, max_lora_rank=8, endpoint=None)
    try:
        models = [rig.oracle]
        for push in ("none", "weights", "adapter"):
            if push == "weights":
                shake(rig.oracle, seed=1)
                rig.push(weights_of(rig.oracle), receivers=2)
            elif push == "adapter":
                adapter = adapter_of(rig.oracle, 8, seed=2, inside="model.language_model")
                rig.push(adapter, receivers=2, alpha=16.0)
                models.append(merged(rig.oracle, adapter, 16.0))
            asked = request(prompt=row.tokens, pictures=row.pictures, n=2, ignore_eos=True)
            for completion in rig.run(rig.engine.generate(asked)):
                assert_sees(completion, row, models[-1])
    finally:
        rig.run(rig.engine.close())


@pytest.mark.slow
def test_a_language_model_is_pushed_alone_to_an_engine_that_has_its_tower_as_well(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    """Qwen3.5; vLLM computes its linear attention in bfloat16 only, and its prefix cache needs
    chunks of prompts, which seeded requests cannot have without a GPU."""
    path = save_vision_model(tmp_path / "whole", "qwen3_5")
    rig = start("vllm", path, loop, dtype="bfloat16", prefix_caching=False, endpoint=None)
    try:
        alone = AutoModelForCausalLM.from_pretrained(path)
        loaded = copy.deepcopy(alone)
        for push in (False, True):
            if push:
                shake(alone, seed=1)
                alone.save_pretrained(tmp_path / "alone")
                tensors = load_file(tmp_path / "alone" / "model.safetensors")
                assert not any("visual" in name for name in tensors)
                rig.push([(name, tensor.bfloat16()) for name, tensor in tensors.items()])
            (completion,) = rig.generate(ignore_eos=True)
            found = torch.tensor(completion.logprobs, dtype=torch.float64)
            apart, stale = (
                (found - rescore(model, PROMPT, completion.tokens)).abs().mean()
                for model in (alone, loaded)
            )
            assert apart < 0.03
            assert stale > 0.1 or not push
    finally:
        rig.run(rig.engine.close())


def test_pipeline_stages_without_a_gpu_are_refused_before_anything_starts(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=r"set actor_infer\.strategy\.pp to 1"):
        start("vllm", save_tiny_model(tmp_path), loop, pp=2)


def test_a_shared_prefix_of_linear_attention_is_refused_before_anything_starts(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    path = save_vision_model(tmp_path / "whole", "qwen3_5")
    with pytest.raises(ConfigError, match=r"prefix_caching: 1 of the model.s 2 layers"):
        start("vllm", path, loop, dtype="bfloat16")


@pytest.mark.slow
def test_guessing_ahead_leaves_log_probs_and_versions_as_they_are(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    guess = NgramSpeculationConfig(num_tokens=3, max_match=3)
    rig = start("vllm", save_tiny_model(tmp_path), loop, speculation=guess, endpoint=None)
    try:
        (greedy,) = rig.generate(temperature=0.0, tokens=100, ignore_eos=True)
        known = rig.oracle.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False)
        assert list(greedy.tokens[:24]) == known[0, len(PROMPT) :].tolist()
        models = {0: copy.deepcopy(rig.oracle)}
        future = rig.submit(rig.engine.generate(request(n=4, tokens=500, ignore_eos=True)))
        rig.wait_until_written(100)
        shake(rig.oracle, seed=1)
        rig.push_oracle()
        models[rig.version] = rig.oracle
        for completion in future.result(timeout=600):
            assert_agrees_by_version(completion, models)
    finally:
        rig.run(rig.engine.close())
