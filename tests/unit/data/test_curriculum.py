"""The curriculum by pass rate: what is drawn, in which shares, and after a resume too."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.config.sections.data import CurriculumConfig
from roll.core.errors import CheckpointError, DataError
from roll.core.types import Prompt
from roll.data.curriculum import Curriculum
from roll.data.datasets import Dataset, Source
from roll.data.mixing import Sampler
from roll.data.turns import WHOLE, ChangingTurns, whole_shares
from roll.rollout.budget import Budget
from roll.rollout.filters import equal_rewards
from roll.rollout.scheduler import GenerateScheduler
from roll.rollout.types import Group, GroupTask
from tests.fakes import from_disk, group
from tests.rlvr_file import error
from tests.unit.data.test_mixing import _dataset, _prompt

BANDS = st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(5, 100)).map(
    lambda drawn: {
        "low": min(drawn[:2]) / 100,
        "high": max(drawn[:2]) / 100,
        "outside": drawn[2] / 100,
    }
)


def curriculum(seed: int = 0, **settings: Any) -> Curriculum:
    return Curriculum(CurriculumConfig(**settings), seed)


@given(BANDS, st.floats(0, 1))
def test_the_chance_is_one_in_the_band_and_falls_to_its_least_at_the_ends(
    band: dict[str, float], rate: float
) -> None:
    made = curriculum(0, **band)
    chance = made.preference(rate)
    assert band["outside"] - 1e-9 <= chance <= 1
    if band["low"] <= rate <= band["high"]:
        assert chance == 1
    assert made.preference(None) == 1
    if band["low"] > 0:
        assert made.preference(0.0) == pytest.approx(band["outside"])
        half = made.preference(band["low"] / 2)
        assert half == pytest.approx((1 + band["outside"]) / 2)
    if band["high"] < 1:
        assert made.preference(1.0) == pytest.approx(band["outside"])


@given(
    BANDS,
    st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=9),
    st.integers(0, 99),
)
@settings(max_examples=60)
def test_rows_come_in_the_plain_order_without_those_that_are_not_taken(
    band: dict[str, float], rates: list[float | None], seed: int
) -> None:
    dataset, size = _dataset([len(rates)], [1.0]), len(rates)
    made = curriculum(seed, **band)
    made.rates = {f"s0:{i}": rate for i, rate in enumerate(rates) if rate is not None}
    plain = itertools.islice(Sampler(dataset, seed=seed), 400 * size)
    expected, skipped = [], 0
    for number, row in enumerate(plain):
        coin = random.Random(f"{seed}:{number // size}:{row.id}").random()
        taken = coin < made.preference(made.rates.get(row.id))
        skipped = 0 if taken or skipped == size - 1 else skipped + 1
        if not skipped:
            expected.append(row.id)
    sampler = Sampler(dataset, seed=seed, preferences=made)
    drawn = [row.id for row in itertools.islice(sampler, min(len(expected), 30))]
    assert drawn == expected[: len(drawn)]


def test_an_epoch_holds_each_prompt_in_the_band_once_and_few_of_the_others() -> None:
    dataset = _dataset([400], [1.0])
    made = curriculum(low=0.2, high=0.8, outside=0.1)
    made.rates = {f"s0:{i}": 0.5 if i < 200 else 0.0 for i in range(400)}
    counts: Counter[str] = Counter()
    sampler = Sampler(dataset, seed=1, preferences=made)
    epochs = 0
    while epochs < 20:
        counts[next(sampler).id] += 1
        epochs = sampler.state()["drawn"][0] // 400
    assert {counts[f"s0:{i}"] for i in range(200)} <= {20, 21}
    share = sum(counts[f"s0:{i}"] for i in range(200, 400)) / (200 * 20)
    assert share == pytest.approx(0.1, abs=0.02)


@given(st.lists(st.sampled_from([0.25, 0.5, 1.0, 3.0]), min_size=1, max_size=5))
def test_turns_of_fixed_shares_are_those_of_the_sampler(weights: list[float]) -> None:
    turns = ChangingTurns(weights)
    ones = [1.0] * len(weights)
    found = [f"s{turns.source_of(i, lambda: ones)}" for i in range(60)]
    exact = Sampler(_dataset([3] * len(weights), weights), seed=0).schedule(60)
    if [WHOLE * w % sum(weights) for w in weights] == [0] * len(weights):
        assert found == exact
    for end in range(60):  # shares are rounded to a millionth
        counted, wanted = Counter(found[:end]), Counter(exact[:end])
        assert all(abs(counted[name] - wanted[name]) <= len(weights) for name in wanted)


@given(
    st.lists(st.floats(0.01, 100), min_size=2, max_size=5),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10**6)), min_size=1, max_size=6),
)
def test_after_a_change_the_shares_are_the_new_ones(
    weights: list[float], changes: list[tuple[int, int]]
) -> None:
    turns, size = ChangingTurns(weights), len(weights)
    for count, seed in changes:
        factors = [random.Random(seed + i).uniform(0.05, 1.0) for i in range(size)]
        shares = whole_shares([w * f for w, f in zip(weights, factors, strict=True)])
        assert sum(shares) == WHOLE
        drawn: Counter[int] = Counter()
        for _ in range(count):
            drawn[source := turns.source_of(0, lambda factors=factors: factors)] += 1  # type: ignore[misc]
            turns.end(source)
        for source in range(
            size
        ):  # what was owed before the change counts for less than a turn each
            assert abs(drawn[source] - count * shares[source] / WHOLE) <= 2 * size


class Play:
    """A sampler with a curriculum, to which random things happen."""

    def __init__(self, sizes: list[int], config: dict[str, Any], seed: int) -> None:
        self.dataset = _dataset(sizes, [1.0 + i for i in range(len(sizes))])
        self.curriculum = curriculum(seed, **config)
        self.sampler = Sampler(self.dataset, seed=seed, preferences=self.curriculum)
        self.out: list[Prompt] = []
        self.log: list[str] = []

    def act(self, dice: random.Random) -> None:
        what = dice.choice(["draw", "draw", "draw", "settle", "replace", "back", "end"])
        if what == "draw":
            self.out.append(next(self.sampler))
            self.log.append(self.out[-1].id)
        elif what == "end":
            self.log.append(",".join(self.sampler.schedule(3)))
            self.curriculum.end_step()
        elif self.out:
            self._finish(what, dice)

    def _finish(self, what: str, dice: random.Random) -> None:
        # As in the scheduler, what is settled comes in the order of the schedule.
        if what == "settle":
            (source,) = self.sampler.schedule(1)
            mine = [i for i, row in enumerate(self.out) if row.source == source]
            if not mine:
                return
            row = self.out.pop(mine[0])
        else:
            row = self.out.pop(dice.randrange(len(self.out)))
        rewards = [float(dice.random() < 0.5) for _ in range(dice.randrange(4))]
        if what == "back":
            self.sampler.put_back(row)
            return
        (self.sampler.settle if what == "settle" else self.sampler.replace)(row)
        self.curriculum.observe(row, rewards)

    def resumed(self) -> Play:
        other = Play.__new__(Play)
        other.dataset, other.out, other.log = self.dataset, list(self.out), list(self.log)
        other.curriculum = Curriculum(self.curriculum.config, self.curriculum.seed)
        seed = self.curriculum.seed
        other.sampler = Sampler(self.dataset, seed=seed, preferences=other.curriculum)
        other.sampler.restore(json.loads(json.dumps(self.sampler.state())), find=_prompt)
        return other


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 10**6),
    st.integers(0, 80),
)
@settings(max_examples=80)
def test_a_resumed_curriculum_goes_on_exactly(
    sizes: list[int], sources: bool, seed: int, split: int
) -> None:
    play = Play(sizes, {"low": 0.3, "high": 0.7, "outside": 0.2, "sources": sources}, seed)
    dice = random.Random(seed)
    for _ in range(split):
        play.act(dice)
    again, same_dice = play.resumed(), random.Random()
    same_dice.setstate(dice.getstate())
    for _ in range(60):
        play.act(dice)
        again.act(same_dice)
    assert again.log == play.log
    assert again.curriculum.state() == play.curriculum.state()
    assert again.sampler.state() == play.sampler.state()


@given(st.lists(st.lists(st.integers(0, 1), max_size=4), min_size=1, max_size=6), st.randoms())
def test_outcomes_of_a_step_do_not_depend_on_their_order(
    groups: list[list[int]], dice: random.Random
) -> None:
    pairs = [(_prompt(f"s0:{i % 3}"), [float(r) for r in one]) for i, one in enumerate(groups)]
    first, second = curriculum(memory=0.7), curriculum(memory=0.7)
    shuffled = list(pairs)
    dice.shuffle(shuffled)
    for made, order in ((first, pairs), (second, shuffled)):
        for row, rewards in order:
            made.observe(row, rewards)
        before = dict(made.rates)
        assert before == {}  # nothing takes effect within a step
        made.end_step()
    assert first.rates == pytest.approx(second.rates)


def test_a_rate_is_a_mean_that_forgets() -> None:
    made = curriculum(memory=0.5, pass_score=0.8)
    for rewards in ([1.0, 0.9, 0.0, 0.7], [1.0, 1.0], []):
        made.observe(_prompt("s0:1"), rewards)
        made.end_step()
    assert made.rates == {"s0:1": 0.75}
    assert made.source_rates == {"s0": 0.75}
    assert made.metrics.values_by_name()["curriculum/in_band_fraction"] == 1


class World:
    """A scheduler over groups whose rewards follow from the prompt alone.

    `order` shuffles the order in which groups end; None: they end in the order of their beginning.
    """

    def __init__(self, seed: int, order: int | None, staleness: int, filtered: bool) -> None:
        sizes = [7, 9]
        self.dataset = _dataset(sizes, [1.0, 1.0])
        config = {"low": 0.3, "high": 0.7, "outside": 0.1, "sources": True}
        self.curriculum = curriculum(seed, **config)
        self.prompts = Sampler(self.dataset, seed=seed, preferences=self.curriculum)
        self.order = order
        self.scheduler = GenerateScheduler(
            self.prompts,
            self.run,
            Budget(4, max_staleness=staleness, max_prompts_factor=50.0),
            filters=[equal_rewards] if filtered else [],
            outcomes=self.curriculum,
        )

    async def run(self, task: GroupTask) -> Group:
        turns = 1 if self.order is None else crc32(f"{self.order}/{task.group_id}".encode()) % 7
        for _ in range(turns):
            await asyncio.sleep(0)
        passed = crc32(task.prompt.id.encode()) % 5  # of 4 samples
        made = group(task.prompt.id, [float(i < passed) for i in range(4)], step=task.step)
        return made

    def state(self) -> dict[str, Any]:
        return {"position": self.prompts.state(), "scheduler": self.scheduler.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.prompts.restore(state["position"], _prompt)
        self.scheduler.restore(state["scheduler"], _prompt)


async def collected(world: World, first: int, last: int) -> list[list[str]]:
    found = []
    for step in range(first, last):
        result = await world.scheduler.collect(step)
        found.append([one.prompt.id for one in result.groups])
    return found


@given(st.integers(0, 999), st.integers(0, 999), st.booleans())
@settings(max_examples=25, deadline=None)
def test_without_staleness_the_order_in_which_groups_end_changes_nothing(
    seed: int, order: int, filtered: bool
) -> None:
    one, other = (World(seed, each, 0, filtered) for each in (order, order + 1))
    assert asyncio.run(collected(one, 0, 8)) == asyncio.run(collected(other, 0, 8))
    assert one.curriculum.rates == other.curriculum.rates


@given(st.integers(0, 999), st.integers(0, 3), st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_a_resumed_run_trains_on_the_same_prompts_at_any_staleness(
    tmp_path_factory: pytest.TempPathFactory, seed: int, staleness: int, split: int
) -> None:
    async def stopped() -> tuple[list[list[str]], dict[str, Any]]:
        head = await collected(first, 0, split)
        state = first.state()  # groups for the next steps run or wait
        saved = from_disk(state, tmp_path_factory.mktemp("saved"))
        await first.scheduler.close()
        return head, saved

    async def whole() -> list[list[str]]:
        found = await collected(straight, 0, 8)
        await straight.scheduler.close()
        return found

    async def rest() -> list[list[str]]:
        second.restore(state)
        found = await collected(second, split, 8)
        await second.scheduler.close()
        return found

    straight, first, second = (World(seed, None, staleness, filtered=False) for _ in range(3))
    expected = asyncio.run(whole())
    head, state = asyncio.run(stopped())
    assert head + asyncio.run(rest()) == expected


@given(st.integers(0, 999), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_a_step_always_gets_the_sources_of_the_plan(seed: int, staleness: int) -> None:
    async def steps() -> None:
        for step in range(8):
            due = world.prompts.schedule(4)
            result = await asyncio.wait_for(world.scheduler.collect(step), 10)
            assert [one.prompt.source for one in result.groups] == due
        await world.scheduler.close()

    world = World(seed, 3, staleness, filtered=True)
    asyncio.run(steps())


def test_a_column_gives_the_first_pass_rates() -> None:
    rows = tuple(
        Prompt(f"s:{i}", (1,), "", "", "t", {"difficulty": value})
        for i, value in enumerate([0.0, 0.5, 1])
    )
    made = curriculum(column="difficulty")
    made.begin_with(rows)
    assert made.rates == {"s:0": 0.0, "s:1": 0.5, "s:2": 1.0}
    for wrong in (None, "0.5", 1.5):
        bad = Prompt("s:9", (1,), "", "", "t", {"difficulty": wrong})
        with pytest.raises(DataError, match=r"row s:9: column 'difficulty' of data\.curriculum"):
            curriculum(column="difficulty").begin_with([bad])


def test_a_checkpoint_of_another_choice_is_refused() -> None:
    dataset = Dataset(
        (Source("s", 1.0, (_prompt("s:0"),)), Source("r", 1.0, (_prompt("r:0"),))), (), "f"
    )
    plain, banded = Sampler(dataset, seed=0), Sampler(dataset, seed=0, preferences=curriculum())
    weighed = Sampler(dataset, seed=0, preferences=curriculum(sources=True))
    for one, other in itertools.permutations([plain, banded, weighed], 2):
        with pytest.raises(CheckpointError, match=r"another choice of `data\.curriculum`"):
            one.restore(json.loads(json.dumps(other.state())), find=_prompt)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("data.curriculum={low: 0.9, high: 0.1}", "low = 0.9 must not lie above high = 0.1"),
        ("data.curriculum={sources: true}", "data.curriculum.sources: there is one source"),
        ("data.curriculum.hihg=0.5", "unknown key; did you mean 'high'?"),
    ],
)
def test_a_mistake_is_told_with_its_key(run_file: Path, change: str, told: str) -> None:
    assert told in error(run_file, change)
