"""Models whose rows are shared by context parallel ranks compute what Hugging Face computes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from mcore_adapter.errors import LayoutError
from mcore_adapter.modeling.config import BuildOptions, model_config
from mcore_adapter.models.shared_rows import why_not_shared
from mcore_adapter.parallel.context import pieces_of
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.parity import Case, assert_equal, compare
from tests.convert.tiny_models import COMMON, LOOSE, MODELS, rows, save_model, save_reference

TWO, FOUR = (BuildOptions(context_parallel=cp) for cp in (2, 4))
LENGTH = 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        # Windows, frequencies of their own in some layers, and more ranks than heads of keys.
        ("gemma3", ParallelSizes(), FOUR),
        # Sinks, windows, experts and stages.
        ("gpt_oss", ParallelSizes(ep=2, pp=2), TWO),
        # Latent attention, in matrices that are cut, too.
        ("deepseek_v3", ParallelSizes(tp=2), TWO),
    ],
)
def test_four_ranks_compute_what_hugging_face_computes(
    tmp_path: Path, name: str, sizes: ParallelSizes, options: BuildOptions
) -> None:
    folder = save_model(tmp_path, name)
    save_reference(folder, rows(length=LENGTH))
    work = partial(compare, length=LENGTH)
    assert_equal(4, [Case(folder, sizes, options)], work=work, loose=LOOSE)


def test_the_pieces_of_the_ranks_are_the_whole_row() -> None:
    assert sorted(piece for rank in range(3) for piece in pieces_of(rank, 3)) == list(range(6))


@pytest.mark.parametrize(
    ("name", "why"),
    [("qwen3_next", "gated delta nets"), ("glm_moe_dsa", "sparse attention")],
)
def test_models_that_mix_tokens_in_another_way_are_refused(name: str, why: str) -> None:
    with pytest.raises(LayoutError, match=f"cp = 2: a {name} has {why}"):
        model_config({**COMMON, **MODELS[name]}, ParallelSizes(), TWO)


@pytest.mark.parametrize(
    ("option", "options"), [("mtp", replace(TWO, mtp=True)), ("te", replace(TWO, te=True))]
)
def test_options_for_whole_rows_are_refused(option: str, options: BuildOptions) -> None:
    with pytest.raises(LayoutError, match=f"{option} is for ranks with whole rows"):
        model_config({**COMMON, **MODELS["deepseek_v3"]}, ParallelSizes(), options)


@pytest.mark.parametrize(
    ("queries", "keys", "tp", "cp", "shared"),
    [
        (8, 2, 1, 2, True),
        (8, 2, 1, 8, True),
        (8, 2, 2, 4, True),
        (8, 2, 1, 3, False),
        (8, 2, 4, 4, False),
        (12, 4, 1, 6, False),
        (12, 12, 1, 6, True),
    ],
)
def test_heads_are_shared_evenly_or_not_at_all(
    queries: int, keys: int, tp: int, cp: int, shared: bool
) -> None:
    config = {**COMMON, **MODELS["llama"], "hidden_size": 96, "head_dim": 8}
    config |= {"num_attention_heads": queries, "num_key_value_heads": keys}
    why = why_not_shared(config, cp, tp)
    assert (why is None) == shared
    assert shared or f"cp = {cp}: each tensor parallel rank has {queries // tp} heads" in str(why)
