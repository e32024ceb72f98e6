"""Packed sequences compute what each computes alone in Hugging Face."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mcore_adapter.gather import export, gradient
from mcore_adapter.load import load, read_config
from mcore_adapter.modeling.config import BuildOptions
from mcore_adapter.modeling.model import build_model, init_parallel
from mcore_adapter.models import table_of
from mcore_adapter.parallel.context import cut, joined, positions_here, positions_of
from mcore_adapter.parallel.packing import pack
from mcore_adapter.parallel_sizes import ParallelSizes
from mcore_adapter.platform import adapt_to_cpu
from tests.convert.spawned import run_ranks
from tests.convert.tiny_models import VOCAB, rows, save_model

LENGTHS = (7, 1, 12, 3)
NAMES = (
    "llama",
    "mistral",
    "ministral3",
    "gemma3",
    "gemma4",
    "glm4",
    "qwen3",
    "qwen3_moe",
    "minimax_m2",
    "deepseek_v3",
    "glm_moe_dsa",
    "gpt_oss",
)


def sequences() -> list[Tensor]:
    return [rows(1, 12)[0, :length] + 0 for length in LENGTHS]


Layout = tuple[ParallelSizes, int]
"""Sizes, and the number of ranks that share the row."""
ALONE, SHARED = (ParallelSizes(), 1), (ParallelSizes(), 2)


def layouts_of(name: str) -> list[Layout]:
    cut = ParallelSizes(tp=2, etp=1 if name == "gpt_oss" else None)
    return [ALONE, (cut, 1), *([SHARED] if name != "glm_moe_dsa" else [])]


def packed_logits(
    cases: list[tuple[Path, Layout]],
) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """Of each case the logits of each sequence, [T, VOCAB], and this rank's gradients."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    adapt_to_cpu()
    found = []
    for folder, (sizes, cp) in cases:
        config = read_config(folder)
        table = table_of(config)
        init_parallel(sizes, cp=cp)
        chunks = build_model(config, sizes, BuildOptions(context_parallel=cp))
        load(folder, chunks, table, sizes)
        packed = pack(sequences(), multiple=sizes.tp, each_multiple=2 * cp if cp > 1 else 1)
        sharers = parallel_state.get_context_parallel_group()
        own = (cut(each, packed.spans, sharers) for each in (packed.tokens_BT, packed.positions_BT))
        output = chunks[0](*own, None, packed_seq_params=packed.params)
        whole = gather_from_tensor_model_parallel_region(output)[0, :, :VOCAB]
        if cp > 1:
            here = positions_here(packed.spans, sharers, whole.device)
            whole = joined(here, whole, packed.tokens_BT.numel(), sharers)
        torch.cat(packed.split(whole)).square().sum().backward()
        gradients = dict(export(chunks, table, sizes, value=gradient))
        assert all(tensor.isfinite().all() for tensor in gradients.values())
        found.append(([part.detach() for part in packed.split(whole)], gradients))
    return found


@pytest.mark.slow
def test_packed_sequences_do_not_see_each_other(tmp_path: Path) -> None:
    folders = [save_model(tmp_path, name) for name in NAMES]
    cases = [(folder, layout) for folder in folders for layout in layouts_of(folder.name)]
    answers = run_ranks(packed_logits, 2, cases)
    for (folder, layout), *ranks in zip(cases, *answers, strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for number, tokens in enumerate(sequences()):
            with torch.no_grad():
                alone = model(input_ids=tokens[None], use_cache=False).logits[0]
            for logits, _ in ranks:
                far = (alone - logits[number]).abs().max()
                assert far < 1e-5, (folder.name, layout, len(tokens))
        if layout == ALONE:
            want = ranks[0][1]
        elif layout == SHARED:
            # Each rank has the part of its own tokens.
            first, second = (gradients for _, gradients in ranks)
            assert want.keys() == first.keys()
            scale = max(float(tensor.abs().max()) for tensor in want.values())
            for key, tensor in want.items():
                far = (first[key] + second[key] - tensor).abs().max()
                assert far < 1e-5 * scale, (folder.name, key)


def test_a_row_is_filled_up_by_a_sequence_of_its_own() -> None:
    packed = pack([torch.arange(1, 4), torch.arange(1, 3)], multiple=4)
    assert packed.tokens_BT.tolist() == [[1, 2, 3, 1, 2, 0, 0, 0]]
    assert packed.positions_BT.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert packed.params.cu_seqlens_q.tolist() == [0, 3, 5, 8]
    assert [part.tolist() for part in packed.split(torch.arange(8))] == [[0, 1, 2], [3, 4]]


def test_sequences_of_shared_rows_are_filled_up_one_by_one() -> None:
    packed = pack([torch.arange(1, 4), torch.arange(1, 6)], multiple=2, each_multiple=4, length=16)
    assert packed.tokens_BT.tolist() == [[1, 2, 3, 0, 1, 2, 3, 4, 5, *[0] * 7]]
    assert packed.positions_BT.tolist() == [[*range(4), *range(8), *range(4)]]
    assert packed.params.cu_seqlens_q.tolist() == [0, 4, 12, 16]
    assert packed.padding_BT[0].nonzero()[:, 0].tolist() == [3, 9, 10, 11, 12, 13, 14, 15]
    assert [part.tolist() for part in packed.split(torch.arange(16))] == [
        [0, 1, 2],
        [4, 5, 6, 7, 8],
    ]
    with pytest.raises(ValueError, match="does not divide by 12"):
        pack([torch.ones(5, dtype=torch.long)], multiple=6, each_multiple=4, length=8)


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_has_two_pieces_of_every_sequence(ranks: int) -> None:
    lengths = [2 * ranks * each for each in (1, 5, 2)]
    parts = [positions_of(lengths, rank, ranks) for rank in range(ranks)]
    assert sorted(torch.cat(parts).tolist()) == list(range(sum(lengths)))
    at = 0
    for length in lengths:
        piece = length // (2 * ranks)
        for rank, part in enumerate(parts):
            own = [x - at for x in part.tolist() if at <= x < at + length]
            front = list(range(rank * piece, (rank + 1) * piece))
            assert own == front + [length - 1 - x for x in reversed(front)]
        at += length


@pytest.mark.parametrize(("lengths", "row"), [((), None), ((2, 0), None), ((5,), 4), ((3,), 6)])
def test_what_does_not_fit_is_refused(lengths: tuple[int, ...], row: int | None) -> None:
    with pytest.raises(ValueError):
        pack([torch.ones(n, dtype=torch.long) for n in lengths], multiple=4, length=row)
