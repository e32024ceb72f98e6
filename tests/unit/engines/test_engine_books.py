"""What engines keep books of: tokens and heartbeats, adapters, arguments of vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.commands.preflight import inspect
from roll.config import load_config
from roll.config.sections.engines import DraftSpeculationConfig, NgramSpeculationConfig, VllmConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.roles import Role
from roll.core.completion import Completion, FinishReason
from roll.core.errors import ConfigError, EngineDiedError, EngineError, WeightSyncError
from roll.core.types import WorkerPart, WorkerSpec
from roll.strategy.serving.processes import DeathWatch
from roll.strategy.serving.progress import Progress
from roll.strategy.vllm.arguments import engine_arguments
from roll.strategy.vllm.cpu_limits import cache_bytes_per_token
from roll.strategy.vllm.supported_arguments import (
    RESERVED_ARGUMENTS,
    check_arguments,
    known_arguments,
)
from roll.strategy.vllm.worker_side.adapter import adapter_rank
from roll.weight_sync.manifest import Manifest, TensorMeta
from tests.runs import write_task


def piece(length: int, start: int = 0) -> Completion:
    tokens = tuple(range(start, length))
    return Completion.of(tokens, (0.0,) * len(tokens), (0,) * len(tokens), FinishReason.ABORT)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "write", "beat", "end", "fail"]),
            st.integers(0, 3),
            st.integers(1, 9),
        ),
        max_size=60,
    )
)
def test_every_token_is_counted_once_and_reported_at_most_once(
    events: list[tuple[str, int, int]],
) -> None:
    books = Progress()
    lengths: dict[str, list[int]] = {}
    reported: dict[str, list[int]] = {}
    over = 0

    def read(name: str, starts: Sequence[int]) -> list[Completion]:
        return [piece(n, start) for n, start in zip(lengths[name], starts, strict=True)]

    for event, which, amount in events:
        name = f"request-{which}"
        if event == "begin" and name not in lengths:
            lengths[name], reported[name] = [0, 0], [0, 0]
            books.begin(name, 2)
        elif event == "write" and name in lengths:
            lengths[name][amount % 2] += amount
        elif event == "end" and name in lengths:
            books.end(name, [piece(n) for n in lengths[name]])
            over += sum(lengths.pop(name))
        elif event == "fail" and name in lengths:
            books.end(name)
            over += sum(reported[name])
            del lengths[name]
        elif event == "beat":
            beat = books.heartbeat(7, 0, read)
            assert set(beat.progress) == set(lengths)
            for running, pieces in beat.progress.items():
                for i, part in enumerate(pieces):
                    assert part.start == reported[running][i]
                    assert list(part.written.tokens) == list(range(part.start, lengths[running][i]))
                reported[running] = list(lengths[running])
            assert beat.written_tokens == over + sum(map(sum, lengths.values()))


def test_two_requests_under_way_cannot_share_an_id() -> None:
    books = Progress()
    books.begin("twice", 1)
    with pytest.raises(EngineError, match="'twice' is under way"):
        books.begin("twice", 1)


def pushed(**shapes: tuple[int, ...]) -> Manifest:
    return Manifest(
        tuple(
            TensorMeta(f"base_model.model.x.{name}.weight", shape, "float32")
            for name, shape in shapes.items()
        )
    )


def test_the_rank_of_an_adapter_is_read_from_its_shapes() -> None:
    assert adapter_rank(pushed(lora_A=(4, 64), lora_B=(32, 4)), 8) == 4


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (pushed(lora_A=(4, 64)), r"came without .*lora_B"),
        (pushed(weight=(4, 64)), "no part of a LoRA adapter"),
        (pushed(lora_A=(4, 64), lora_B=(32, 5)), "one rank; found 4 .* 5 "),
        (pushed(lora_A=(16, 64), lora_B=(32, 16)), "rank 16, the engine takes up to 8"),
        (Manifest(()), "no tensor"),
    ],
)
def test_what_is_no_adapter_that_fits_is_refused(manifest: Manifest, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        adapter_rank(manifest, 8)


SPEC = WorkerSpec(
    role=Role.ACTOR_INFER,
    rank=0,
    world_size=1,
    devices=(0,),
    cores=(0,),
    node=0,
    rendezvous="10.0.0.1:23456",
    seed=0,
    platform="cuda",
)


def arguments(
    overrides: dict[str, Any] | None = None, /, cpu: int | None = None, **options: Any
) -> dict[str, Any]:
    spec = options.pop("spec", SPEC)
    return engine_arguments(
        VllmConfig(**options),
        ModelConfig(path="m"),
        dtype="float32",
        max_model_len=64,
        spec=spec,
        cpu_token_bytes=cpu,
        overrides=overrides or {},
    )


def test_an_engine_on_several_nodes_meets_at_an_address_of_the_first() -> None:
    parts = (WorkerPart(2, "10.0.0.1", (0, 1)), WorkerPart(3, "10.0.0.2", (0, 1)))
    second = replace(SPEC, parts=parts, part=1, node=3, host="10.0.0.2", devices=(0, 1))
    options: dict[str, Any] = {"tp": 2, "pp": 2}
    expected = {
        "nnodes": 2,
        "node_rank": 1,
        "master_addr": "10.0.0.1",
        "master_port": 23456,
        "distributed_executor_backend": "mp",
    }
    assert expected.items() <= arguments(None, spec=second, **options).items()
    assert "device_ids" not in arguments(None, spec=second, **options)
    on_cpu = arguments(None, cpu=8, spec=replace(second, platform="cpu"), **options)
    assert on_cpu["device_ids"] == [0, 1]
    assert not {"nnodes", "master_addr"} & set(arguments(None, **options))


def test_sleep_that_drops_the_weights_keeps_those_of_a_small_model() -> None:
    small = {"kind": "draft_model", "model": "small"}
    kept = arguments(None, sleep_level=2, speculation=small)["sleep_preserve_parameter_names"]
    assert kept == ["draft.*"]
    ngram = {"kind": "ngram"}
    for options in ({"speculation": small}, {"sleep_level": 2, "speculation": ngram}):
        assert "sleep_preserve_parameter_names" not in arguments(None, **options)


@pytest.mark.parametrize(
    ("token_bytes", "options", "mib"),
    [
        (1 << 10, {}, 64),  # 256 sequences of 64 tokens and half a block: 24 MiB, below the least
        (1 << 13, {}, 192),
        (1 << 16, {}, 1024),  # 1536 MiB, above the most
        (1 << 16, {"max_num_seqs": 4}, 64),
        (1 << 24, {}, 2048),  # one sequence of 64 tokens, its last block, and one for the engine
        (1 << 13, {"tp": 2}, 96),
        (1 << 24, {"kv_cache_gb": 0.25}, 256),
    ],
)
def test_without_a_gpu_the_cache_has_room_for_the_sequences(
    token_bytes: int, options: dict[str, Any], mib: int
) -> None:
    found = arguments(cpu=token_bytes, **options)
    assert found["kv_cache_memory_bytes"] == mib << 20
    assert found["block_size"] == 32
    assert "block_size" not in arguments(**options)


def test_bytes_of_a_token_are_those_of_its_keys_and_values() -> None:
    plain = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    assert cache_bytes_per_token(plain, 4) == 2 * 64 * 3 * 4
    grouped = plain | {"num_key_value_heads": 2, "head_dim": 32}
    assert cache_bytes_per_token({"text_config": grouped}, 2) == 2 * 2 * 32 * 3 * 2
    latent = plain | {"kv_lora_rank": 40, "qk_rope_head_dim": 8}
    assert cache_bytes_per_token(latent, 2) == 48 * 3 * 2


def test_options_reach_vllm_under_its_names() -> None:
    found = arguments(
        tp=2,
        pp=3,
        quantization="fp8_per_channel",
        max_lora_rank=16,
        speculation=NgramSpeculationConfig(num_tokens=5, min_match=2, max_match=3),
        engine_args={"block_size": 32},
    )
    expected = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "quantization": "fp8_per_channel",
        "enable_lora": True,
        "max_lora_rank": 16,
        "block_size": 32,
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 3,
        },
    }
    assert expected.items() <= found.items()
    draft = arguments(speculation=DraftSpeculationConfig(model="small"))["speculative_config"]
    assert draft == {"method": "draft_model", "model": "small", "num_speculative_tokens": 4}


def test_a_key_that_the_user_sets_goes_before_ours() -> None:
    assert "hf_overrides" not in arguments()
    found = arguments({"a": 1, "b": 2}, engine_args={"hf_overrides": {"b": 3, "c": 4}})
    assert found["hf_overrides"] == {"a": 1, "b": 3, "c": 4}


def test_a_cache_of_a_given_size_needs_no_share_of_the_gpu_free() -> None:
    """Two engines on one GPU have 4 GiB each, and vLLM would refuse the second one for want of 85 %
    of free memory."""
    found = arguments(kv_cache_gb=4.0, gpu_memory_utilization=0.85)
    assert found["kv_cache_memory_bytes"] == 4 << 30
    assert 0 < found["gpu_memory_utilization"] <= 0.01
    assert arguments(gpu_memory_utilization=0.7)["gpu_memory_utilization"] == 0.7


def test_ranks_of_one_replica_are_processes_of_its_own_worker() -> None:
    """Not Ray actors, as vLLM would have it by itself within a placement group."""
    for sizes in ({"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}):
        assert arguments(**sizes)["distributed_executor_backend"] == "mp"
    assert "distributed_executor_backend" not in arguments()


def test_every_argument_that_is_set_exists_in_vllm_and_is_not_the_users() -> None:
    every = arguments(
        tp=2, kv_cache_gb=1.0, max_lora_rank=8, speculation=NgramSpeculationConfig()
    ).keys() - {"max_loras"}
    assert every | {"sleep_preserve_parameter_names"} <= known_arguments()
    assert every <= RESERVED_ARGUMENTS.keys()
    assert RESERVED_ARGUMENTS.keys() <= known_arguments()


def test_engine_arguments_that_cannot_be_given_are_refused_with_what_to_write() -> None:
    check_arguments(["block_size"])
    with pytest.raises(ConfigError) as caught:
        check_arguments(["max_num_batched_token", "dtype", "worker_cls"])
    message = str(caught.value)
    assert "no such argument; did you mean 'max_num_batched_tokens'?" in message
    assert "engine_args.dtype: set actor_infer.dtype instead" in message
    assert "engine_args.worker_cls: cannot be set" in message


def test_the_check_before_a_run_names_a_wrong_engine_argument(tmp_path: Path) -> None:
    loaded = load_config(
        write_task(tmp_path),
        ["actor_infer.strategy.kind=vllm", "actor_infer.strategy.engine_args={blok_size: 32}"],
    )
    problems = [str(finding.error) for finding in inspect(loaded)]
    assert any("did you mean 'block_size'?" in problem for problem in problems)


def test_a_call_of_an_engine_that_takes_itself_for_dead_ends() -> None:
    dead: list[str] = []

    async def main() -> None:
        watch = DeathWatch("the engine", lambda: bool(dead))
        call = asyncio.ensure_future(watch.until_dead(asyncio.Event().wait()))
        await asyncio.sleep(0)
        dead.append("it says so")
        await call

    with pytest.raises(EngineDiedError, match="the engine reports that it is dead"):
        asyncio.run(asyncio.wait_for(main(), 30))
