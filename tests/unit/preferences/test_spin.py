"""SPIN (arXiv 2401.01335): rows of answers and responses, the loss by hand, what is refused."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from roll.algorithms import SpinTerm, SumLoss, token_weights
from roll.algorithms.loss_interface import PolicyTerms
from roll.algorithms.losses.pairs import paired_with_answers
from roll.config import load_config
from roll.config.algorithm import Aggregation, AlgorithmConfig, SpinConfig
from roll.config.errors import ConfigError
from roll.config.sections.data import DataConfig, TemplateConfig
from roll.core.batches import PairedRollouts
from roll.core.completion import NOBODY, TOKEN_TYPE, Completion, FinishReason
from roll.core.errors import DataError
from roll.core.sample_table import SampleTable
from roll.core.types import Prompt, Sample
from roll.data.chat.answers import Answers, check_answered
from roll.data.datasets import load_prompts
from roll.data.store.load import RowStore
from roll.rollout.assemble import assemble, with_answers
from roll.rollout.dense import dense
from roll.rollout.types import Group, ScoredSample
from roll.strategy.training.reduce import weighted_sum
from tests.tiny import char_tokenizer
from tests.unit.losses.test_losses_config import RUN

ANSWERS = {"a": [7, 8, 9, 1], "b": [6, 1]}
PROMPTS = {"a": (5, 5), "b": (4, 4, 4)}
WRITTEN = {"a": [[2, 3], [2]], "b": [[9, 9, 9], [8, 1]]}


def step() -> SampleTable:
    """Two prompts with two responses each; the last response has lost its reward."""
    groups = []
    for name, tokens in PROMPTS.items():
        prompt = Prompt(f"d:{name}", tokens, "", "answer", "x")
        samples = []
        for i, own in enumerate(WRITTEN[name]):
            done = Completion.of(own, [-0.5] * len(own), [3] * len(own), FinishReason.STOP)
            failed = ("digits",) if (name, i) == ("b", 1) else ()
            sample = Sample(f"{name}/{i}", name, prompt, done)
            samples.append(ScoredSample(sample, 0.0, failed=failed))
        groups.append(Group(prompt, tuple(samples), 0))
    table, metrics = with_answers(
        assemble(groups), groups, lambda prompt: array(TOKEN_TYPE, ANSWERS[prompt.id[-1]])
    )
    assert metrics.values_by_name() == {"answer_tokens/mean": 3.0, "answer_tokens/max": 4}
    return table


def test_a_pair_is_the_answer_and_the_response() -> None:
    rows = dense(paired_with_answers(step()))
    assert isinstance(rows, PairedRollouts)
    expected: list[list[int]] = []
    for name, written in WRITTEN.items():
        for own in written:
            expected += [[*PROMPTS[name], *ANSWERS[name]], [*PROMPTS[name], *own]]
    assert rows.lengths.tolist() == [len(row) for row in expected]
    for i, row in enumerate(expected):
        assert rows.tokens[i, : len(row)].tolist() == row
        prompt, trained = len(PROMPTS["a" if i < 4 else "b"]), i < 6
        where = [t for t in range(rows.tokens.shape[1]) if prompt <= t < len(row) and trained]
        assert rows.loss_mask[i].nonzero()[:, 0].tolist() == where
    assert rows.rollout_logprobs is None
    assert dense(step()).rollout_logprobs is not None


def test_what_the_policy_did_not_write_is_trained_in_no_response() -> None:
    prompt = Prompt("d:a", PROMPTS["a"], "", "answer", "x")
    done = Completion.of([2, 3, 4], [-0.5, 0.0, -0.5], [3, NOBODY, 3], FinishReason.STOP)
    group = Group(prompt, (ScoredSample(Sample("a/0", "a", prompt, done), 0.0),), 0)
    table, _ = with_answers(assemble([group]), [group], lambda _: array(TOKEN_TYPE, [7, 8]))
    rows = dense(paired_with_answers(table))
    assert rows.sample_ids == ["a/0/answer", "a/0"]
    assert rows.loss_mask.int().tolist() == [[0, 0, 1, 1, 0], [0, 0, 1, 0, 1]]


def test_the_loss_is_that_of_the_paper() -> None:
    """log(1 + exp(-lambda * (log-ratio of the answer - log-ratio of the response)))."""
    rows = dense(paired_with_answers(step()))
    g = torch.Generator().manual_seed(0)
    old_BT, new_BT = (-torch.rand(rows.tokens.shape, generator=g).double() for _ in range(2))
    gaps = ((new_BT - old_BT) * rows.loss_mask).sum(1).view(-1, 2)
    losses = [math.log1p(math.exp(-0.7 * (a - r))) for a, r in gaps.tolist()[:3]]
    loss, update = SumLoss((SpinTerm(SpinConfig(beta=0.7)),)), replace(rows, old_logprobs=old_BT)
    weights_BT = token_weights(rows.loss_mask, Aggregation.SEQUENCE_MEAN)
    found = weighted_sum(loss(PolicyTerms(new_BT), update).loss_BT, weights_BT)
    assert found.item() == pytest.approx(sum(losses) / 3, rel=1e-6)
    # In the first update nothing has moved, and the answers are pulled as the responses are pushed.
    leaf_BT = new_BT.clone().requires_grad_()
    first = weighted_sum(loss(PolicyTerms(leaf_BT), rows).loss_BT, weights_BT)
    first.backward()
    assert first.item() == pytest.approx(math.log(2), rel=1e-6)
    assert leaf_BT.grad is not None
    pulled = torch.where(torch.arange(8)[:, None] % 2 == 0, -1, 1) * rows.loss_mask
    torch.testing.assert_close(leaf_BT.grad, 0.7 * 0.5 / 3 * pulled.double(), rtol=1e-5, atol=1e-7)


def test_rows_that_do_not_fit_are_refused() -> None:
    term = SpinTerm(SpinConfig())
    with pytest.raises(ValueError, match="have no answers"):
        term.choose(replace(step(), answers=None))
    with pytest.raises(ValueError, match="would have no log-probs"):
        term.choose(dense(step()))
    rows = dense(step())
    with pytest.raises(ValueError, match="are no pairs"):
        term(PolicyTerms(torch.zeros(rows.tokens.shape)), rows)


@pytest.mark.parametrize("chats", [False, True])
def test_an_answer_ends_as_the_policy_would_end_it(chats: bool) -> None:
    tokenizer = char_tokenizer()
    data = TemplateConfig(chat_template=chats)
    prompt = Prompt("d:0", (5,), "1 +", "23", "x")
    tokens = Answers.of(tokenizer, data, lambda tag: 9)(prompt)
    assert tokenizer.decode(tokens.tolist()) == "23" + tokenizer.eos_token
    limits = {"x": 2, "y": 9}
    cut = Answers.of(tokenizer, data, limits.__getitem__)
    assert cut(prompt) == tokens[:2], "by the limit of its tag"
    assert cut(replace(prompt, tag="y")) == tokens
    with pytest.raises(DataError, match="row d:0 has an empty answer"):
        Answers.of(tokenizer, data, lambda tag: 9)(replace(prompt, answer=" "))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss": [{"kind": "spin"}, {"kind": "pg"}]}, "pg on the advantages of all"),
        ({"loss": [{"kind": "spin"}, {"kind": "preference"}]}, "pairs of different responses"),
        ({"aggregation": "token_mean"}, "use sequence_mean"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options: dict[str, Any], reason: str) -> None:
    spin = {"loss": [{"kind": "spin"}], "aggregation": "sequence_mean"}
    with pytest.raises(ValidationError, match=reason):
        TypeAdapter(AlgorithmConfig).validate_python(spin | options, strict=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("rollout.max_staleness=1", "rollout.max_staleness: spin takes the policy before"),
        ("algorithm.old_logprobs=rollout", "old_logprobs: the engine has no log-probs of"),
        (
            "algorithm.advantage={kind: rloo}",
            "advantage: changes advantages, which spin",
        ),
        ("data.sources.0.columns.answer=null", "columns.answer: spin learns from the answers"),
        ("algorithm.reward_shaping=[{kind: clip, low: 0}]", "reward_shaping: changes advantages"),
    ],
)
def test_a_run_that_it_cannot_train_is_refused(tmp_path: Path, change: str, reason: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    load_config(path, ["algorithm={preset: spin}"])
    with pytest.raises(ConfigError, match=reason):
        load_config(path, ["algorithm={preset: spin}", change])


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_row_without_an_answer_is_named_before_the_run(tmp_path: Path, on_disk: bool) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "1+", "answer": "{x}"}}\n' for x in ("2", "", "3")))
    told = {"sources": ({"path": str(file)},), "prompts_per_step": 2, "chat_template": False}
    data = DataConfig.model_validate(told)
    store = RowStore(None, large_bytes=1, processes=1) if on_disk else None
    found = load_prompts(data.sources, data, char_tokenizer(), store=store)
    assert len(list(found.in_memory)) == (0 if on_disk else 3)
    with pytest.raises(DataError, match=r"rows.* has an empty answer, from which the policy"):
        check_answered(found.in_memory, (report.unanswered for report in found.report))
