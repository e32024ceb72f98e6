"""Models that see compute what transformers computes, row by row, batched, packed and cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from roll.algorithms import logprobs
from roll.config.algorithm.divergences import DistillTargetConfig
from roll.config.sections.model import ModelConfig
from roll.core.batches import TokenBatch, TrainBatch
from roll.core.errors import ConfigError
from roll.core.pictures import Pictures
from roll.models.vision.parts import FAMILIES
from roll.strategy.training import forward
from roll.strategy.training.heads import PolicyHead, PolicyModel, ScoreHead, ValueHead
from roll.strategy.training.teacher_forward import TeacherHead, output_head
from tests.tiny import save_tiny_model
from tests.vision_models import (
    IMAGE,
    VOCAB_SIZE,
    SeenRow,
    make_vision_model,
    oracle_logits,
    save_vision_model,
    seen_row,
)

CPU = torch.device("cpu")
WRITTEN = (9, IMAGE, IMAGE, 20, 11)
"""A policy may write the token that stands for pictures; it is text then."""


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture(scope="module")
def model_folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("tower") / family, family)


def policy_of(path: Path) -> PolicyModel:
    return PolicyHead(1.0, 16).load(ModelConfig(path=str(path)), torch.float32)


def rows_of(family: str) -> list[SeenRow]:
    sizes: list[list[tuple[int, int]]] = [[(2, 3)], [(3, 1), (2, 2)], [(1, 4)]]
    return [seen_row(family, each, seed=seed) for seed, each in enumerate(sizes)]


def batch_of(
    tokens: Sequence[Sequence[int]], pictures: Sequence[Pictures | None] | None
) -> TokenBatch:
    lengths = torch.tensor([len(row) for row in tokens])
    tokens_BT = torch.zeros(len(tokens), int(lengths.max()), dtype=torch.long)
    for i, row in enumerate(tokens):
        tokens_BT[i, : len(row)] = torch.tensor(row)
    found = None if pictures is None else list(pictures)
    return TokenBatch(tokens=tokens_BT, lengths=lengths, pictures=found)


def scored(policy: PolicyModel, batch: TokenBatch) -> Tensor:
    """Log-probs of all tokens, `[B, T]`."""
    terms = forward.score(
        policy, batch, device=CPU, max_tokens=10**6, entropy=False, agree=lambda value: value
    )
    return terms.logprobs_BT


def test_log_probs_are_those_of_the_models_own_pass(family: str, model_folder: Path) -> None:
    model, rows = make_vision_model(family), rows_of(family)
    text = [7, 8, IMAGE, 9, 10, 11, 12]  # a row without pictures beside them
    tokens = [*([*row.tokens, *WRITTEN] for row in rows), text]
    batch = batch_of(tokens, [*(row.pictures for row in rows), None])
    with torch.no_grad():
        logits = [oracle_logits(model, row, WRITTEN) for row in rows]
        logits.append(model(input_ids=torch.tensor([text])).logits[0])
    for packed in (False, True):
        policy = policy_of(model_folder)
        if packed:
            policy.pack_rows()
        found_BT = scored(policy, batch)
        for row, (ids, its) in enumerate(zip(tokens, logits, strict=True)):
            want = its[:-1].log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
            torch.testing.assert_close(found_BT[row, 1 : len(ids)], want, atol=5e-6, rtol=0)


def test_the_last_feed_forward_part_runs_only_where_it_is_read(
    family: str, model_folder: Path
) -> None:
    policy, model = policy_of(model_folder), make_vision_model(family)
    (row, *_) = rows_of(family)
    batch = batch_of([[*row.tokens, *WRITTEN]], [row.pictures])
    needed_BT = torch.zeros(batch.tokens.shape, dtype=torch.bool)
    needed_BT[:, -len(WRITTEN) :] = True
    seen = []
    last = policy.model.get_decoder().layers[-1].mlp
    handle = last.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0].flatten(0, -2).shape[0])
    )
    terms = forward.token_terms(policy, batch, needed_BT, CPU, entropy=False, tower=True)
    handle.remove()
    experts = "moe" in family  # their balance is counted over all tokens
    assert seen == [batch.tokens.shape[1] if experts else len(WRITTEN)]
    whole = logprobs.from_logits(
        oracle_logits(model, row, WRITTEN)[None], batch.tokens, temperature=1.0
    )
    torch.testing.assert_close(
        terms.logprobs_BT[needed_BT], whole.logprobs_BT[needed_BT], atol=5e-6, rtol=0
    )


def test_text_alone_runs_no_tower_and_needs_no_image_processor(family: str, tmp_path: Path) -> None:
    path = save_vision_model(tmp_path / family, family)
    (path / "preprocessor_config.json").unlink()
    policy, model = policy_of(path), make_vision_model(family)
    ran = []
    policy.model.base_model.visual.register_forward_pre_hook(lambda *_: ran.append(1))
    text = [7, 8, 9, 10]
    want = model(input_ids=torch.tensor([text])).logits[0, :-1].log_softmax(-1)
    for pictures in (None, [None]):
        found_BT = scored(policy, batch_of([text], pictures))
        chosen = want.gather(1, torch.tensor(text)[1:, None])[:, 0]
        torch.testing.assert_close(found_BT[0, 1:], chosen, atol=5e-6, rtol=0)
    assert not ran


def test_a_blank_picture_changes_nothing_and_gives_gradients_of_zero(
    family: str, model_folder: Path
) -> None:
    policy = policy_of(model_folder)
    batch = batch_of([[7, 8, 9, 10]], None)
    needed_BT = torch.tensor([[False, True, True, True]])
    plain, blank = (
        forward.token_terms(policy, batch, needed_BT, CPU, entropy=False, tower=tower)
        for tower in (False, True)
    )
    assert torch.equal(plain.logprobs_BT, blank.logprobs_BT)
    policy.zero_grad()
    (blank.logprobs_BT.sum() + forward.empty_pass(policy, CPU, tower=True)).backward()
    tower = dict(policy.model.base_model.visual.named_parameters())
    for name, parameter in tower.items():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_a_teacher_that_sees_tells_its_own_distribution(family: str, model_folder: Path) -> None:
    model, (row, *_) = make_vision_model(family), rows_of(family)
    plain = batch_of([[*row.tokens, *WRITTEN]], [row.pictures])
    mask_BT = torch.zeros(plain.tokens.shape, dtype=torch.bool)
    mask_BT[:, -len(WRITTEN) :] = True
    batch = TrainBatch(
        tokens=plain.tokens, lengths=plain.lengths, loss_mask=mask_BT, pictures=plain.pictures
    )
    logits_NV = oracle_logits(model, row, WRITTEN)[-len(WRITTEN) - 1 : -1]
    for target in (DistillTargetConfig(), DistillTargetConfig(top_k=3)):
        head = TeacherHead(target, VOCAB_SIZE, 4)
        teacher = head.load(ModelConfig(path=str(model_folder)), torch.float32)
        (told,) = forward.score(
            teacher, batch, device=CPU, max_tokens=10**6, entropy=False, agree=lambda value: value
        ).rows
        if target.top_k is None:
            found = output_head(teacher.model, lambda part: part)
            again_NV = told.outputs[0] @ found.weight_VD.T
            torch.testing.assert_close(again_NV, logits_NV, atol=5e-6, rtol=0)
            continue
        likeliest = logits_NV.log_softmax(-1).topk(3)
        assert torch.equal(told.outputs[0], likeliest.indices)
        torch.testing.assert_close(told.outputs[1][:, :3], likeliest.values, atol=5e-6, rtol=0)


def test_a_model_that_reads_no_pictures_refuses_them(tmp_path: Path) -> None:
    policy = policy_of(save_tiny_model(tmp_path / "text"))
    row = seen_row("qwen2_vl")
    with pytest.raises(ConfigError, match="rows have pictures, and the model of this role reads"):
        scored(policy, batch_of([row.tokens], [row.pictures]))


def test_a_model_that_sees_is_no_critic_and_no_reward_model(
    family: str, model_folder: Path
) -> None:
    for head, what in ((ValueHead(), "a critic"), (ScoreHead(), "a reward model")):
        with pytest.raises(ConfigError, match=f"no .* classifier for .*cannot be {what}"):
            head.load(ModelConfig(path=str(model_folder)), torch.float32)
