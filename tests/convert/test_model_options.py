"""What a model computes does not depend on how activations are kept or tokens travel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mcore_adapter.errors import ConfigError, LayoutError
from mcore_adapter.load import load, read_config
from mcore_adapter.modeling.config import BuildOptions
from mcore_adapter.modeling.model import build_model, init_parallel
from mcore_adapter.models import table_of
from mcore_adapter.parallel.schedule import run_schedule
from mcore_adapter.parallel_sizes import ParallelSizes
from mcore_adapter.platform import adapt_to_cpu
from tests.convert.parity import Case, assert_equal, forward
from tests.convert.spawned import run_ranks
from tests.convert.tiny_models import COMMON, MODELS, VOCAB, rows, save_model, save_reference

LENGTHS = (7, 12)

DENSE = (
    (ParallelSizes(tp=2), BuildOptions(sequence_parallel=True)),
    (ParallelSizes(tp=2), BuildOptions(recompute="attention")),
    (ParallelSizes(tp=2), BuildOptions(recompute="full", sequence_parallel=True)),
    (ParallelSizes(pp=2), BuildOptions(recompute="full")),
)
SPARSE = (
    (ParallelSizes(), BuildOptions(dispatcher="allgather")),
    (ParallelSizes(ep=2), BuildOptions(dispatcher="allgather")),
    (ParallelSizes(tp=2), BuildOptions(dispatcher="allgather")),
    (ParallelSizes(tp=2, ep=2, etp=1), BuildOptions(dispatcher="allgather")),
    (ParallelSizes(ep=2), BuildOptions(recompute="full")),
)


GROUPED = BuildOptions(grouped_experts=True)


@pytest.mark.slow
def test_recomputation_sequence_parallelism_and_dispatchers_change_nothing(tmp_path: Path) -> None:
    cases = []
    for name, variants in (("qwen3_tied", DENSE), ("qwen3_moe", SPARSE), ("deepseek_v3", SPARSE)):
        folder = save_model(tmp_path, name)
        save_reference(folder, rows())
        cases += [Case(folder, sizes, options) for sizes, options in variants]
    assert_equal(2, cases)


def kinds_of_experts(folder: Path, options: BuildOptions) -> set[str]:
    adapt_to_cpu()
    init_parallel(ParallelSizes())
    (chunk,) = build_model(read_config(folder), ParallelSizes(), options)
    return {type(module).__name__ for module in chunk.modules()} & {
        "SequentialMLP",
        "GroupedExperts",
    }


@pytest.mark.slow
def test_grouped_experts_compute_what_hugging_face_computes(tmp_path: Path) -> None:
    cases, full = [], replace(GROUPED, recompute="full")
    for name, sizes in (
        ("qwen3_moe", (ParallelSizes(), ParallelSizes(ep=2), ParallelSizes(tp=2, etp=1))),
        ("deepseek_v3", (ParallelSizes(ep=2), ParallelSizes(pp=2))),
        ("mixtral", (ParallelSizes(tp=2),)),
    ):
        folder = save_model(tmp_path, name)
        save_reference(folder, rows())
        cases += [Case(folder, each, GROUPED) for each in sizes]
    assert_equal(2, [*cases, Case(folder, ParallelSizes(ep=2), full)])
    assert run_ranks(kinds_of_experts, 1, folder, GROUPED) == [{"GroupedExperts"}]
    assert run_ranks(kinds_of_experts, 1, folder, BuildOptions()) == [{"SequentialMLP"}]


_MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce")


def loaded(folder: Path, sizes: ParallelSizes) -> bool:
    """Load a model without random weights; return whether values and marks are those of one with
    them."""
    adapt_to_cpu()
    config = read_config(folder)
    init_parallel(sizes)
    found = []
    for options in (BuildOptions(), BuildOptions(random_weights=False)):
        chunks = build_model(config, sizes, options)
        for parameter in chunks[0].parameters():
            if not options.random_weights:
                parameter.data.fill_(torch.nan)
        load(folder, chunks, table_of(config), sizes)
        found.append({name: p for chunk in chunks for name, p in chunk.named_parameters()})
    drawn, empty = found
    return drawn.keys() == empty.keys() and all(
        torch.equal(drawn[name], empty[name])
        and all(getattr(drawn[name], m, None) == getattr(empty[name], m, None) for m in _MARKS)
        for name in drawn
    )


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3_tied", ParallelSizes(tp=2)),
        ("qwen3_tied", ParallelSizes(pp=2)),
        ("qwen3_moe", ParallelSizes(tp=2, ep=2, etp=1)),
        ("gpt_oss", ParallelSizes(tp=2, etp=1)),
        ("deepseek_v3", ParallelSizes(tp=2)),
        ("qwen3_next", ParallelSizes()),
    ],
)
def test_weights_that_will_be_loaded_need_no_values_before(
    tmp_path: Path, name: str, sizes: ParallelSizes
) -> None:
    assert run_ranks(loaded, 2, save_model(tmp_path, name), sizes) == [True, True]


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("qwen3", ParallelSizes(), "for models with experts; qwen3 has none"),
        ("gpt_oss", ParallelSizes(), "experts of gpt_oss have biases"),
        ("qwen3_moe", ParallelSizes(tp=2), "10 numbers of torch.float32 in a row"),
    ],
)
def test_experts_that_cannot_be_grouped_are_named(
    name: str, sizes: ParallelSizes, message: str
) -> None:
    config = {**COMMON, "hidden_act": "silu", "rms_norm_eps": 1e-6, **MODELS[name]}
    with pytest.raises(LayoutError, match=message):
        build_model(config, sizes, GROUPED)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3", {"hidden_act": "mish"}, "hidden_act 'mish'"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False"),
        ("deepseek_v3", {"topk_group": 1}, "rated by their best 4"),
        ("deepseek_v3", {"num_experts_per_tok": 1, "n_group": 1}, "num_experts_per_tok is 1"),
        ("glm4_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
        ("minimax_m2", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
        ("qwen2_tied", {"layer_types": ["chunked_attention"], "sliding_window": 4}, "chunked"),
        ("phi3", {"rope_parameters": {"rope_type": "su"}}, "rope_type 'su' of a phi3"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma4", {"num_kv_shared_layers": 1}, "num_kv_shared_layers is 1"),
        ("gemma4", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input is 8"),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 8}}}, r"changes layers \[0\]"),
        ("glm_moe_dsa", {"indexer_types": ["full"] * 3 + ["shared"]}, "1 of 4 layers use the tok"),
        ("glm4_moe_lite", {"mlp_layer_types": ["odd"] * 4}, r"mlp_layer_types \['odd'\]"),
    ],
)
def test_what_cannot_be_built_is_refused(
    name: str, change: dict[str, object], message: str
) -> None:
    config = {**COMMON, "hidden_act": "silu", "rms_norm_eps": 1e-6, **MODELS[name], **change}
    with pytest.raises(ConfigError, match=message):
        build_model(config, ParallelSizes())


def test_a_single_expert_keeps_its_probability(tmp_path: Path) -> None:
    """As in qwen2_moe, where weights are not normalised."""
    folder = save_model(tmp_path, "qwen2_moe", num_experts_per_tok=1)
    save_reference(folder, rows())
    assert_equal(1, [Case(folder, ParallelSizes())])


def test_layouts_that_cannot_be_built_are_refused() -> None:
    config = {**COMMON, "hidden_act": "silu", "rms_norm_eps": 1e-6, **MODELS["gpt_oss"]}
    with pytest.raises(LayoutError, match="etp = 1"):
        build_model(config, ParallelSizes(tp=2))
    with pytest.raises(LayoutError, match="sequence_parallel"):
        build_model(config, ParallelSizes(tp=2, etp=1), BuildOptions(sequence_parallel=False))
    config = {**COMMON, "hidden_act": "silu", "rms_norm_eps": 1e-6, **MODELS["deepseek_v3"]}
    config["first_k_dense_replace"] = COMMON["num_hidden_layers"]
    with pytest.raises(LayoutError, match="with latent attention need sequence_parallel"):
        build_model(config, ParallelSizes(tp=2), BuildOptions(sequence_parallel=False))
    config = {**COMMON, "hidden_act": "silu", "rms_norm_eps": 1e-6, **MODELS["glm_moe_dsa"]}
    with pytest.raises(LayoutError, match="recompute attention"):
        build_model(config, ParallelSizes(), BuildOptions(recompute="attention"))


def different_lengths(folder: Path) -> list[Tensor]:
    """Logits of two micro-batches that differ in length, over two stages; on the last of them."""
    adapt_to_cpu()
    config, sizes = read_config(folder), ParallelSizes(pp=2)
    init_parallel(sizes)
    chunks = build_model(config, sizes, BuildOptions(variable_lengths=True))
    load(folder, chunks, table_of(config), sizes)
    return run_schedule(
        chunks,
        LENGTHS,
        lambda chunk, length: forward(chunk, rows(1, 12)[:, :length]),
        lambda output, _: (output.sum(), output.detach()[..., :VOCAB]),
        micro_batch_size=1,
        longest=max(LENGTHS),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_micro_batches_of_a_pipeline_may_differ_in_length(name: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, name)
    first, last = run_ranks(different_lengths, 2, folder)
    assert not first
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for length, logits in zip(LENGTHS, last, strict=True):
        with torch.no_grad():
            expected = model(input_ids=rows(1, 12)[:, :length], use_cache=False).logits
        assert (logits - expected).abs().max() < 1e-5
