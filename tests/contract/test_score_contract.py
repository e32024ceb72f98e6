"""What every scoring backend must do: the log-probs of Hugging Face, on one rank and on two."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from roll.config.sections.model import ModelConfig
from roll.core.batches import RolloutBatch
from roll.core.types import WorkerSpec
from roll.strategy.training.group import GroupMembership
from tests.contract.backends import SCORE_BACKENDS
from tests.contract.ranks import run_ranks
from tests.tiny import rollout_batch, save_tiny_model

TEMPERATURE = 0.7
SHARED_ROWS = ("fsdp2-ulysses2", "fsdp2-tp2", "megatron-cp2")
"""Backends whose ranks get the same rows."""


def score_batch() -> RolloutBatch:
    batch = replace(rollout_batch(6, seed=5), temperatures=torch.linspace(0.5, 1.5, 6))
    return batch.select(batch.lengths.argsort(descending=True))  # uneven work for two ranks


def job(spec: WorkerSpec, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    group = GroupMembership(spec)  # of all backends
    for name, backend in SCORE_BACKENDS.items():
        model = ModelConfig(path=str(folder.parent / backend.model))
        build = partial(backend.build, spec, model, temperature=TEMPERATURE)
        whole, small = build(), build(budget=20, chunk=3)
        bf16 = backend.build(spec, model.model_copy(update={"dtype": "bfloat16"}))
        info = whole.rank_info
        own = score_batch().split(info.dp_size)[info.dp_rank]
        rows = replace(own, temperatures=None)
        at = torch.arange(rows.tokens.shape[1])
        dirty = replace(rows, tokens=rows.tokens.masked_fill(at >= rows.lengths[:, None], 10**6))
        whole.offload()
        whole.onload()
        results[name] = {
            "whole": whole.score(rows, entropy=True, squares=True),
            "small": small.score(rows, entropy=True, squares=True),
            "dirty padding": small.score(dirty, entropy=True, squares=True),
            "own temperatures": small.score(own, entropy=True, squares=True),
            "bf16": bf16.score(rows).logprobs_BT,
            "neither": whole.score(rows),
            "squares alone": whole.score(rows, squares=True),
            "info": info,
        }
        for strategy in (small, bf16, whole):
            strategy.close()
    group.leave()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("score")
    save_tiny_model(folder / "dense")
    save_tiny_model(folder / "experts", experts=True)
    return folder


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    return run_ranks(request.param, job, folder / str(request.param), timeout_s=280)


@pytest.mark.parametrize("backend", SCORE_BACKENDS)
def test_scores_equal_hf_row_by_row(
    ranks: list[dict[str, Any]], folder: Path, backend: str
) -> None:
    path = folder / SCORE_BACKENDS[backend].model
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for result in ranks:
        info = result[backend]["info"]
        part = score_batch().split(info.dp_size)[info.dp_rank]
        for how in ("whole", "small", "dirty padding", "own temperatures"):
            temperatures = torch.full((len(part),), TEMPERATURE)
            if how == "own temperatures":
                temperatures = part.require("temperatures", made_by="score_batch")
            terms = result[backend][how]
            want_BT, entropy_BT, squares_BT = torch.zeros(3, *part.tokens.shape)
            for row, length in enumerate(part.lengths.tolist()):
                tokens = part.tokens[row, :length]
                with torch.no_grad():
                    logits = model(tokens[None]).logits[0, :-1] / temperatures[row]
                logp = logits.log_softmax(-1)
                want_BT[row, 1:length] = logp[torch.arange(length - 1), tokens[1:]]
                entropy_BT[row, 1:length] = -(logp.exp() * logp).sum(-1)
                squares_BT[row, 1:length] = logp.exp().square().sum(-1)
            torch.testing.assert_close(terms.logprobs_BT, want_BT, atol=1e-5, rtol=0)
            torch.testing.assert_close(terms.entropy_BT, entropy_BT, atol=1e-5, rtol=0)
            torch.testing.assert_close(terms.squares_BT, squares_BT, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", SCORE_BACKENDS)
def test_scores_have_only_what_is_asked_and_know_their_ranks(
    ranks: list[dict[str, Any]], backend: str
) -> None:
    for result in ranks:
        neither, alone = result[backend]["neither"], result[backend]["squares alone"]
        assert neither.entropy_BT is None
        assert neither.squares_BT is None
        assert alone.entropy_BT is None
        assert torch.equal(alone.squares_BT, result[backend]["whole"].squares_BT)
        together = 2 if backend in SHARED_ROWS and len(ranks) > 1 else 1
        assert result[backend]["info"].dp_size == len(ranks) // together


@pytest.mark.parametrize("backend", SCORE_BACKENDS)
def test_bf16_scores_are_near(ranks: list[dict[str, Any]], backend: str) -> None:
    for result in ranks:
        got = result[backend]["bf16"]
        assert got.dtype == torch.float32
        assert torch.isfinite(got).all()
        reference, info = SCORE_BACKENDS[backend].reference, result[backend]["info"]
        if info.dp_size == len(ranks):
            want = result[reference]["bf16"]
        else:
            want = torch.cat([rank[reference]["bf16"] for rank in ranks])
        torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)
