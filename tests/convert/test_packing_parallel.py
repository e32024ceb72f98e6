"""Packed sequences compute what each computes alone in Hugging Face."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mcore_adapter.gather import export, gradient
from mcore_adapter.load import load, read_config
from mcore_adapter.modeling.model import build_model, init_parallel
from mcore_adapter.models import table_of
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


def packed_logits(cases: list[tuple[Path, ParallelSizes]]) -> list[list[Tensor]]:
    """Of each case and sequence, [T, VOCAB]; gradients flow."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    adapt_to_cpu()
    found = []
    for folder, sizes in cases:
        config = read_config(folder)
        table = table_of(config)
        init_parallel(sizes)
        chunks = build_model(config, sizes)
        load(folder, chunks, table, sizes)
        packed = pack(sequences(), multiple=sizes.tp)
        output = chunks[0](
            packed.tokens_BT, packed.positions_BT, None, packed_seq_params=packed.params
        )
        whole = gather_from_tensor_model_parallel_region(output)[0, :, :VOCAB]
        torch.cat(packed.split(whole)).square().sum().backward()
        found.append([part.detach() for part in packed.split(whole)])
        assert all(t.isfinite().all() for _, t in export(chunks, table, sizes, value=gradient))
    return found


@pytest.mark.slow
def test_packed_sequences_do_not_see_each_other(tmp_path: Path) -> None:
    folders = [save_model(tmp_path, name) for name in NAMES]
    cases = [(folder, ParallelSizes()) for folder in folders]
    cases += [
        (folder, ParallelSizes(tp=2, etp=1 if folder.name == "gpt_oss" else None))
        for folder in folders
    ]
    for answer in run_ranks(packed_logits, 2, cases):
        for (folder, sizes), found in zip(cases, answer, strict=True):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            for tokens, logits in zip(sequences(), found, strict=True):
                with torch.no_grad():
                    alone = model(input_ids=tokens[None], use_cache=False).logits[0]
                assert (alone - logits).abs().max() < 1e-5, (folder.name, sizes, len(tokens))


def test_a_row_is_filled_up_by_a_sequence_of_its_own() -> None:
    packed = pack([torch.arange(1, 4), torch.arange(1, 3)], multiple=4)
    assert packed.tokens_BT.tolist() == [[1, 2, 3, 1, 2, 0, 0, 0]]
    assert packed.positions_BT.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert packed.params.cu_seqlens_q.tolist() == [0, 3, 5, 8]
    assert [part.tolist() for part in packed.split(torch.arange(8))] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize(("lengths", "row"), [((), None), ((2, 0), None), ((5,), 4), ((3,), 6)])
def test_what_does_not_fit_is_refused(lengths: tuple[int, ...], row: int | None) -> None:
    with pytest.raises(ValueError):
        pack([torch.ones(n, dtype=torch.long) for n in lengths], multiple=4, length=row)
