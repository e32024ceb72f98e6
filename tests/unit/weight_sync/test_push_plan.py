"""The plan of a push, against a count of every byte."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.core.errors import WeightSyncError
from roll.weight_sync.manifest import Manifest, TensorMeta, even_cuts
from roll.weight_sync.push_plan import (
    Piece,
    broadcaster,
    holds_all,
    largest,
    layout,
    module_of,
    runs,
    shares,
    shares_of_all,
    unsent_frozen_tensors,
    used_bytes,
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Tensors of any dtype in layers of any shape, held by senders in any shares."""
    senders = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 900), max_size=14))
    metas, cuts = [], []
    for position, size in enumerate(sizes):
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int64", "uint8"]))
        module = draw(st.sampled_from(["mlp", "attn"]))
        metas.append(TensorMeta(f"layers.{position // 3}.{module}.t{position}.w", (size,), dtype))
        inner = sorted(draw(st.lists(st.integers(0, size), min_size=senders - 1, max_size=senders)))
        cuts.append((0, *inner[: senders - 1], size))
    return Manifest(tuple(metas), tuple(cuts))


@settings(max_examples=100)
@given(manifest=manifests(), bucket_bytes=st.integers(64, 4096), full=st.booleans())
def test_every_byte_travels_once_from_the_sender_that_holds_it(
    manifest: Manifest, bucket_bytes: int, full: bool
) -> None:
    travelled = [torch.full((meta.num_bytes,), -1) for meta in manifest.tensors]
    for bucket in layout(manifest, bucket_bytes, full=full):
        for sender in range(manifest.num_senders):
            for piece in shares(manifest, bucket, sender):
                place = travelled[piece.tensor][piece.start : piece.start + piece.num_bytes]
                assert len(place) == piece.num_bytes > 0
                assert (place == -1).all(), "sent twice"
                place[:] = sender
    for position, meta in enumerate(manifest.tensors):
        width = meta.torch_dtype.itemsize
        cuts = manifest.cuts_of(position)
        for sender in range(manifest.num_senders):
            mine = travelled[position][cuts[sender] * width : cuts[sender + 1] * width]
            assert (mine == sender).all()


@settings(max_examples=100)
@given(manifest=manifests(), bucket_bytes=st.integers(64, 4096), full=st.booleans())
def test_pieces_neither_overlap_nor_leave_their_bucket(
    manifest: Manifest, bucket_bytes: int, full: bool
) -> None:
    buckets = layout(manifest, bucket_bytes, full=full)
    assert all(buckets)
    for bucket in buckets:
        end = 0
        for piece in bucket:
            assert piece.offset >= end
            end = piece.offset + piece.num_bytes
        assert used_bytes(bucket) == end <= bucket_bytes
    assert largest(buckets) <= bucket_bytes
    flat = [(piece.tensor, piece.start) for bucket in buckets for piece in bucket]
    assert flat == sorted(flat)


@settings(max_examples=100)
@given(manifest=manifests(), bucket_bytes=st.integers(64, 4096))
def test_a_tensor_that_fits_lies_in_one_piece_that_can_be_used_where_it_is(
    manifest: Manifest, bucket_bytes: int
) -> None:
    where: dict[int, list[tuple[int, Piece]]] = {}
    for index, bucket in enumerate(layout(manifest, bucket_bytes)):
        for piece in bucket:
            where.setdefault(piece.tensor, []).append((index, piece))
    for position, pieces in where.items():
        meta = manifest.tensors[position]
        if meta.num_bytes <= bucket_bytes // 64 * 64:
            assert len({index for index, _ in pieces}) == 1
            first = pieces[0][1]
            assert first.offset % meta.torch_dtype.itemsize == 0
            assert all(p.offset - first.offset == p.start for _, p in pieces)


@settings(max_examples=100)
@given(manifest=manifests(), bucket_bytes=st.integers(64, 4096), full=st.booleans())
def test_the_runs_of_a_sender_hold_its_bytes_and_no_byte_of_another_sender(
    manifest: Manifest, bucket_bytes: int, full: bool
) -> None:
    for bucket in layout(manifest, bucket_bytes, full=full):
        owner = torch.full((used_bytes(bucket),), -1)
        for piece in bucket:
            for sender, part in shares_of_all(manifest, piece):
                owner[part.offset : part.offset + part.num_bytes] = sender
        for sender in range(manifest.num_senders):
            found = runs(manifest, bucket, sender)
            assert all(a[1] <= b[0] for a, b in pairwise(found))
            inside = torch.zeros(len(owner), dtype=torch.bool)
            for first, end in found:
                inside[first:end] = True
            assert inside[owner == sender].all()
            assert ((owner[inside] == sender) | (owner[inside] == -1)).all()


@settings(max_examples=100)
@given(manifest=manifests(), bucket_bytes=st.integers(64, 4096))
def test_a_bucket_is_broadcast_by_a_sender_that_holds_a_part_of_it(
    manifest: Manifest, bucket_bytes: int
) -> None:
    for index, bucket in enumerate(layout(manifest, bucket_bytes, full=True)):
        root = broadcaster(manifest, bucket, index)
        held = {sender for piece in bucket for sender, _ in shares_of_all(manifest, piece)}
        assert root in held
        assert root == index % manifest.num_senders or index % manifest.num_senders not in held
        assert holds_all(manifest, bucket, root) == (held == {root})


@settings(max_examples=100)
@given(manifest=manifests(), bucket_bytes=st.integers(64, 4096))
def test_a_full_plan_has_as_few_buckets_as_its_bytes_fill(
    manifest: Manifest, bucket_bytes: int
) -> None:
    aligned = sum(-(-meta.num_bytes // 64) * 64 for meta in manifest.tensors)
    size = bucket_bytes // 64 * 64
    assert len(layout(manifest, bucket_bytes, full=True)) == -(-aligned // size)


def test_what_an_engine_fuses_shares_a_bucket_when_it_fits() -> None:
    names = ["norm", *(f"self_attn.{x}_proj" for x in "qkvo"), "mlp.gate_proj", "mlp.up_proj"]
    metas = [
        TensorMeta(f"model.layers.{layer}.{name}.weight", (100,), "uint8")
        for layer in range(5)
        for name in names
    ]
    buckets = layout(Manifest(tuple(metas)), 600)
    home = {
        metas[piece.tensor].name: index for index, bucket in enumerate(buckets) for piece in bucket
    }
    for layer in range(5):
        for module in ("self_attn", "mlp"):
            inside = {i for name, i in home.items() if f".{layer}.{module}." in name}
            assert len(inside) == 1


def test_a_bucket_too_small_to_align_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="bucket_bytes is 63"):
        layout(Manifest(()), 63)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp"),
        ("model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn"),
        ("model.layers.0.mlp.experts.7.up_proj.weight", "model.layers.0.mlp.experts"),
        ("model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_the_module_of_a_tensor_holds_what_may_be_fused_with_it(name: str, module: str) -> None:
    assert module_of(name) == module


def test_a_frozen_tensor_stays_away_unless_something_of_its_module_moves() -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
    ]
    manifest = Manifest(tuple(TensorMeta(name, (2,), "float32") for name in names))
    frozen = {names[0], names[1], names[3]}
    assert unsent_frozen_tensors(manifest, frozen) == {names[0], names[3]}


@given(rows=st.integers(0, 50), width=st.integers(1, 5), parts=st.integers(1, 8))
def test_even_cuts_are_those_of_torch_chunk(rows: int, width: int, parts: int) -> None:
    cuts = even_cuts(rows, width, parts)
    sizes = [chunk.numel() for chunk in torch.empty(rows, width).chunk(parts)]
    sizes += [0] * (parts - len(sizes))
    assert [b - a for a, b in pairwise(cuts)] == sizes
