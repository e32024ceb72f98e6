"""What every training backend must do, on one rank and on two."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from roll.core.batches import RolloutBatch
from roll.core.metrics import Metrics
from tests.contract.backends import TRAIN_BACKENDS
from tests.contract.ranks import run_ranks
from tests.contract.train_job import (
    DAMAGED,
    JOBS,
    gradient,
    leaders,
    plain_loss,
    relative_distance,
    train_batch,
)
from tests.tiny import save_tiny_model
from tests.turns import in_groups

WORLD_SIZES = (2, 1)  # two first: one rank then resumes its checkpoint
Results = dict[int, list[dict[str, Any]]]
QUICK = ("fsdp2", "deepspeed-zero2", "megatron-dp2")
"""One of each library; the others are slow."""
OTHERS = [backend.name for backend in TRAIN_BACKENDS if backend.name not in QUICK]


@pytest.fixture(scope="module", params=[*in_groups(QUICK), *in_groups(OTHERS, pytest.mark.slow)])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("train")
    experts = next(b.experts for b in TRAIN_BACKENDS if b.name == request.param)
    save_tiny_model(folder / "tied", tied=True, experts=experts)
    save_tiny_model(folder / "untied", tied=False, seed=1, experts=experts)
    job = JOBS[request.param]
    results: Results = {
        world: run_ranks(world, job, folder / str(world), timeout_s=200) for world in WORLD_SIZES
    }
    results[0] = [{"folder": folder}]
    return results


def folder_of(runs: Results) -> Path:
    folder = runs[0][0]["folder"]
    assert isinstance(folder, Path)
    return folder


def reference_gradient(model_path: Path, batch: RolloutBatch) -> tuple[dict[str, Tensor], float]:
    """Plain autograd of `plain_loss`: an independent oracle."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    total = plain_loss(model, batch)
    total.backward()
    # Saved as if they were weights: names in a checkpoint are not always those of the modules.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(model_path / "gradient")
    return load_file(model_path / "gradient" / "model.safetensors"), float(total.detach())


def merged(ranks: list[dict[str, Any]], *path: str) -> dict[str, float]:
    parts: list[Metrics] = []
    for result in leaders(ranks):
        for key in path:
            result = result[key]
        parts.append(result["metrics"])
    return Metrics.concat(parts).values_by_name()


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_gradient_and_loss_equal_plain_autograd(runs: Results, world: int) -> None:
    want, loss = reference_gradient(folder_of(runs) / "untied", train_batch())
    result = runs[world][0]
    got = gradient(result["steps"]["whole"], result["export"])
    assert relative_distance(got, want) < 5e-6
    metrics = merged(runs[world], "steps", "whole")
    assert metrics["loss/total"] == pytest.approx(loss, rel=1e-5)
    assert metrics["loss/policy"] + metrics["loss/entropy"] == pytest.approx(loss, rel=1e-5)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in want.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_no_split_of_the_work_changes_the_gradient(runs: Results, world: int) -> None:
    start = runs[1][0]["export"]
    want = gradient(runs[1][0]["steps"]["whole"], start)
    want_metrics = merged(runs[1], "steps", "whole")
    for name, run in runs[world][0]["steps"].items():
        assert relative_distance(gradient(run, start), want) < 1e-6, name
        metrics = merged(runs[world], "steps", name)
        for key in ("loss/total", "loss/policy", "entropy", "grad_norm", "trained_tokens"):
            assert metrics[key] == pytest.approx(want_metrics[key], rel=1e-6), (name, key)


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_a_loss_that_reads_no_entropies_gets_none_and_has_its_own_gradient(
    runs: Results, world: int
) -> None:
    result = runs[world][0]
    start = result["export"]
    unread = gradient(result["bonus"]["unread"], start)
    assert relative_distance(unread, gradient(result["bonus"]["without weight"], start)) < 1e-6
    assert relative_distance(unread, gradient(result["steps"]["whole"], start)) > 1e-3
    assert "entropy" not in merged(runs[world], "bonus", "unread")


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_scores_follow_the_update_and_agree_with_hf(runs: Results, world: int) -> None:
    path = folder_of(runs) / "untied"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    kind, config = type(model), model.config
    for weights, key in ((None, "before"), (runs[world][0]["steps"]["whole"]["weights"], "after")):
        if weights is not None:
            model = kind.from_pretrained(None, config=config, state_dict=weights)
        for result in runs[world]:
            part = train_batch().split(result["info"].dp_size)[result["info"].dp_rank]
            got = result["steps"]["whole"][key]
            got_BT = got if isinstance(got, Tensor) else got.logprobs_BT
            for row, length in enumerate(part.lengths.tolist()):
                tokens = part.tokens[row, :length]
                with torch.no_grad():
                    logp = model(tokens[None]).logits[0, :-1].log_softmax(-1)
                want = logp[torch.arange(length - 1), tokens[1:]]
                torch.testing.assert_close(got_BT[row, 1:length], want, atol=1e-5, rtol=2e-5)


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_every_rank_exports_the_checkpoint_exactly(runs: Results, world: int) -> None:
    for tied, key in ((False, "export"), (True, "export_tied")):
        path = folder_of(runs) / ("tied" if tied else "untied")
        want = load_file(path / "model.safetensors")
        assert ("lm_head.weight" in want) != tied
        for result in runs[world]:
            assert_same_bits(result[key], want)


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_the_parts_of_all_ranks_are_the_tensors_of_the_manifest(runs: Results, world: int) -> None:
    manifest = runs[world][0]["manifest"]
    whole = runs[world][0]["export"]
    assert manifest.num_senders == world
    assert [meta.name for meta in manifest.tensors] == list(whole)
    for position, meta in enumerate(manifest.tensors):
        cuts = manifest.cuts_of(position)
        flat = torch.cat([result["parts"][meta.name].reshape(-1) for result in runs[world]])
        assert torch.equal(flat.to(meta.torch_dtype).reshape(meta.shape), whole[meta.name])
        assert [r["parts"][meta.name].numel() for r in runs[world]] == [
            end - first for first, end in pairwise(cuts)
        ]
    for result in runs[world]:
        assert result["manifest"] == manifest
        assert result["frozen"] == frozenset()


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_saved_hf_folder_and_offloading_keep_every_bit(runs: Results, world: int) -> None:
    for result in runs[world]:
        assert_same_bits(result["saved_hf"], result["export"])
        assert_same_bits(result["onloaded"], result["export"])
    saved = folder_of(runs) / str(world) / "hf"
    assert (saved / "tokenizer.json").exists()
    model, again = (
        AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        for path in (folder_of(runs) / "untied", saved)
    )
    assert_same_bits(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_save_load_train_equals_train_to_the_bit(runs: Results, world: int) -> None:
    for result in runs[world]:
        checkpoint = result["checkpoint"]
        assert checkpoint["resumed_draws"] == checkpoint["straight_draws"]
        assert checkpoint["resumed_metrics"] == checkpoint["straight_metrics"]
        assert_same_bits(checkpoint["resumed"], checkpoint["straight"])
        changed = checkpoint["straight"]["model.norm.weight"]
        assert not torch.equal(changed, checkpoint["saved"]["model.norm.weight"])


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_a_copied_checkpoint_is_that_of_its_moment_whatever_comes_after(
    runs: Results, world: int
) -> None:
    at_once, beside, _ = runs[world][0]["checkpoint"]["contents"]
    assert beside == at_once


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_a_checkpoint_without_optimizer_is_small_and_begins_its_moments_anew(
    runs: Results, world: int
) -> None:
    for result in runs[world]:
        checkpoint = result["checkpoint"]
        full, _, small = (sum(map(len, each.values())) for each in checkpoint["contents"])
        assert small < full / 2
        assert_same_bits(*checkpoint["without_moments"])
        assert_same_bits(*checkpoint["from_no_moments"])


def test_checkpoint_of_two_ranks_loads_on_one(runs: Results) -> None:
    assert_same_bits(runs[1][0]["checkpoint"]["from_two_ranks"], runs[2][0]["checkpoint"]["saved"])


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_checkpoint_of_another_model_names_the_difference(runs: Results, world: int) -> None:
    for result in runs[world]:
        other, missing = result["other_model"]
        assert "another model" in other
        assert "`model.freeze`" in other
        assert "lm_head.weight" in other
        assert "meta.json" in missing


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_damaged_file_of_a_checkpoint_is_named(runs: Results, world: int) -> None:
    for result in runs[world]:
        for name, said in zip(DAMAGED, result["damaged"], strict=True):
            assert name in said
            assert "is damaged" in said


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_gradient_that_is_not_finite_skips_the_update(runs: Results, world: int) -> None:
    skipped = [result["skipped"] for result in runs[world]]
    counted = [result["skipped"] for result in leaders(runs[world])]
    bad = Metrics.concat([s["bad"] for s in counted]).values_by_name()
    good = Metrics.concat([s["good"] for s in counted]).values_by_name()
    assert bad["skipped_steps"] == 1
    assert not math.isfinite(bad["grad_norm"])
    assert good["skipped_steps"] == 0
    assert good["lr"] > bad["lr"]  # the warm-up moves on
    for s in skipped:
        assert_same_bits(s["unchanged"], s["before"])
        assert not torch.equal(s["changed"]["lm_head.weight"], s["before"]["lm_head.weight"])


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_an_update_without_a_trained_token_is_skipped_whatever_came_before(
    runs: Results, world: int
) -> None:
    """Adam would go on in the direction of the updates before, and decay the weights."""
    skipped = [result["skipped"] for result in runs[world]]
    counted = [result["skipped"] for result in leaders(runs[world])]
    masked = Metrics.concat([s["masked"] for s in counted]).values_by_name()
    assert masked["skipped_steps"] == 1
    assert masked["grad_norm"] == 0
    for s in skipped:
        assert_same_bits(s["after_masked"], s["changed"])


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_bf16_computes_in_bf16_and_keeps_float32_masters(runs: Results, world: int) -> None:
    exact = runs[1][0]["steps"]["whole"]
    for result in runs[world]:
        run = result["bf16"]
        assert {w.dtype for w in run["weights"].values()} == {torch.bfloat16}
        assert not torch.equal(run["before"], result["steps"]["whole"]["before"])
        torch.testing.assert_close(
            run["before"], result["steps"]["whole"]["before"], atol=0.05, rtol=0.05
        )
    norm = merged(runs[world], "bf16")["grad_norm"]
    assert norm == pytest.approx(exact["metrics"].values_by_name()["grad_norm"], rel=0.05)


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_close_leaves_the_process_group(runs: Results, world: int) -> None:
    assert all(result["group_left"] for result in runs[world])
