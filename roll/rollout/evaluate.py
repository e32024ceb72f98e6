"""Pure functions that compute mean@k, pass@k and maj@k from n samples of each held-out prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from roll.config.sections.lifecycle import pass_ks
from roll.core.types import Sample
from roll.rollout.types import Group


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimate without bias the probability that at least one of k samples passes.

    The estimate is the share of all subsets of k samples that contain a passing sample (Chen et
    al., arXiv 2107.03374).

    Raises:
        ValueError: k or num_passed is out of range.
    """
    if not (1 <= k <= num_samples and 0 <= num_passed <= num_samples):
        raise ValueError(
            f"pass@{k} of {num_samples} samples, {num_passed} of them passed, is not defined; "
            "k must lie within 1 and the number of samples"
        )
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def majority_vote(answers: Sequence[str | None], passed: Sequence[bool]) -> float:
    """Return the score in 0..1 of the most frequent answer: the share of its samples that passed.

    Samples without an answer do not vote; if none votes, the score is 0. If several answers are
    equally frequent, the score is the mean of their scores. Samples with the same answer may differ
    in passing, because a reward may judge more than the answer.

    Args:
        answers: answer of each sample, normalised so that equal answers are equal strings; None
            for a sample without an answer.
        passed: True for each sample that passed.
    """
    verdicts: dict[str, list[bool]] = {}
    for answer, ok in zip(answers, passed, strict=True):
        if answer is not None:
            verdicts.setdefault(answer, []).append(ok)
    if not verdicts:
        return 0.0
    most = max(len(votes) for votes in verdicts.values())
    winners = [sum(votes) / most for votes in verdicts.values() if len(votes) == most]
    return math.fsum(winners) / len(winners)


def prompt_scores(
    rewards: Sequence[float], answers: Sequence[str | None], n: int, *, pass_score: float
) -> dict[str, float]:
    """Return the scores of one prompt with n samples: `mean@n`, `pass@k` for k = 1, 2, 4, ... and n
    as far as k samples have a reward, and `maj@n`; empty if no sample has a reward.

    Args:
        rewards: rewards of those of the n samples that have one.
        answers: normalised answers of the same samples.
        n: number of samples.
        pass_score: smallest reward with which a sample passes.
    """
    if not rewards:
        return {}
    passed = [reward >= pass_score for reward in rewards]
    found = {
        f"pass@{k}": pass_at_k(len(passed), sum(passed), k) for k in pass_ks(n) if k <= len(passed)
    }
    return {f"mean@{n}": _mean(rewards), **found, f"maj@{n}": majority_vote(answers, passed)}


def evaluate(
    groups: Sequence[Group], *, pass_score: float, extract: Callable[[Sample], str | None]
) -> dict[str, float]:
    """Return the scores of a validation, each a mean over prompts with n samples per prompt.

    Keys: `mean@n`, the mean reward; `pass@k` for k = 1, 2, 4, ... and n; `maj@n`; and `mean@1`,
    which equals `mean@n`, because the mean over all samples is the best estimate for one sample.
    Samples without a reward are left out, and `left_out` is then their share of all samples. A
    prompt counts for `pass@k` if at least k of its samples have a reward. A key is missing if no
    prompt counts for it.

    Args:
        groups: groups of one size n, at least one.
        pass_score: smallest reward with which a sample passes.
        extract: function that returns the normalised answer of a sample, or None if the sample has
            no answer.

    Raises:
        ValueError: no groups, or groups of different sizes.
    """
    sizes = {len(group.samples) for group in groups}
    if len(sizes) != 1:
        raise ValueError(f"evaluate needs groups of one size; got sizes {sorted(sizes)}")
    (n,) = sizes
    each = [
        prompt_scores(
            group.rewards,
            [extract(one.sample) for one in group.samples if one.has_reward],
            n,
            pass_score=pass_score,
        )
        for group in groups
    ]
    scores: dict[str, float] = {}
    for key in [*(f"pass@{k}" for k in pass_ks(n)), f"mean@{n}", f"maj@{n}"]:
        if values := [one[key] for one in each if key in one]:
            scores[key] = _mean(values)
    if f"mean@{n}" in scores:
        scores["mean@1"] = scores[f"mean@{n}"]
    left_out = n * len(groups) - sum(len(group.rewards) for group in groups)
    if left_out:
        scores["left_out"] = left_out / (n * len(groups))
    return scores


def _mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value."""
    return math.fsum(values) / len(values)
