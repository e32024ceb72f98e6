"""Layouts against loops written by hand, and properties over sizes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_adapter.convert import commands
from mcore_adapter.convert.arrays import Outline
from mcore_adapter.convert.joined_arrays import Joined
from mcore_adapter.convert.ops import Deinterleave, FuseQKV, RegroupByKind, Shape
from mcore_adapter.convert.shards import Sharded
from mcore_adapter.parallel_sizes import ParallelSizes, padded_vocab
from tests.convert.tiny_checkpoints import (
    ALONE,
    assert_same,
    contents,
    numbered,
    there_and_back,
    write,
)

Config = dict[str, Any]


@st.composite
def models(draw: st.DrawFn) -> Config:
    groups, per_group = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    experts = draw(st.sampled_from([0, 0, 2, 4]))
    kinds = ["qwen3_moe"] if experts else ["llama", "qwen3"]
    return {
        "model_type": draw(st.sampled_from(kinds)),
        "hidden_size": draw(st.sampled_from([4, 12])),
        "num_attention_heads": groups * per_group,
        "num_key_value_heads": groups,
        "head_dim": draw(st.sampled_from([4, 8])),
        "intermediate_size": draw(st.sampled_from([4, 8])),
        "moe_intermediate_size": draw(st.sampled_from([4, 8])),
        "num_hidden_layers": draw(st.integers(1, 5)),
        "vocab_size": draw(st.integers(3, 9)),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "num_experts": experts,
    }


@st.composite
def layouts(draw: st.DrawFn, config: Config) -> ParallelSizes:
    """Any sizes that fit the model."""
    layers, experts = config["num_hidden_layers"], config["num_experts"]
    tp = draw(st.sampled_from([n for n in (1, 2, 4) if config["num_attention_heads"] % n == 0]))
    pp = draw(st.integers(1, 3))
    vpp = draw(st.integers(1, 2)) if pp > 1 else 1
    cuts = sorted(
        draw(st.lists(st.integers(0, layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1))
    )
    lengths = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    even = layers % (pp * vpp) == 0 and draw(st.booleans())
    return ParallelSizes(
        tp=tp,
        pp=pp,
        vpp=vpp,
        ep=draw(st.sampled_from([n for n in (1, 2, 4) if experts % n == 0])) if experts else 1,
        etp=draw(st.sampled_from([None, 1, 2, 4])) if experts else None,
        layers=None if even else lengths,
    )


@settings(max_examples=12)  # more of all families: tests/convert/test_fuzz.py
@given(st.data())
def test_any_model_comes_back_byte_for_byte_from_any_layout(data: st.DataObject) -> None:
    config = data.draw(models())
    first, second = data.draw(layouts(config)), data.draw(layouts(config))
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        src = numbered(folder / "src", config)
        assert_same(src, there_and_back(src, folder / "a", first))
        commands.to_mcore(src, folder / "direct", second, ALONE)
        commands.to_mcore(folder / "a" / "mcore", folder / "moved", second, ALONE)
        assert_same(folder / "direct", folder / "moved")


@settings(max_examples=40)
@given(st.data())
def test_every_element_is_stored_once_or_once_per_rank_that_replicates_it(
    data: st.DataObject,
) -> None:
    config = data.draw(models())
    sizes = data.draw(layouts(config))
    replicated = ("norm", "mlp.gate.weight", "o_proj.bias")
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        src = numbered(folder / "src", config)
        commands.to_mcore(src, folder / "mcore", sizes, ALONE)
        stored = Counter(
            element
            for tensor in contents(folder / "mcore").values()
            for element in tensor.flatten().tolist()
            if element != 0
        )
        for name, tensor in contents(src).items():
            times = sizes.tp if any(part in name for part in replicated) else 1
            if "embed_tokens" in name and config["tie_word_embeddings"] and sizes.pp > 1:
                times = 2
            elements = tensor.flatten().tolist()
            assert {stored.pop(element) for element in elements} == {times}, name
        assert not stored


@given(st.data())
def test_merging_what_was_split_gives_the_same(data: st.DataObject) -> None:
    ranks, blocks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    dim, unequal = data.draw(st.integers(0, 1)), data.draw(st.booleans())
    lengths = tuple(ranks * data.draw(st.integers(1, 3)) for _ in range(blocks))
    rule = Sharded(dim, lengths if unequal else blocks)
    size = sum(lengths) if unequal else lengths[0] * blocks
    full = np.arange(size * 3).reshape((size, 3) if dim == 0 else (3, size))
    shards = rule.split(Joined((full,)), ranks)
    assert {shard.shape for shard in shards} == {rule.shard_shape(full.shape, ranks, "x")}
    assert np.array_equal(rule.merge(shards), full)
    assert rule.merge([Outline(shard.shape) for shard in shards]).shape == full.shape
    as_torch = rule.split(torch.from_numpy(full), ranks)
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(shards, as_torch, strict=True))


@pytest.mark.parametrize("gated", [False, True])
def test_queries_keys_and_values_lie_as_a_loop_over_heads_puts_them(gated: bool) -> None:
    shape = Shape(num_layers=1, num_heads=6, num_kv_heads=2, head_dim=3, hidden=5, vocab=1)
    kinds = 2 if gated else 1
    q, k, v = (np.random.rand(heads * 3, 5) for heads in (6 * kinds, 2, 2))
    rows = []
    for group in range(2):
        for kind in range(kinds):  # all queries of the group, then all gates
            for head in range(group * 3, group * 3 + 3):
                first = (head * kinds + kind) * 3
                rows += [q[first], q[first + 1], q[first + 2]]
        rows += [k[group * 3 + i] for i in range(3)]
        rows += [v[group * 3 + i] for i in range(3)]
    op = FuseQKV("qkv", ("q", "k", "v"), gated=gated)
    assert np.array_equal(op.to_mcore([Joined((x,)) for x in (q, k, v)], shape), np.stack(rows))
    assert all(
        np.array_equal(a, b)
        for a, b in zip(op.to_hf(Joined((np.stack(rows),)), shape), (q, k, v), strict=True)
    )


def test_a_rank_has_its_heads_of_every_kind_of_a_delta_net() -> None:
    """Against the split that transformers makes in `fix_query_key_value_ordering`."""
    groups, key, heads, width, ranks = 4, 3, 2, 5, 2
    shape = Shape(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1, hidden=7, vocab=1)
    value = heads * width
    kinds = (key, key, value, value), (heads, heads)
    qkvz = np.random.rand(groups * (2 * key + 2 * value), 7)
    ba = np.random.rand(groups * 2 * heads, 7)
    op = RegroupByKind("in", ("qkvz", "ba"), groups, kinds)
    full = op.to_mcore([Joined((qkvz,)), Joined((ba,))], shape)
    blocks = tuple(n * groups for kind in kinds for n in kind)
    for rank, shard in enumerate(Sharded(blocks=blocks).split(full, ranks)):
        mine = range(rank * groups // ranks, (rank + 1) * groups // ranks)
        expected = []
        for source, lengths in ((qkvz, kinds[0]), (ba, kinds[1])):
            each = len(source) // groups
            for kind, length in enumerate(lengths):
                before = sum(lengths[:kind])
                for group in mine:
                    start = group * each + before
                    expected += list(source[start : start + length])
        assert np.array_equal(shard, np.stack(expected))
    assert all(np.array_equal(a, b) for a, b in zip(op.to_hf(full, shape), (qkvz, ba), strict=True))


def test_the_shards_of_a_small_model_are_what_megatron_expects(tmp_path: Path) -> None:
    """Two ranks, one KV group each: every number placed by hand."""
    config = {
        "model_type": "llama",
        "hidden_size": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 1,
        "intermediate_size": 2,
        "num_hidden_layers": 1,
        "vocab_size": 3,
        "tie_word_embeddings": False,
    }
    at = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": [[1, 2], [3, 4], [5, 6]],
        at + "input_layernorm.weight": [7, 8],
        at + "self_attn.q_proj.weight": [[10, 11], [12, 13]],
        at + "self_attn.k_proj.weight": [[20, 21], [22, 23]],
        at + "self_attn.v_proj.weight": [[30, 31], [32, 33]],
        at + "self_attn.o_proj.weight": [[40, 41], [42, 43]],
        at + "post_attention_layernorm.weight": [50, 51],
        at + "mlp.gate_proj.weight": [[60, 61], [62, 63]],
        at + "mlp.up_proj.weight": [[70, 71], [72, 73]],
        at + "mlp.down_proj.weight": [[80, 81], [82, 83]],
        "model.norm.weight": [90, 91],
        "lm_head.weight": [[92, 93], [94, 95], [96, 97]],
    }
    write(tmp_path / "src", config, {k: torch.tensor(v).float() for k, v in tensors.items()})
    commands.to_mcore(tmp_path / "src", tmp_path / "mcore", ParallelSizes(tp=2), ALONE)
    ours, file = "decoder.layers.0.", "dense-pp0-tp1.safetensors:"
    expected = {
        "embedding.word_embeddings.weight": [[5, 6], [0, 0]],
        ours + "input_layernorm.weight": [7, 8],
        ours + "self_attention.linear_qkv.weight": [[12, 13], [22, 23], [32, 33]],
        ours + "self_attention.linear_proj.weight": [[41], [43]],
        ours + "pre_mlp_layernorm.weight": [50, 51],
        ours + "mlp.linear_fc1.weight": [[62, 63], [72, 73]],
        ours + "mlp.linear_fc2.weight": [[81], [83]],
        "decoder.final_layernorm.weight": [90, 91],
        "output_layer.weight": [[96, 97], [0, 0]],
    }
    found = contents(tmp_path / "mcore")
    assert {k.removeprefix(file): v.tolist() for k, v in found.items() if k.startswith(file)} == (
        expected
    )


@pytest.mark.parametrize(("vocab", "tp", "padded"), [(8, 2, 8), (9, 2, 10), (5, 4, 8), (7, 1, 7)])
def test_a_vocabulary_is_padded_to_divide(vocab: int, tp: int, padded: int) -> None:
    assert padded_vocab(vocab, tp) == padded


def test_virtual_chunks_take_turns_between_stages() -> None:
    sizes = ParallelSizes(pp=2, vpp=2)
    assert [sizes.stage_of_layer(layer, 8) for layer in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    uneven = ParallelSizes(pp=2, vpp=2, layers=(1, 0, 2, 1))
    assert [uneven.stage_of_layer(layer, 4) for layer in range(4)] == [0, 0, 0, 1]


def test_gate_and_up_of_gpt_oss_are_unwoven() -> None:
    """Hugging Face takes gate from even columns, up from odd ones."""
    shape = Shape(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1, hidden=2, vocab=1)
    woven = np.array([["g0", "u0", "g1", "u1"], ["G0", "U0", "G1", "U1"]])
    op = Deinterleave("fc1", "gate_up_proj")
    full = op.to_mcore([Joined((woven,))], shape)
    assert np.asarray(full).tolist() == [["g0", "G0"], ["g1", "G1"], ["u0", "U0"], ["u1", "U1"]]
    assert np.array_equal(op.to_hf(full, shape)[0], woven)
    bias = op.to_mcore([Joined((woven[0],))], shape)
    assert np.asarray(bias).tolist() == ["g0", "g1", "u0", "u1"]
