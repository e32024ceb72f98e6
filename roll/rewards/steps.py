"""Rewards of steps and tokens that a reward function returned: check of their places, and the
tokens at which they count."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import takewhile
from numbers import Integral, Real
from typing import Any

from roll.core.completion import NOBODY, VersionRuns
from roll.core.step_rewards import StepRewards, require_reward
from roll.core.types import Sample
from roll.rewards.api import Reward

CONTEXT = 8
"""Number of tokens before a piece that are decoded together with it: some tokenizers write a word
at the beginning of a text differently."""

Decode = Callable[[Sequence[int]], str]
"""Function that turns the token ids of a response into the text that rewards read."""


def finite_steps(reward: Reward) -> Reward:
    """Return the reward with `steps` and `token_rewards` as tuples of plain numbers.

    Raises:
        TypeError: they are no pairs of a whole number and a number, or no numbers.
        ValueError: a number is not finite, both are given, or `steps_in` is unknown.
    """
    if reward.token_rewards is None and not reward.steps:
        return reward
    if reward.token_rewards is not None and reward.steps:
        raise ValueError("has both steps and token_rewards; return one of them")
    if reward.steps_in not in ("characters", "tokens"):
        raise ValueError(f"steps_in is {reward.steps_in!r}; use 'characters' or 'tokens'")
    steps = []
    for number, step in enumerate(reward.steps):
        if not isinstance(step, Sequence) or len(step) != 2 or not _whole(step[0]):
            raise TypeError(
                f"step {number} is {repr(step)[:60]}; expected (end, value), the end a whole number"
            )
        steps.append((int(step[0]), _number(step[1], f"value of step {number}")))
    tokens = None
    if reward.token_rewards is not None:
        values = enumerate(reward.token_rewards)
        tokens = tuple(_number(value, f"reward of token {i}") for i, value in values)
    return Reward(reward.score, reward.parts, tuple(steps), reward.steps_in, tokens)


def check_steps(reward: Reward, sample: Sample) -> Reward:
    """Return the reward unchanged if its steps, or its rewards of tokens, fit the sample.

    Raises:
        ValueError: ends do not ascend, or lie outside of the response; or there is not one number
            for each token.
    """
    if reward.token_rewards is not None and len(reward.token_rewards) != sample.num_response_tokens:
        raise ValueError(
            f"returned {len(reward.token_rewards)} token_rewards for a response of "
            f"{sample.num_response_tokens} tokens; expected one for each"
        )
    in_tokens = reward.steps_in == "tokens"
    length = sample.num_response_tokens if in_tokens else len(sample.response_text)
    before = 0
    for number, (end, _) in enumerate(reward.steps):
        if not before < end <= length:
            raise ValueError(
                f"step {number} ends after {end} {reward.steps_in}; expected more than the "
                f"{before} of the step before, and at most the {length} of the response"
            )
        before = end
    return reward


def placed(reward: Reward, sample: Sample, decode: Decode | None) -> StepRewards | None:
    """Return the rewards of the steps of a sample, at tokens that the policy wrote; None if there
    are none.

    A step counts at the token that completes its last character. If an environment wrote this
    token, it counts at the last token before that the policy wrote.

    Args:
        reward: reward whose steps `check_steps` has checked.
        decode: function with which the text of the response was made; needed for characters.

    Raises:
        ValueError: the policy wrote nothing before the end of a step, or the text is not what the
            tokens decode to.
    """
    if reward.token_rewards is not None:
        steps = list(enumerate(reward.token_rewards, start=1))
        return StepRewards.of(_written(sample.completion.versions, steps, whole=False))
    if not reward.steps:
        return None
    ends, values = [end for end, _ in reward.steps], [value for _, value in reward.steps]
    if reward.steps_in == "characters":
        if decode is None:
            raise ValueError("steps in characters need the tokenizer of the policy")
        tokens = sample.completion.tokens
        ends = token_ends(tokens, sample.response_text, ends, decode)
    steps = list(zip(ends, values, strict=True))
    return StepRewards.of(_written(sample.completion.versions, steps, whole=True))


def token_ends(tokens: Sequence[int], text: str, ends: Sequence[int], decode: Decode) -> list[int]:
    """Return, for each number of characters, the smallest number of tokens that show so many.

    Tokens show a character when all of its bytes are there. Only the tokens of a step are decoded,
    with a few before them, as long as that gives the text; otherwise all tokens from the beginning.

    Args:
        tokens: ids of all tokens of the response.
        text: what `decode` makes of all tokens, or the beginning of that.
        ends: numbers of characters, ascending, from 1 to the length of the text.

    Raises:
        ValueError: the tokens do not show so many characters of the text.
    """
    reader, found = _Reader(tokens, text, decode), [0]
    for end in ends:
        count = reader.search(end, found[-1])
        if count is None:
            reader = _Reader(tokens, text, decode)
            count = reader.search(end, found[-1])
        if count is None:
            raise ValueError(
                f"the {len(tokens)} tokens do not show the first {end} characters of the text; "
                "give the ends of steps in tokens (steps_in='tokens')"
            )
        found.append(count)
        reader.begin_after(count)
    return found[1:]


class _Reader:
    """Reader of how many characters of a text its first tokens show, from a known place on."""

    def __init__(self, tokens: Sequence[int], text: str, decode: Decode) -> None:
        """Begin at the first token; `text` is what `decode` makes of all tokens, or its
        beginning."""
        self._tokens, self._text, self._decode = tokens, text, decode
        self._base, self._known, self._before = 0, 0, ""

    def shown(self, count: int) -> int:
        """Return how many leading characters of the text the first `count` tokens show, which are
        not fewer than the known ones."""
        piece = self._piece(count)
        if self._text.startswith(piece, self._known):
            return self._known + len(piece)
        pairs = zip(piece, self._text[self._known :], strict=False)
        return self._known + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def search(self, end: int, low: int) -> int | None:
        """Return the smallest number of tokens, at least `low`, that show `end` characters; None if
        all tokens do not."""
        size = len(self._tokens)
        if self.shown(low) >= end:
            return low
        high = low + 1 + (end - self._known) * size // max(1, len(self._text))
        while self.shown(min(high, size)) < end:
            if high >= size:
                return None
            low, high = high, high + 2 * (high - low)
        return bisect_left(range(min(high, size)), end, lo=low, key=self.shown)

    def begin_after(self, count: int) -> None:
        """Decode from token `count` on from now on, if the tokens before it show whole characters
        of the text and nothing else."""
        piece = self._piece(count)
        if count > self._base and self._text.startswith(piece, self._known):
            self._base, self._known = count, self._known + len(piece)
            self._before = self._decode(self._tokens[max(0, count - CONTEXT) : count])

    def _piece(self, count: int) -> str:
        """Return the text of the tokens from the known place up to `count`; empty if the tokenizer
        writes the tokens before it differently."""
        whole = self._decode(self._tokens[max(0, self._base - CONTEXT) : count])
        return whole[len(self._before) :] if whole.startswith(self._before) else ""


def _written(
    versions: VersionRuns, steps: Sequence[tuple[int, float]], *, whole: bool
) -> list[tuple[int, float]]:
    """Return steps whose ends are tokens that the policy wrote.

    Args:
        whole: True to move a step back to the last such token before its end; False to leave out
            the others.

    Raises:
        ValueError: the policy wrote nothing before the end of a step.
    """
    runs = versions.runs
    if all(version != NOBODY for version, _ in runs):
        return list(steps)
    last: list[int] = []  # of each token, the number of tokens up to the last one that was written
    found = 0
    for version, count in runs:
        start = len(last)
        last += [found] * count if version == NOBODY else range(start + 1, start + count + 1)
        found = last[-1]
    if not whole:
        return [(end, value) for end, value in steps if last[end - 1] == end]
    if steps and not last[steps[0][0] - 1]:
        raise ValueError(
            f"step 0 ends after {steps[0][0]} tokens, of which the policy wrote none; begin with "
            "its first turn"
        )
    return [(last[end - 1], value) for end, value in steps]


def _whole(value: Any) -> bool:
    """Return whether a value is a whole number; true and false are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(value: Any, what: str) -> float:
    """Return a finite float; TypeError or ValueError, which begin with `what`, for anything
    else."""
    if not isinstance(value, Real) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(f"{what} must be a number, found {type(value).__name__}")
    return require_reward(float(value), what)
