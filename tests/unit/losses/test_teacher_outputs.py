"""What a student is told, against Hugging Face's whole logits."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from roll.algorithms.divergences import divergence
from roll.algorithms.teacher_divergence import Comparison, coarse, comparison, top_logprobs
from roll.config.algorithm.divergences import (
    AdaptiveKlConfig,
    DistillTargetConfig,
    DivergenceConfig,
    ForwardKlConfig,
    JensenShannonConfig,
    ReverseKlConfig,
)
from roll.core.batches import TrainBatch
from roll.core.teacher_outputs import TeacherRow
from roll.strategy.training import forward
from roll.strategy.training.heads import PolicyModel
from roll.strategy.training.teacher_forward import TeacherModel, output_head
from tests.tiny import rollout_batch, tiny_qwen3

CPU = torch.device("cpu")
NUM_TOKENS = 60
"""Fewer than the model has logits."""
KINDS: list[DivergenceConfig] = [
    ForwardKlConfig(),
    ReverseKlConfig(),
    JensenShannonConfig(beta=0.3),
    AdaptiveKlConfig(),
]


def rows() -> TrainBatch:
    batch = rollout_batch(6, vocab=NUM_TOKENS)
    return TrainBatch(tokens=batch.tokens, lengths=batch.lengths, loss_mask=batch.loss_mask)


def outputs_of(
    model: PreTrainedModel,
    batch: TrainBatch,
    target: DistillTargetConfig,
    *,
    name: str = "t",
) -> list[TeacherRow]:
    teacher = TeacherModel(model, target, NUM_TOKENS, chunk_tokens=5)
    outputs = forward.score(
        teacher, batch, device=CPU, max_tokens=40, entropy=False, agree=lambda passes: passes
    )
    head = output_head(model, lambda part: part)
    return [replace(row, teacher=name, head=None if target.top_k else head) for row in outputs.rows]


def learn(
    student: PreTrainedModel, batch: TrainBatch, compared: Comparison, *, packed: bool = False
) -> tuple[Tensor, list[Tensor]]:
    policy = PolicyModel(student, temperature=0.7, chunk_tokens=4, compared=compared)
    if packed:
        policy.pack_rows()
    policy.zero_grad()
    terms = forward.token_terms(policy, batch, batch.loss_mask, CPU, entropy=True)
    assert terms.divergence_BT is not None
    (terms.divergence_BT * torch.arange(batch.tokens.shape[1])).sum().backward()
    return terms.divergence_BT.detach(), gradients(policy)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def whole_logprobs(model: PreTrainedModel, batch: TrainBatch, temperature: float) -> Tensor:
    logits = model(input_ids=batch.tokens).logits[:, :-1, :NUM_TOKENS]
    shifted = torch.nn.functional.pad(logits, [0, 0, 1, 0])
    return (shifted / temperature).log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_divergence_and_gradient_are_those_of_whole_logits(
    kind: DivergenceConfig, top_k: int | None, packed: bool
) -> None:
    torch.manual_seed(0)
    teacher, student = tiny_qwen3(hidden=96), tiny_qwen3(tied=False)
    assert_as_whole_logits(teacher, student, kind, top_k, packed=packed)


@pytest.mark.parametrize("top_k", [None, 5])
def test_so_they_are_where_both_models_bound_their_logits(top_k: int | None) -> None:
    torch.manual_seed(0)
    teacher, student = gemma(0.4), gemma(0.7)
    assert_as_whole_logits(teacher, student, JensenShannonConfig(beta=0.3), top_k)


def gemma(cap: float) -> PreTrainedModel:
    config = Gemma2Config(
        vocab_size=NUM_TOKENS + 4, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, final_logit_softcapping=cap,
        attn_logit_softcapping=None, attn_implementation="sdpa",
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    model.lm_head.weight.data.mul_(20)
    return model


def assert_as_whole_logits(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    kind: DivergenceConfig,
    top_k: int | None,
    *,
    packed: bool = False,
) -> None:
    target = DistillTargetConfig(
        divergence=kind, top_k=top_k, student_temperature=1.3, teacher_temperature=0.8
    )
    batch = rows()
    batch = replace(batch, teacher_outputs=outputs_of(teacher, batch, target))
    learner = copy.deepcopy(student)
    found, grads = learn(learner, batch, comparison(target, NUM_TOKENS), packed=packed)

    theirs, ours = whole_logprobs(teacher, batch, 0.8), whole_logprobs(student, batch, 1.3)
    if top_k is not None:
        ids = theirs.topk(top_k, -1).indices
        theirs, ours = coarse(theirs, ids), coarse(ours, ids)
    wanted = divergence(kind, theirs.detach(), ours) * batch.loss_mask
    (wanted * torch.arange(batch.tokens.shape[1])).sum().backward()
    torch.testing.assert_close(found, wanted.detach(), atol=1e-5, rtol=1e-5)
    largest = max(grad.abs().max().item() for grad in gradients(student))
    for one, other in zip(grads, gradients(student), strict=True):
        torch.testing.assert_close(one, other, atol=2e-6 * largest, rtol=1e-3)


@pytest.mark.parametrize("top_k", [None, 3])
def test_a_student_that_equals_its_teacher_is_no_distance_away(top_k: int | None) -> None:
    torch.manual_seed(0)
    model = tiny_qwen3()
    target = DistillTargetConfig(top_k=top_k)
    batch = rows()
    batch = replace(batch, teacher_outputs=outputs_of(model, batch, target))
    found, grads = learn(model, batch, comparison(target, NUM_TOKENS))
    assert found.abs().max() < 1e-6
    assert max(grad.abs().max() for grad in grads) < 1e-5


def test_rows_of_several_teachers_and_masked_tokens_find_their_places() -> None:
    torch.manual_seed(0)
    first, second, student = tiny_qwen3(hidden=96), tiny_qwen3(hidden=32), tiny_qwen3()
    target = DistillTargetConfig()
    batch = rows()
    both = [outputs_of(model, batch, target, name=n) for n, model in (("a", first), ("b", second))]
    alone = [
        learn(student, replace(batch, teacher_outputs=outputs), comparison(target, NUM_TOKENS))[0]
        for outputs in both
    ]
    # Some tokens are no longer trained when the student learns.
    fewer = batch.loss_mask & (torch.arange(batch.tokens.shape[1]) % 2 == 0)
    mixed = [both[row % 2][row] for row in range(len(batch))]
    found, _ = learn(
        student,
        replace(batch, loss_mask=fewer, teacher_outputs=mixed),
        comparison(target, NUM_TOKENS),
    )
    odd = (torch.arange(len(batch)) % 2 == 1)[:, None]
    wanted = torch.where(odd, alone[1], alone[0]) * fewer
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def test_what_is_left_of_a_certain_distribution_is_not_rounding() -> None:
    logits = torch.tensor([[30.0, 0.0, 0.0, -1.0]])
    _, told = top_logprobs(logits.log_softmax(-1), 1)
    rest = logits.double().log_softmax(-1)[0, 1:].logsumexp(0).item()
    assert told[0, 1].item() == pytest.approx(rest, abs=1e-5)
