"""Process rewards: which token each of them counts at, and what estimators make of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from roll.algorithms import Gae, Grpo, Reinforce, Rloo
from roll.algorithms.advantages.group import step_advantages
from roll.config.algorithm import GaeConfig, GrpoConfig, ReinforceConfig, RlooConfig
from roll.config.sections.reward import RewardConfig
from roll.core.completion import NOBODY, Completion, FinishReason
from roll.core.errors import RewardError
from roll.core.step_rewards import StepRewards, weighted_sum
from roll.core.types import Prompt, Sample
from roll.rewards.api import Reward
from roll.rewards.decoding import make_decode
from roll.rewards.execution.pool import RewardPool
from roll.rewards.loading import BoundReward, normalise
from roll.rewards.steps import Decode, check_steps, placed, token_ends
from roll.rollout.assemble import assemble, reward_metrics
from roll.rollout.dense import dense
from roll.rollout.serialization import from_plain, to_plain
from roll.rollout.types import Group, ScoredSample
from tests.fakes import from_disk
from tests.rlvr_file import error

SAID = "First, 3 + 4 = 7.\nSo the naïve answer is 好的 7 🧮!\n\nStep 2: check it twice.  Done"


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of 400 tokens that writes texts as a family of models does."""
    if kind == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    elif kind == "words":  # a blank before a word is a part of it, and gone at the beginning
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        bytes_ = [f"<0x{number:02X}>" for number in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *bytes_])
    else:  # blanks are written between tokens
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"])
    made.train_from_iterator([SAID, "a b c d e, f. g! the this that 1 2 3"], trainer)
    special = {"eos_token": "<|end|>"} if kind == "bytes" else {}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


KINDS = ["bytes", "words", "pieces"]


def by_hand(tokens: Sequence[int], text: str, end: int, decode: Decode) -> int:
    """The smallest number of tokens that show `end` characters, each prefix decoded."""
    return next(n for n in range(len(tokens) + 1) if decode(tokens[:n])[:end] == text[:end])


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(SAID, max_size=60), drawn=st.data())
@settings(max_examples=60, deadline=None)
def test_a_step_ends_at_the_token_that_completes_its_last_character(
    kind: str, text: str, drawn: st.DataObject
) -> None:
    known = tokenizer(kind)
    tokens = known.encode(SAID[:7] + text, add_special_tokens=False)
    decode = make_decode(known)
    said = decode(tokens)
    places = st.lists(st.integers(1, len(said)), unique=True).map(sorted)
    ends = drawn.draw(places)
    found = token_ends(tokens, said, ends, decode)
    assert found == [by_hand(tokens, said, end, decode) for end in ends]


@pytest.mark.parametrize("kind", KINDS)
@given(tokens=st.lists(st.integers(0, 380), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_tokens_have_a_place_for_each_character(kind: str, tokens: list[int]) -> None:
    known = tokenizer(kind)
    decode = make_decode(known)
    tokens = [token % len(known) for token in tokens]
    said = decode(tokens)
    ends = list(range(1, len(said) + 1))
    found = token_ends(tokens, said, ends, decode)
    assert all(0 < count <= len(tokens) for count in found)
    assert found == sorted(found)
    for end, count in zip(ends, found, strict=True):  # no token too early
        assert decode(tokens[:count])[:end] == said[:end]


def test_only_the_tokens_of_a_step_are_decoded() -> None:
    known, lengths = tokenizer("bytes"), []
    tokens = known.encode(SAID * 200, add_special_tokens=False)
    plain = make_decode(known)

    def decode(part: Sequence[int]) -> str:
        lengths.append(len(part))
        return plain(part)

    said = plain(tokens)
    ends = list(range(len(SAID), len(said) + 1, len(SAID)))
    found = token_ends(tokens, said, ends, decode)
    assert len(said[: ends[-1]]) == ends[-1]
    assert found[-1] == len(tokens)
    assert sum(lengths) < 40 * len(tokens)  # each prefix by itself: 200 * 100 times


def test_a_text_of_other_tokens_is_refused() -> None:
    decode = make_decode(tokenizer("bytes"))
    tokens = tokenizer("bytes").encode("First", add_special_tokens=False)
    with pytest.raises(ValueError, match="do not show the first 4 characters"):
        token_ends(tokens, "Fist", [2, 4], decode)


def sample(text: str = "ab cd", tokens: int = 5, versions: Sequence[int] = ()) -> Sample:
    asked = Prompt("s:0", (1, 2), "?", "", "t")
    ids = range(tokens)
    runs = versions or [0] * tokens
    done = Completion.of(ids, [-0.5] * tokens, runs, FinishReason.STOP)
    return Sample("0/s:0/0", "0/s:0", asked, done, text)


@pytest.mark.parametrize(
    ("given_", "told"),
    [
        (Reward(0, steps=[(2, 1.0), (2, 1.0)]), "step 1 ends after 2 characters; expected more"),
        (Reward(0, steps=[(6, 1.0)]), "step 0 ends after 6 characters; .* at most the 5"),
        (Reward(0, steps=[(0, 1.0)]), "step 0 ends after 0"),
        (Reward(0, steps=[(-1, 1.0)]), "step 0 ends after -1"),
        (Reward(0, steps=[(4, 1.0)], steps_in="tokens"), "at most the 3 of the response"),
        (Reward(0, steps=[(1, math.nan)]), "value of step 0 must be finite"),
        (Reward(0, steps=[(1.5, 1.0)]), "expected \\(end, value\\)"),  # type: ignore[list-item]
        (Reward(0, steps=[(True, 1.0)]), "expected \\(end, value\\)"),
        (Reward(0, steps=[3]), "expected \\(end, value\\)"),  # type: ignore[list-item]
        (Reward(0, steps=[(1, "x")]), "must be a number"),  # type: ignore[list-item]
        (Reward(0, token_rewards=[0.0, 1.0]), "2 token_rewards for a response of 3 tokens"),
        (Reward(0, token_rewards=[0.0, 1.0, math.inf]), "token 2 must be finite"),
        (Reward(0, steps=[(1, 1.0)], token_rewards=[0.0] * 3), "both steps and token_rewards"),
        (Reward(0, steps=[(1, 1.0)], steps_in="bytes"), "steps_in is 'bytes'"),  # type: ignore[arg-type]
    ],
)
def test_steps_that_have_no_place_are_refused(given_: Reward, told: str) -> None:
    with pytest.raises((ValueError, TypeError), match=told):
        check_steps(normalise(given_), sample(tokens=3))


def test_a_step_in_the_text_of_an_environment_counts_for_the_turn_before() -> None:
    said = sample(tokens=7, versions=[0, 0, NOBODY, NOBODY, 1, 1, NOBODY])
    reward = Reward(0, steps=[(1, 1.0), (3, 2.0), (4, 4.0), (6, 8.0), (7, 16.0)], steps_in="tokens")
    steps = placed(reward, said, None)
    assert steps is not None
    assert steps.pairs == ((1, 1.0), (2, 6.0), (6, 24.0))
    early = sample(tokens=3, versions=[NOBODY, 0, 0])
    with pytest.raises(ValueError, match="step 0 ends after 1 tokens, of which the policy wrote"):
        placed(Reward(0, steps=[(1, 1.0)], steps_in="tokens"), early, None)
    each = placed(Reward(0, token_rewards=[float(i) for i in range(7)]), said, None)
    assert each is not None
    assert each.pairs == ((1, 0.0), (2, 1.0), (5, 4.0), (6, 5.0))


def test_rewards_of_steps_are_added_up_by_their_weights() -> None:
    one, other = StepRewards.of([(1, 1.0), (3, 2.0)]), StepRewards.of([(3, 1.0), (2, 0.0)])
    found = weighted_sum([(2.0, one), (-1.0, other), (5.0, None)])
    assert found is not None
    assert found.pairs == ((1, 2.0), (2, 0.0), (3, 3.0))
    assert found.total == 5.0
    assert weighted_sum([(1.0, None)]) is None


def scored(*steps: list[tuple[int, float]] | None, rewards: Sequence[float] = ()) -> Group:
    """A group of responses of 4 tokens."""
    asked = sample().prompt
    made = []
    for i, one in enumerate(steps):
        own = sample(tokens=4)
        own = Sample(f"0/s:0/{i}", "0/s:0", asked, own.completion)
        found = None if one is None else StepRewards.of(one)
        made.append(ScoredSample(own, rewards[i] if rewards else 0.0, steps=found))
    return Group(asked, tuple(made), 0)


def test_a_batch_has_the_rewards_at_their_tokens(tmp_path: Path) -> None:
    group = scored([(2, 0.5), (4, 1.0)], None, [], [(3, 0.0)])
    again = from_plain(from_disk(to_plain(group), tmp_path), lambda _: group.prompt)
    assert [one.steps for one in again.samples] == [one.steps for one in group.samples]
    batch = dense(assemble([again]))
    assert batch.step_ends is not None
    assert batch.token_rewards is not None
    assert batch.token_rewards.tolist() == [
        [0, 0, 0, 0.5, 0, 1],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    assert batch.step_ends.nonzero().tolist() == [[0, 3], [0, 5], [3, 4]]
    assert dense(assemble([scored(None, [])])).token_rewards is None
    found = reward_metrics(group.samples).values_by_name()
    assert found["process/steps_mean"] == 1.0
    assert found["process/reward_mean"] == 0.5


def test_a_group_whose_steps_differ_is_no_group_of_equal_rewards() -> None:
    assert scored(None, []).equal_rewards
    assert scored([(1, 0.0)], [(2, 0.0)]).equal_rewards
    assert not scored([(1, 0.0)], [(2, 1.0)]).equal_rewards


STEPS = st.lists(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([-1.0, 0.0, 0.25, 2.0])), max_size=4),
    min_size=2,
    max_size=5,
)


Drawn = list[list[tuple[int, float]]]


@given(
    STEPS,
    STEPS,
    st.sampled_from(["group", "batch", "none"]),
    st.sampled_from(["mean", "leave_one_out"]),
)
@settings(max_examples=80, deadline=None)
def test_process_supervision_of_grpo_is_that_of_the_paper(
    first: Drawn, second: Drawn, std: Any, baseline: Any
) -> None:
    groups = [[StepRewards.of(one) for one in rows] for rows in (first, second)]
    rows = [one for group in groups for one in group]
    ids = [i for i, group in enumerate(groups) for _ in group]
    rewards_BL = torch.zeros(len(rows), 4, dtype=torch.float64)
    ends_BL = torch.zeros(len(rows), 4, dtype=torch.bool)
    for row, steps in enumerate(rows):
        for end, value in steps.pairs:
            rewards_BL[row, end - 1], ends_BL[row, end - 1] = value, True
    found = step_advantages(
        rewards_BL, ends_BL, torch.tensor(ids), std=std, eps=1e-6, baseline=baseline
    )
    for row, steps in enumerate(rows):
        mine = [v for one, i in zip(rows, ids, strict=True) if i == ids[row] for v in one.values]
        pool = [v for one in rows for v in one.values] if std == "batch" else mine
        others = [
            v
            for n, (one, i) in enumerate(zip(rows, ids, strict=True))
            if i == ids[row] and n != row
            for v in one.values
        ]
        centre = sum(mine) / max(1, len(mine))
        if baseline == "leave_one_out" and others:
            centre = sum(others) / len(others)
        divisor = 1.0
        if std != "none":
            mean = sum(pool) / max(1, len(pool))
            spread = math.fsum((v - mean) ** 2 for v in pool) / max(1, len(pool) - 1)
            divisor = math.sqrt(spread) + 1e-6
        for token in range(1, 5):
            to_go = sum((value - centre) / divisor for end, value in steps.pairs if end >= token)
            assert found[row, token - 1].item() == pytest.approx(to_go, abs=1e-6)


def trained() -> Any:
    group = scored([(2, 0.5), (4, 1.0)], None, [(1, 2.0)], rewards=[1.0, 0.0, 0.5])
    return dense(assemble([group]))


def test_estimators_treat_them_as_documented() -> None:
    batch = trained()
    to_go = Reinforce(ReinforceConfig(gamma=0.5))(batch).advantages_BT[:, 2:]
    expected = [
        [1 / 8 + 0.25 + 1 / 8, 1 / 4 + 0.5 + 1 / 4, 1 / 2 + 1 / 2, 2.0],
        [0.0, 0.0, 0.0, 0.0],
        [2 + 0.5 / 8, 0.5 / 4, 0.5 / 2, 0.5],
    ]
    torch.testing.assert_close(to_go, torch.tensor(expected))
    total = Rloo(RlooConfig())(batch).advantages_BT[:, 2:]
    torch.testing.assert_close(total[0], torch.full((4,), 2.5 - 1.25))
    same = Grpo(GrpoConfig(process="total", std="none"))(batch).advantages_BT[:, 2:]
    torch.testing.assert_close(same[0], torch.full((4,), 2.5 - 5 / 3))
    values = replace(batch, values=torch.zeros(batch.tokens.shape))
    gae = Gae(GaeConfig(policy_lambda=1.0, gamma=0.5))(values)
    torch.testing.assert_close(gae.advantages_BT[:, 2:], torch.tensor(expected))


def test_grpo_adds_the_outcome_and_what_others_pay_per_token() -> None:
    batch = trained()
    penalty_BT = torch.where(batch.loss_mask, -0.1, 0.0)
    penalized = replace(batch, token_rewards=batch.token_rewards + penalty_BT)
    config = GrpoConfig(std="none")
    found = Grpo(config)(penalized).advantages_BT[:, 2:]
    mean = (0.5 + 1.0 + 2.0) / 3
    outcome = [0.5, -0.5, 0.0]  # all pay the same penalty
    expected = torch.tensor([
        [1.5 - 2 * mean, 1.5 - 2 * mean, 1 - mean, 1 - mean],
        [0.0] * 4,
        [2 - mean, 0, 0, 0],
    ]) + torch.tensor(outcome)[:, None]  # fmt: skip
    torch.testing.assert_close(found, expected)


def pool(config: dict[str, Any], reward: Reward) -> RewardPool:
    made = RewardConfig(**{"fn": "mine:prm", "max_error_rate": 0.0, **config})
    bound = BoundReward(lambda work: reward, is_async=False)
    one = RewardPool.from_bound("prm", made, bound)
    one.decode = make_decode(tokenizer("bytes"))
    one.begin_step(1)
    return one


def said(text: str) -> Sample:
    ids = tokenizer("bytes").encode(text, add_special_tokens=False)
    done = Completion.of(ids, [0.0] * len(ids), [0] * len(ids), FinishReason.STOP)
    return Sample("0/s:0/0", "0/s:0", sample().prompt, done, text)


def test_a_pool_places_what_a_reward_returns() -> None:
    text = "First, 3 + 4 = 7.\nSo the answer"
    reward = Reward(1.0, steps=[(18, 0.5), (len(text), 1.0)])
    made = pool({"process": True}, reward)
    [found] = asyncio.run(made.score([said(text)]))
    made.close()
    assert found.reward == Reward(1.0)
    assert found.steps is not None
    tokens = list(said(text).completion.tokens)
    first = by_hand(tokens, text, 18, make_decode(tokenizer("bytes")))
    assert found.steps.pairs == ((first, 0.5), (len(tokens), 1.0))


def test_a_reward_that_did_not_say_so_may_not_return_steps() -> None:
    made = pool({}, Reward(1.0, steps=[(2, 0.5)]))
    with pytest.raises(RewardError, match="set `process: true` for this reward"):
        asyncio.run(made.score([said("First")]))
    made.close()


GDPO = "algorithm.advantage.kind=gdpo"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["rewards.sort.process=true"], "`process: true` works for functions and classes of your"),
        (
            [
                "rewards.own={fn: 'a:b', tags: [sort], process: true}",
                GDPO,
            ],
            "rewards.own.process: gdpo normalises each reward by itself",
        ),
    ],
)
def test_where_they_cannot_work_they_are_refused(
    run_file: Path,
    changes: list[str],
    told: str,
) -> None:
    assert told in error(run_file, *changes)
