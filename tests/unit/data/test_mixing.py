"""The prompt sampler: shares, epochs, and a position that survives a restart."""

import itertools
import json
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from roll.core.errors import CheckpointError
from roll.core.types import Prompt
from roll.data.datasets import Dataset, Source
from roll.data.mixing import Sampler


def _prompt(name: str) -> Prompt:
    return Prompt(id=name, tokens=(1,), text="", answer="", tag="t")


def _dataset(sizes: list[int], weights: list[float], fingerprint: str = "f") -> Dataset[Prompt]:
    sources = tuple(
        Source(
            name=f"s{i}",
            weight=weight,
            items=tuple(_prompt(f"s{i}:{row}") for row in range(size)),
        )
        for i, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    )
    return Dataset(sources, (), fingerprint)


def ids(sampler: Sampler[Prompt], count: int) -> list[str]:
    """Ids of the next prompts."""
    return [prompt.id for prompt in itertools.islice(sampler, count)]


SOURCES = st.lists(
    st.tuples(st.integers(1, 7), st.sampled_from([0.1, 0.25, 1.0, 2.0, 3.0])),
    min_size=1,
    max_size=4,
)


@given(SOURCES, st.integers(0, 60), st.booleans(), st.integers(0, 5))
@settings(max_examples=60)
def test_a_restored_sampler_goes_on_exactly(
    sources: list[tuple[int, float]], split: int, shuffle: bool, seed: int
) -> None:
    dataset = _dataset([s for s, _ in sources], [w for _, w in sources])
    straight = ids(Sampler(dataset, seed=seed, shuffle=shuffle), 80)
    first = Sampler(dataset, seed=seed, shuffle=shuffle)
    head = ids(first, split)
    second = Sampler(dataset, seed=seed, shuffle=shuffle)
    second.restore(json.loads(json.dumps(first.state())), find=_prompt)
    assert head + ids(second, 80 - split) == straight


@given(SOURCES, st.integers(1, 200))
@settings(max_examples=60)
def test_shares_follow_the_weights_at_every_moment(
    sources: list[tuple[int, float]], draws: int
) -> None:
    dataset = _dataset([s for s, _ in sources], [w for _, w in sources])
    counts = Counter(p.id.split(":")[0] for p in itertools.islice(Sampler(dataset, seed=0), draws))
    total = sum(w for _, w in sources)
    for i, (_, weight) in enumerate(sources):
        assert abs(counts[f"s{i}"] - draws * weight / total) < len(sources)


def test_long_run_shares_are_exact() -> None:
    sampler = Sampler(_dataset([3, 5, 7], [0.1, 0.2, 0.7]), seed=1)
    counts = Counter(p.id.split(":")[0] for p in itertools.islice(sampler, 1000))
    assert counts == {"s0": 100, "s1": 200, "s2": 700}


def test_each_epoch_holds_every_prompt_once_in_a_new_order() -> None:
    sampler = Sampler(_dataset([20], [1.0]), seed=3)
    first, second = (ids(sampler, 20) for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(f"s0:{i}" for i in range(20))
    assert first != second


def test_without_shuffling_the_file_order_is_kept() -> None:
    sampler = Sampler(_dataset([3], [1.0]), seed=3, shuffle=False)
    assert ids(sampler, 4) == ["s0:0", "s0:1", "s0:2", "s0:0"]


def test_another_seed_gives_another_order() -> None:
    dataset = _dataset([30], [1.0])
    orders = {tuple(ids(Sampler(dataset, seed=s), 30)) for s in range(4)}
    assert len(orders) == 4


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Sampler(_dataset([3], [1.0], "g"), seed=0), "content of the data files"),
        (Sampler(_dataset([3], [2.0]), seed=0), "source weights"),
        (Sampler(_dataset([3], [1.0]), seed=1), "another seed"),
        (Sampler(_dataset([3], [1.0]), seed=0, shuffle=False), "data.shuffle"),
    ],
)
def test_a_state_of_something_else_is_refused(other: Sampler[Prompt], says: str) -> None:
    sampler = Sampler(_dataset([3], [1.0]), seed=0)
    with pytest.raises(CheckpointError, match=says):
        sampler.restore(other.state(), find=_prompt)


def test_a_state_that_is_none_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not the state of a sampler"):
        Sampler(_dataset([3], [1.0]), seed=0).restore({"step": 3}, find=_prompt)


@given(
    SOURCES,
    st.lists(st.sampled_from(["settle", "replace", "put_back"]), max_size=80),
    st.integers(1, 4),
)
@example([(1, 1.0), (1, 1.0), (1, 3.0), (1, 3.0)], ["settle", "replace", "put_back"], 4)
@settings(max_examples=60)
def test_shares_of_what_is_settled_are_exact_whatever_comes_to_nothing(
    sources: list[tuple[int, float]], ends: list[str], at_once: int
) -> None:
    sampler = Sampler(_dataset([s for s, _ in sources], [w for _, w in sources]), seed=0)
    total = sum(w for _, w in sources)
    settled: Counter[str] = Counter()
    running = [next(sampler) for _ in range(at_once)]
    for end in ends:
        prompt = running.pop(0)
        getattr(sampler, end)(prompt)
        settled[prompt.source] += end == "settle"
        again = next(sampler)
        if end == "put_back":
            assert again == prompt
        if end == "replace":
            assert again.source == prompt.source
        running.append(again)
    held = settled + Counter(prompt.source for prompt in running)
    for i, (_, weight) in enumerate(sources):
        assert abs(held[f"s{i}"] - held.total() * weight / total) < len(sources)


def test_the_schedule_names_the_sources_that_the_settled_prompts_come_from() -> None:
    sampler = Sampler(_dataset([9, 9], [1.0, 3.0]), seed=0)
    for _ in range(3):
        expected = Counter(sampler.schedule(4))
        assert expected == {"s0": 1, "s1": 3}
        drawn = [next(sampler) for _ in range(6)]
        for prompt in drawn:
            if expected[prompt.source]:
                expected[prompt.source] -= 1
                sampler.settle(prompt)
            else:
                sampler.put_back(prompt)
