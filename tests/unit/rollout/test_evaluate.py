"""pass@k, maj@k and mean@k against all subsets and all draws."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.sections.lifecycle import score_names
from roll.core.types import Sample
from roll.rollout.evaluate import evaluate, majority_vote, pass_at_k
from tests.fakes import group


@given(passed=st.lists(st.booleans(), min_size=1, max_size=7), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_passing_sample(
    passed: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(passed)))
    subsets = [any(subset) for subset in itertools.combinations(passed, k)]
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(sum(subsets) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1)])
def test_pass_at_k_out_of_range_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(n, c, k)


@given(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=8))
def test_a_vote_with_ties_is_the_mean_over_the_most_frequent_answers(
    answers: list[str | None],
) -> None:
    votes = [answer for answer in answers if answer is not None]
    best = {a for a in votes if all(votes.count(a) >= votes.count(b) for b in votes)}
    expected = ("a" in best) / len(best) if best else 0
    assert majority_vote(answers, [a == "a" for a in answers]) == pytest.approx(expected)


def test_equal_answers_of_which_one_failed_count_in_part() -> None:
    assert majority_vote(["a", "a", "b"], [True, False, True]) == 0.5


def extract(sample: Sample) -> str | None:
    return sample.response_text.strip() or None


def test_means_over_prompts_match_hand_worked_numbers() -> None:
    groups = [
        group("a", [1, 1, 0, 0], texts=["4 ", "4", "5", "6"]),
        group("b", [0, 0, 0.9, 1], texts=["7", "7", "", "8"]),
    ]
    assert evaluate(groups, pass_score=1, extract=extract) == {
        "mean@1": pytest.approx((0.5 + 1.9 / 4) / 2),
        "mean@4": pytest.approx((0.5 + 1.9 / 4) / 2),
        "pass@1": pytest.approx((2 / 4 + 1 / 4) / 2),
        "pass@2": pytest.approx((5 / 6 + 1 / 2) / 2),
        "pass@4": 1,
        "maj@4": 0.5,
    }


def test_one_sample_per_prompt_gives_one_number_of_each_kind() -> None:
    groups = [group("a", [1], texts=["x"]), group("b", [0], texts=["y"])]
    expected = {"mean@1": 0.5, "pass@1": 0.5, "maj@1": 0.5}
    assert evaluate(groups, pass_score=1, extract=extract) == expected


def test_groups_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sizes \[1, 2\]"):
        evaluate([group("a", [1]), group("b", [0, 1])], pass_score=1, extract=extract)


@given(st.integers(1, 20))
def test_the_config_knows_the_name_of_every_score(samples: int) -> None:
    scores = evaluate([group("a", [1.0] * samples)], pass_score=1, extract=extract)
    assert set(score_names(samples)) == set(scores)
