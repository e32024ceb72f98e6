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
        scores[f"maj@{n}"] = _mean(list(map(majority_vote, answers, passed)))
    left_out = n * len(groups) - sum(len(group.rewards) for group in judged)
    if left_out:
        scores["left_out"] = left_out / (n * len(groups))
    return scores


def _mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value."""
    return math.fsum(values) / len(values)
