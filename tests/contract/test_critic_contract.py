"""A critic's values and gradients against plain Hugging Face and autograd, on one rank and two."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, Qwen3ForTokenClassification

from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError
from roll.core.metrics import Metrics
from roll.models.load import load_value_model
from tests.contract.backends import gradient_of_step
from tests.contract.critic_job import STRATEGIES, critic_batch, job
from tests.contract.ranks import run_ranks
from tests.tiny import char_tokenizer, save_tiny_model, tiny_qwen3

WORLD_SIZES = (1, 2)


def save_critic(path: Path, labels: int = 1) -> Path:
    torch.manual_seed(5)
    config = tiny_qwen3().config
    config.num_labels = labels
    Qwen3ForTokenClassification(config).save_pretrained(path)
    char_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=STRATEGIES)
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("critic")
    save_critic(folder / "critic")
    save_tiny_model(folder / "policy")
    of_backend = partial(job, name=request.param)
    return {
        world: run_ranks(world, of_backend, folder / str(world), timeout_s=200)
        for world in WORLD_SIZES
    } | {0: [{"folder": folder}]}


def plain_values(path: Path) -> tuple[Any, list[Tensor]]:
    """Value before token t, from whole rows without padding."""
    model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32)
    model.eval()
    batch = critic_batch()
    rows = []
    for row, length in enumerate(batch.lengths.tolist()):
        logits = model(batch.tokens[row, None, :length]).logits[0, :, 0]
        rows.append(torch.cat([logits.new_zeros(1), logits[:-1]]))
    return model, rows


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_values_belong_to_the_state_before_the_token(
    runs: dict[int, list[dict[str, Any]]], world: int
) -> None:
    _, want = plain_values(runs[0][0]["folder"] / "critic")
    got = torch.cat([rank["whole"]["values"] for rank in runs[world]])
    for row, values in enumerate(want):
        assert torch.allclose(got[row, : len(values)], values, atol=1e-5)
        assert (got[row, len(values) :] == 0).all()


@pytest.mark.parametrize("world", WORLD_SIZES)
@pytest.mark.parametrize("split", ["whole", "one row each", "shuffled"])
def test_no_split_of_the_work_changes_the_critics_gradient(
    runs: dict[int, list[dict[str, Any]]], world: int, split: str
) -> None:
    model, rows = plain_values(runs[0][0]["folder"] / "critic")
    batch = critic_batch()
    assert batch.returns is not None
    assert batch.token_weights is not None
    loss = torch.zeros(())
    for row, values in enumerate(rows):
        width = len(values)
        error = (values - batch.returns[row, :width]).square()
        loss = loss + (error * batch.token_weights[row, :width]).sum()
    loss.backward()
    start = runs[world][0]["start"]
    run = [rank[split] for rank in runs[world]]
    scale = max(float(p.grad.abs().max()) for p in model.parameters())
    for name, parameter in model.named_parameters():
        found = gradient_of_step(start[name] - run[0]["weights"][name])
        assert float((found - parameter.grad).abs().max()) / scale < 5e-6, name
    metrics = Metrics.concat([rank["metrics"] for rank in run]).values_by_name()
    assert metrics["loss/total"] == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_a_new_head_begins_at_zero_and_a_saved_critic_comes_back(
    runs: dict[int, list[dict[str, Any]]], world: int
) -> None:
    for rank in runs[world]:
        assert (rank["fresh_values"] == 0).all()
    saved = load_value_model(ModelConfig(path=str(runs[0][0]["folder"] / str(world) / "hf")))
    start = runs[world][0]["start"]
    for name, parameter in saved.named_parameters():
        assert torch.equal(parameter, start[name]), name


def test_a_classifier_with_several_labels_is_no_critic(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="into 3 labels; a critic needs 1"):
        load_value_model(ModelConfig(path=str(save_critic(tmp_path, labels=3))))
