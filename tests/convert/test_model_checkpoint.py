"""A checkpoint written in one layout goes on in another as if nothing had happened."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_adapter.checkpoint_reader import WEIGHT, Saved
from mcore_adapter.convert.conversion_plan import tasks
from mcore_adapter.errors import ConversionError
from mcore_adapter.load import read_config
from mcore_adapter.models import table_of
from mcore_adapter.optimizer_state import MOMENTS
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.learner import Learner
from tests.convert.spawned import run_ranks
from tests.convert.tiny_models import save_model

STEPS = 3


def go_on(
    folder: Path, sizes: ParallelSizes, distributed: bool, before: Path | None, after: Path | None
) -> list[float]:
    """Steps from a checkpoint or from the start; the losses, on the last stage."""
    learner = Learner.build(folder, sizes, distributed=distributed)
    if before is not None:
        assert learner.restore(before) == {"data": 7}
    losses = []
    for _ in range(STEPS):
        losses.append(learner.backward())
        learner.step()
    if after is not None:
        learner.save(after, data=7)
    return [loss for loss in losses if loss is not None]


def rewrite(folder: Path, sizes: ParallelSizes, distributed: bool, old: Path, new: Path) -> None:
    """Another layout's checkpoint of the same state."""
    learner = Learner.build(folder, sizes, distributed=distributed)
    learner.restore(old)
    learner.save(new)


def contents(folder: Path, model: Path) -> dict[str, Tensor]:
    """Weights and moments as in the whole model."""
    table = table_of(read_config(model))
    saved = Saved(folder, table)
    return {
        f"{task.name} {kind}": saved.full(task, kind)
        for task in tasks(table, ParallelSizes())
        if not task.param.optional
        for kind in (WEIGHT, *MOMENTS)
    }


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


def layouts_of(name: str) -> list[tuple[ParallelSizes, int]]:
    layouts = [(ParallelSizes(), 1), (ParallelSizes(), 2), (ParallelSizes(pp=2), 2)]
    return [*layouts, (ParallelSizes(ep=2), 2)] if name == "qwen3_moe" else layouts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_moe"])
@pytest.mark.parametrize("distributed", [False, True])
def test_training_goes_on_in_another_layout(name: str, distributed: bool, tmp_path: Path) -> None:
    folder, kept, again = save_model(tmp_path, name), tmp_path / "kept", tmp_path / "again"
    two_by_two = ParallelSizes(tp=2, pp=2)
    run_ranks(go_on, 4, folder, two_by_two, False, None, kept)
    assert not list(tmp_path.glob(".*"))
    expected = max(run_ranks(go_on, 4, folder, two_by_two, False, kept, None), key=len)
    for i, (sizes, ranks) in enumerate(layouts_of(name)):
        after = again.with_name(f"again{i}")
        answers = run_ranks(go_on, ranks, folder, sizes, distributed, kept, after)
        assert max(answers, key=len) == pytest.approx(expected, rel=1e-5), (sizes, ranks)
    # What the last of them wrote goes on in the first layout.
    there = run_ranks(go_on, 4, folder, two_by_two, distributed, after, None)
    here = run_ranks(go_on, ranks, folder, sizes, distributed, after, None)
    assert max(there, key=len) == pytest.approx(max(here, key=len), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_moe"])
def test_weights_and_moments_are_the_same_bits_in_every_layout(name: str, tmp_path: Path) -> None:
    folder, kept = save_model(tmp_path, name), tmp_path / "kept"
    two_by_two = ParallelSizes(tp=2, pp=2)
    run_ranks(go_on, 4, folder, two_by_two, False, None, kept)
    want = contents(kept, folder)
    layouts = [*layouts_of(name), (two_by_two, 4)]
    for i, (sizes, ranks) in enumerate(layouts):
        for distributed in (False, True):
            new = tmp_path / f"new{i}{distributed}"
            # From a distributed optimizer's pieces to the next one's.
            run_ranks(rewrite, ranks, folder, sizes, distributed, kept, new)
            assert_same_bits(contents(new, folder), want)
            kept = new


def refused(folder: Path, kept: Path) -> list[tuple[str, bool]]:
    """Of each damaged copy beside `kept`: what is said, and whether nothing was changed."""
    learner = Learner.build(folder, ParallelSizes())
    learner.restore(kept)
    before = [p.detach().clone() for chunk in learner.chunks for p in chunk.parameters()]
    found = []
    for copy in sorted(kept.parent.glob("damaged*")):
        with pytest.raises(ConversionError) as error:
            learner.restore(copy)
        now = [p for chunk in learner.chunks for p in chunk.parameters()]
        same = all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        found.append((str(error.value), same))
    return found


def test_a_damaged_checkpoint_is_named_before_anything_changes(tmp_path: Path) -> None:
    folder, kept = save_model(tmp_path, "qwen3"), tmp_path / "kept"
    run_ranks(go_on, 2, folder, ParallelSizes(tp=2), False, None, kept)
    copies = [Path(shutil.copytree(kept, tmp_path / f"damaged{i}")) for i in range(6)]
    (copies[0] / "rank00001.safetensors").unlink()
    cut = copies[1] / "rank00001.safetensors"
    os.truncate(cut, cut.stat().st_size - 1)
    (copies[2] / "index.json").unlink()
    os.truncate(copies[3] / "index.json", 100)
    (copies[4] / "rank00000.safetensors").write_bytes(b"no tensors" * 100)
    shutil.copy(copies[5] / "rank00001.safetensors", copies[5] / "rank00000.safetensors")
    words = ["rank00001.safetensors is missing", "rank00001.safetensors is truncated"]
    words += ["index.json is missing", "index.json is damaged"]
    words += ["rank00000.safetensors is no safetensors file", "files are not of one checkpoint"]
    (answer,) = run_ranks(refused, 1, folder, kept)
    assert len(answer) == len(words)
    for (said, same), word in zip(answer, words, strict=True):
        assert word in said
        assert same, said


def refused_by_one(folder: Path, kept: Path) -> str:
    """What each rank hears if the folder cannot be written."""
    learner = Learner.build(folder, ParallelSizes())
    try:
        learner.save(kept)
    except ConversionError as error:
        return str(error)
    return ""


def test_all_ranks_hear_that_one_cannot_write(tmp_path: Path) -> None:
    folder, kept = save_model(tmp_path, "qwen3"), tmp_path / "kept"
    kept.mkdir()
    answers = run_ranks(refused_by_one, 2, folder, kept)
    assert all("rank 0 cannot write" in answer and "exists" in answer for answer in answers)
