"""Every rank gets exactly its rows of a step, whatever the step is made of."""

from __future__ import annotations

import pickle
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.config.algorithm import Aggregation
from roll.core.completion import NOBODY, Completion, Content, FinishReason, VersionRuns, Written
from roll.core.types import Prompt, Sample
from roll.distributed.remote_values import store
from roll.pipeline.updates import updates
from roll.rollout.assemble import assemble
from roll.rollout.dense import dense
from roll.rollout.types import Group, ScoredSample

STOP = FinishReason.STOP


@dataclass(frozen=True)
class Step:
    """What a step is made of."""

    groups: list[Group]
    updates: int
    ranks: int
    epochs: int


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """A step whose rows divide into updates and ranks; some rewards failed, some tokens are far,
    some were written by an environment."""
    num_updates, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    siblings = draw(st.integers(1, 4))
    num_groups = num_updates * ranks * draw(st.integers(1, 2))
    groups, token = [], 1
    for number in range(num_groups):
        prompt = Prompt(f"p:{number}", tuple(range(draw(st.integers(0, 4)))), "", "", "")
        contents = []
        for length in draw(st.lists(st.integers(0, 5), min_size=siblings, max_size=siblings)):
            tokens = array("i", range(token, token + length))  # each token of a step is another
            contents.append(Written(tokens, array("f", [-float(t) for t in tokens]), ""))
            token += length
        far: Sequence[Content] = contents
        if draw(st.booleans()):
            far = store(contents, [0] * siblings)
        samples = []
        for i, (content, written) in enumerate(zip(far, contents, strict=True)):
            size = len(written.tokens)
            writers = draw(st.lists(st.sampled_from([2, 3, NOBODY]), min_size=size, max_size=size))
            runs = VersionRuns.of_tokens(writers)
            one = Sample(f"{number}/{i}", str(number), prompt, Completion(content, runs, STOP))
            failed = ("judge",) if draw(st.integers(0, 5)) == 0 else ()
            samples.append(ScoredSample(one, draw(st.floats(-1, 1)), failed=failed))
        groups.append(Group(prompt, tuple(samples), 3))
    return Step(groups, num_updates, ranks, draw(st.integers(1, 2)))


@given(steps())
def test_each_rank_gets_its_rows_and_each_row_comes_once(step: Step) -> None:
    table = assemble(step.groups)
    wanted = {
        scored.sample.id: (
            [*group.prompt.tokens, *scored.sample.completion.tokens],
            [
                token
                for token, version in zip(
                    scored.sample.completion.tokens, scored.sample.completion.versions, strict=True
                )
                if version != NOBODY and scored.has_reward
            ],
        )
        for group in step.groups
        for scored in group.samples
    }
    seen = Counter[str]()
    for update in updates(
        table,
        epochs=step.epochs,
        num_updates=step.updates,
        ranks=step.ranks,
        aggregation=Aggregation.TOKEN_MEAN,
    ):
        parts = update.split(step.ranks)
        assert len({len(part) for part in parts}) == 1
        weight = 0.0
        for part in parts:
            batch = dense(part)
            seen.update(batch.sample_ids)
            assert batch.token_weights is not None
            weight += batch.token_weights.double().sum().item()
            assert not batch.token_weights[~batch.loss_mask].any()
            for i, name in enumerate(batch.sample_ids):
                tokens, trained = wanted[name]
                assert batch.tokens[i, : batch.lengths[i]].tolist() == tokens
                assert not batch.tokens[i, batch.lengths[i] :].any()
                own = batch.tokens[i][batch.loss_mask[i]].tolist()
                assert own == trained
                assert part.trained_tokens()[i] == len(trained)
                assert batch.rollout_logprobs is not None
                made = batch.rollout_logprobs[i] != 0  # those of a prompt are 0
                assert torch.equal(batch.rollout_logprobs[i][made], -batch.tokens[i][made].float())
        trained_any = any(wanted[name][1] for name in update.sample_ids)
        assert abs(weight - float(trained_any)) < 1e-6
    assert seen == Counter(dict.fromkeys(wanted, step.epochs))


@dataclass(frozen=True)
class Far:
    """Stands for tokens in another process."""

    number: int

    def get(self) -> Written:
        raise AssertionError("the driver needs no tokens")


def test_a_table_is_small_whatever_the_samples_are() -> None:
    prompt = Prompt("p", tuple(range(100)), "", "", "")
    runs = VersionRuns(((3, 10_000),))
    samples = tuple(
        ScoredSample(Sample(f"{i}", "g", prompt, Completion(Far(i), runs, STOP)), 1.0)
        for i in range(256)
    )
    table = assemble([Group(prompt, samples, 3)])
    assert table.lengths.tolist() == [10_100] * 256
    assert len(pickle.dumps(table)) < 256 * 200
