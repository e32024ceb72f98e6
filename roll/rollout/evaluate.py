"""mean@k, pass@k and maj@k of held-out prompts, from n samples each. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from roll.config.sections.lifecycle import pass_ks
from roll.core.types import Sample
from roll.rollout.types import Group


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that at least one of k samples passes, estimated without bias from more of them.

    The share of all subsets of size k that hold a passing sample (Chen et al., arXiv 2107.03374).

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
    """Whether the most frequent answer is right: 1, 0, or the share of right ones among several.

    Samples without an answer do not vote. Ties count as one drawn at random would on average, and
    so do equal answers that did not all pass (a reward may judge more than the answer).

    Args:
        answers: one per sample, normalised so that equal answers are equal strings.
        passed: whether each sample passed.
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


def evaluate(
    groups: Sequence[Group], *, pass_score: float, extract: Callable[[Sample], str | None]
) -> dict[str, float]:
    """Means over prompts, for groups of n samples each.

    Keys: `mean@n`, the mean reward; `pass@k` for k = 1, 2, 4, ... and n; `maj@n`. `mean@1` is
    there for every n: over all samples it is estimated best, and so equals `mean@n`. Samples
    without a reward are left out: of k, a prompt counts that has so many samples with one. Where
    there are such, `left_out` is their share; a key for which no prompt is left is missing.

    Args:
        groups: at least one; all of the same size n.
        pass_score: a sample passes when its reward is at least this.
        extract: sample to a normalised answer, or None where there is none.

    Raises:
        ValueError: no groups, or groups of different sizes.
    """
    sizes = {len(group.samples) for group in groups}
    if len(sizes) != 1:
        raise ValueError(f"evaluate needs groups of one size; got sizes {sorted(sizes)}")
    (n,) = sizes
    judged = [group for group in groups if group.rewards]
    passed = [[reward >= pass_score for reward in group.rewards] for group in judged]
    answers = [[extract(one.sample) for one in g.samples if one.has_reward] for g in judged]
    scores: dict[str, float] = {}
    for k in pass_ks(n):
        shares = [pass_at_k(len(p), sum(p), k) for p in passed if len(p) >= k]
        if shares:
            scores[f"pass@{k}"] = _mean(shares)
    if judged:
        scores["mean@1"] = _mean([_mean(group.rewards) for group in judged])
        scores[f"mean@{n}"] = scores["mean@1"]
        votes = [majority_vote(a, p) for a, p in zip(answers, passed, strict=True)]
        scores[f"maj@{n}"] = _mean(votes)
    left_out = n * len(groups) - sum(len(group.rewards) for group in judged)
    if left_out:
        scores["left_out"] = left_out / (n * len(groups))
    return scores


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
