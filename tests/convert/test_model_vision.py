"""Models that see compute what Hugging Face computes, tower included, in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_adapter.errors import LayoutError
from mcore_adapter.load import read_config
from mcore_adapter.modeling.config import BuildOptions
from mcore_adapter.modeling.model import build_model, init_parallel
from mcore_adapter.parallel_sizes import ParallelSizes
from mcore_adapter.platform import adapt_to_cpu
from tests.convert.parity import Case, assert_equal
from tests.convert.spawned import run_ranks
from tests.convert.vision_parity import (
    MODELS,
    compare,
    compare_adapted,
    save_adapted_reference,
    save_model,
    save_reference,
)

TWO = (ParallelSizes(), ParallelSizes(tp=2))
PIPELINES = {
    "qwen2_vl": (ParallelSizes(pp=2), ParallelSizes(pp=2, vpp=2)),
    "qwen2_5_vl": (ParallelSizes(pp=2, layers=(1, 3)),),
    "qwen3_vl": (ParallelSizes(pp=2, vpp=2, layers=(2, 1, 1, 1)),),
    "qwen3_vl_moe": (ParallelSizes(pp=2), ParallelSizes(ep=2), ParallelSizes(tp=2, ep=2, etp=1)),
}
FOUR = {
    "qwen2_vl": (ParallelSizes(tp=2, pp=2),),
    "qwen3_vl": (ParallelSizes(tp=2, pp=2, layers=(3, 2)),),
    "qwen3_vl_moe": (ParallelSizes(pp=2, ep=2), ParallelSizes(tp=2, pp=2, ep=2, etp=1)),
}
OPTIONS = (
    BuildOptions(sequence_parallel=True),
    BuildOptions(recompute="full"),
    BuildOptions(sequence_parallel=True, recompute="full"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {kind: save_model(tmp_path_factory.mktemp("vision"), kind) for kind in MODELS}
    for folder in made.values():
        save_reference(folder)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_two_ranks_compute_what_hugging_face_computes(kind: str, folders: dict[str, Path]) -> None:
    cases = [Case(folders[kind], sizes) for sizes in (*TWO, *PIPELINES[kind])]
    assert_equal(2, cases, work=compare)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOUR)
def test_four_ranks_compute_what_hugging_face_computes(kind: str, folders: dict[str, Path]) -> None:
    assert_equal(4, [Case(folders[kind], sizes) for sizes in FOUR[kind]], work=compare)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_divided_tokens_and_recomputed_layers_change_nothing(
    options: BuildOptions, folders: dict[str, Path]
) -> None:
    """Micro-batches of a pipeline are in flight together while layers are recomputed."""
    sizes = ParallelSizes(tp=2) if options.sequence_parallel else ParallelSizes(pp=2, layers=(3, 2))
    assert_equal(2, [Case(folders["qwen3_vl"], sizes, options)], work=compare)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
def test_an_adapter_of_the_language_model_is_trained_as_by_hand(
    kind: str, folders: dict[str, Path]
) -> None:
    save_adapted_reference(folders[kind])
    pipeline = ParallelSizes(pp=2, layers=(3, 2) if kind == "qwen3_vl" else None)
    for sizes in (ParallelSizes(tp=2), pipeline):
        for found in run_ranks(compare_adapted, 2, Case(folders[kind], sizes)):
            difference, tower_untouched = found
            assert difference <= 1e-6, (kind, sizes)
            assert tower_untouched, (kind, sizes)


def test_layers_that_get_features_lie_beside_the_tower(folders: dict[str, Path]) -> None:
    for sizes in (
        ParallelSizes(pp=2, layers=(1, 4)),
        ParallelSizes(pp=2, vpp=2, layers=(1, 2, 1, 1)),
    ):
        for found in run_ranks(refused, 2, folders["qwen3_vl"], sizes):
            assert found.startswith(
                "the first 2 layers get features of the vision tower, which is on the first stage, "
                "but its first chunk has 1 of 5 layers"
            )


def refused(folder: Path, sizes: ParallelSizes) -> str:
    adapt_to_cpu()
    init_parallel(sizes)
    with pytest.raises(LayoutError) as caught:
        build_model(read_config(folder), sizes)
    return str(caught.value)
