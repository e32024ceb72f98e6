"""Teachers and students of every backend against Hugging Face's whole logits and autograd."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
)

from roll.algorithms.divergences import divergence
from roll.algorithms.teacher_divergence import coarse
from roll.core.metrics import Metrics
from tests.contract.backends import gradient_of_step
from tests.contract.ranks import run_ranks
from tests.contract.teacher_job import NUM_TOKENS, PAIRS, SFT_COEF, TARGETS, job, taught_batch
from tests.families import SIZES
from tests.tiny import char_tokenizer, tiny_qwen3, tiny_qwen3_moe
from tests.turns import in_groups


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lessons")
    torch.manual_seed(9)
    for kind, student, teacher in (
        ("dense", tiny_qwen3(tied=False, layers=4), tiny_qwen3(hidden=96, layers=4)),
        ("experts", tiny_qwen3_moe(), tiny_qwen3_moe(tied=False)),
        ("bounded", bounded(0.7), bounded(0.4)),
    ):
        for name, model in (("student", student), ("teacher", teacher)):
            model.save_pretrained(folder / kind / name)
            char_tokenizer().save_pretrained(folder / kind / name)
    return folder


def bounded(cap: float) -> PreTrainedModel:
    """A model with soft capped logits, many of them near the cap."""
    config = Gemma3TextConfig(
        **SIZES,
        head_dim=8,
        query_pre_attn_scalar=8,
        final_logit_softcapping=cap,
        layer_types=["sliding_attention", "full_attention"],
    )
    return Gemma3ForCausalLM(config)


@pytest.fixture(scope="module", params=in_groups(PAIRS))
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    of_pair = partial(job, pair=request.param)
    found = run_ranks(2, of_pair, folder / request.param.replace(" ", "_"), timeout_s=280)
    return [{**rank, "pair": PAIRS[request.param]} for rank in found]


def whole_logits(model: PreTrainedModel) -> Tensor:
    """Those before each token, `[B, T, V]`."""
    logits = model(input_ids=taught_batch().tokens).logits[:, :-1]
    return torch.nn.functional.pad(logits, [0, 0, 1, 0])


def gradients(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """By the names of a checkpoint, under which backends export: saved as if they were weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("how", TARGETS)
def test_loss_and_gradient_are_those_of_whole_logits(
    ranks: list[dict[str, Any]], folder: Path, how: str, tmp_path: Path
) -> None:
    target, batch, models = TARGETS[how], taught_batch(), folder / ranks[0]["pair"].models
    student = AutoModelForCausalLM.from_pretrained(models / "student", dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(models / "teacher", dtype=torch.float32)
    logits, told = whole_logits(student), whole_logits(teacher).detach()
    ours = (logits[..., :NUM_TOKENS] / target.student_temperature).log_softmax(-1)
    theirs = (told[..., :NUM_TOKENS] / target.teacher_temperature).log_softmax(-1)
    if target.top_k is not None:
        ids = theirs.topk(target.top_k, -1).indices
        ours, theirs = coarse(ours, ids), coarse(theirs, ids)
    apart_BT = divergence(target.divergence, theirs, ours) * batch.loss_mask
    nll_BT = -logits.log_softmax(-1).gather(-1, batch.tokens[..., None]).squeeze(-1)
    weights_BT = batch.require("token_weights", made_by="taught_batch")
    loss = ((apart_BT + SFT_COEF * nll_BT) * weights_BT).sum()
    loss.backward()

    leaders = [rank[how] for rank in ranks if rank[how]["info"].is_dp_leader]
    found_BT = torch.cat([run["divergence"] for run in leaders])
    torch.testing.assert_close(found_BT, apart_BT.detach(), atol=1e-5, rtol=1e-5)
    metrics = Metrics.concat([run["metrics"] for run in leaders]).values_by_name()
    assert metrics["loss/total"] == pytest.approx(float(loss.detach()), rel=1e-5)
    wanted, run = gradients(student, tmp_path), ranks[0][how]
    scale = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        found = gradient_of_step(run["start"][name] - run["weights"][name])
        assert float((found - gradient).abs().max()) / scale < 5e-6, name


def test_the_head_is_that_of_the_model_without_padding(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    path = folder / ranks[0]["pair"].models / "teacher"
    wanted = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for rank in ranks:
        head = rank["whole"]["head"]
        assert torch.equal(head.weight_VD, wanted.lm_head.weight)
        assert head.cap == getattr(wanted.config, "final_logit_softcapping", None)


def test_what_teachers_say_is_not_rounded_for_a_student_in_bfloat16(
    ranks: list[dict[str, Any]],
) -> None:
    if "bf16" not in ranks[0]:
        pytest.skip("asked of dense models only")
    # Ranks that share rows compute in another order, which bfloat16 shows.
    shared = ranks[0]["whole"]["info"].dp_size < len(ranks)
    assert max(rank["bf16"] for rank in ranks) < (2e-2 if shared else 1e-4)
