"""`JudgeScoring`: asks a judge about samples or groups, and makes rewards of its answers."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from roll.config.sections.reward import RewardConfig
from roll.config.sections.services.judge import (
    JudgedConfig,
    PreferenceVerdictConfig,
    RankingVerdictConfig,
)
from roll.core.errors import ConfigError
from roll.core.types import Sample
from roll.rewards.api import Reward
from roll.rewards.judge.cache import AnswerCache
from roll.rewards.judge.question import Answer, Judge, Question
from roll.rewards.judge.template import answer_of, template_of
from roll.rewards.judge.verdict import (
    Form,
    UnreadableError,
    Verdict,
    check_verdict,
    form_of,
    read_preference,
    read_ranking,
    read_score,
)

V = TypeVar("V")

NO_ANSWER = Reward(0.0, {"no_answer": 1.0})
"""Reward of a sample that has no text after its thoughts, or too long a one; nobody is asked."""


def check_judged(name: str, config: RewardConfig) -> None:
    """Raise ConfigError if the template or the verdict of a judged reward cannot work.

    Args:
        name: name of the reward.
        config: reward with a `judge`.
    """
    assert config.judge is not None
    try:
        template_of(config.judge.template, groups=config.per == "group")
        check_verdict(config.judge.verdict)
    except ConfigError as error:
        raise ConfigError(f"rewards.{name}.judge.{error}") from None


class JudgeScoring:
    """A reward that a judge decides. All methods run on the event loop of the judge."""

    def __init__(self, config: JudgedConfig, judge: Judge, *, groups: bool) -> None:
        """Prepare the reward, which `check_judged` has checked.

        Args:
            config: what is asked, and how answers are read.
            judge: model that answers.
            groups: True if the judge sees all samples of a prompt.
        """
        self._config = config
        self._judge = judge
        self._template = template_of(config.template, groups=groups)
        folder = None if config.cache is None else Path(config.cache).expanduser()
        self._cache = None if folder is None else AnswerCache(folder, judge.identity)

    async def score(self, sample: Sample) -> Reward:
        """Return the reward of one sample.

        Raises:
            UnreadableError: more than half of the answers could not be read.
            Exception: the judge gave no answer.
        """
        if not self._is_judged(sample):
            return NO_ANSWER
        verdict = self._config.verdict
        form = form_of(verdict)
        message = self._template.message(sample, form.instruction)
        poll = _Poll()
        read: list[Verdict] = await self._votes(
            poll, [message], form, lambda _, answer: read_score(verdict, answer)
        )
        names = read[0].parts
        parts = {name: fmean(one.parts[name] for one in read) for name in names}
        return Reward(fmean(one.score for one in read), parts | poll.parts())

    async def score_group(self, samples: Sequence[Sample]) -> list[Reward]:
        """Return the rewards of all samples of a prompt, in order; errors are those of `score`.

        Samples that are not judged score 0. Equal answers are judged once, and score the same.
        Nobody is asked about a single answer, such as that of the only episode that did not fail.
        """
        poll = _Poll()
        texts = [answer_of(sample).strip() if self._is_judged(sample) else "" for sample in samples]
        distinct = {text: one for text, one in zip(texts, samples, strict=True) if text}
        if len(distinct) > 1:
            ask = self._compare if self._config.verdict.kind == "preference" else self._rank
            found = await ask([*distinct.values()], poll)
        else:  # the only answer is better than none, and as good as itself
            found = [0.5 if all(texts) else 1.0] * len(distinct)
        scores = dict(zip(distinct, found, strict=True))
        parts = poll.parts(share=len(samples))
        return [
            Reward(scores[text], parts) if text else Reward(0.0, parts | NO_ANSWER.parts)
            for text in texts
        ]

    def _is_judged(self, sample: Sample) -> bool:
        """Return whether the sample has an answer that is not too long."""
        text, longest = answer_of(sample), self._config.longest_response
        return bool(text.strip()) and (longest is None or len(text) <= longest)

    async def _compare(self, samples: Sequence[Sample], poll: _Poll) -> list[float]:
        """Return the share of its comparisons that each sample wins, in 0..1.

        Comparisons that fail are left out.

        Raises:
            UnreadableError: more than half of them fail, or all of one sample.
            Exception: the error of the judge, if the only comparison fails.
        """
        verdict = self._config.verdict
        assert isinstance(verdict, PreferenceVerdictConfig)
        form = form_of(verdict)
        pairs = pairs_of(len(samples), verdict.opponents)

        async def first_wins(first: int, second: int) -> float:
            both = [samples[first], samples[second]]
            message = self._template.group_message(both, form.instruction)
            read = await self._votes(poll, [message], form, lambda _, one: read_preference(one))
            return fmean(read)

        async def share(first: int, second: int) -> float:
            if not verdict.both_orders:
                return await first_wins(first, second)
            there, back = await _all([first_wins(first, second), first_wins(second, first)])
            # A preference that turns with the order is one for a place, and not for a sample.
            agree = (there - 0.5) * (0.5 - back) > 0
            return (there + 1 - back) / 2 if agree else 0.5

        wins: dict[int, list[float]] = {place: [] for place in range(len(samples))}
        shares = await _done([share(*pair) for pair in pairs])
        for (first, second), found in zip(pairs, shares, strict=True):
            if not isinstance(found, Exception):
                wins[first].append(found)
                wins[second].append(1 - found)
        _require_half(shares, "comparisons")
        alone = [place for place, each in wins.items() if not each]
        if alone:
            raise UnreadableError(f"no comparison of sample {samples[alone[0]].id} can be read")
        return [fmean(each) for each in wins.values()]

    async def _rank(self, samples: Sequence[Sample], poll: _Poll) -> list[float]:
        """Return the mean score of each sample over the rankings; errors are those of `_votes`."""
        verdict, size = self._config.verdict, len(samples)
        assert isinstance(verdict, RankingVerdictConfig)
        form = form_of(verdict, size)
        orders = [_order(samples, vote) for vote in range(self._config.votes)]
        messages = [
            self._template.group_message([samples[place] for place in order], form.instruction)
            for order in orders
        ]

        def read(vote: int, answer: Answer) -> list[float]:
            found = dict(zip(orders[vote], read_ranking(answer, size), strict=True))
            return [found[place] for place in range(size)]

        rankings = await self._votes(poll, messages, form, read)
        return [fmean(ranking[place] for ranking in rankings) for place in range(size)]

    async def _votes(
        self, poll: _Poll, messages: Sequence[str], form: Form, read: Callable[[int, Answer], V]
    ) -> list[V]:
        """Ask for all votes at once; return those that can be read, at least half of them.

        Args:
            poll: gets what the answers took.
            messages: one message for each vote, or one for all.
            form: form of the answers.
            read: function that gets the number of a vote and its answer.

        Raises:
            UnreadableError: more than half of the votes cannot be read.
            Exception: the error of the judge, if the only vote fails.
        """
        questions = [
            Question(messages[vote % len(messages)], _seed(messages, vote), form.schema)
            for vote in range(self._config.votes)
        ]
        answers = await _done([self._ask(question) for question in questions])
        found: list[V | Exception] = []
        for vote, answer in enumerate(answers):
            if isinstance(answer, Exception):
                found.append(answer)
                continue
            try:
                found.append(read(vote, answer))
            except UnreadableError as error:
                found.append(error)
                poll.count(answer, readable=False)
                continue
            poll.count(answer, readable=True)
            if self._cache is not None and not answer.cached:
                await self._cache.put(questions[vote], answer)
        return _require_half(found, "votes")

    async def _ask(self, question: Question) -> Answer:
        """Return the answer to a question, from the cache if it is there."""
        kept = None if self._cache is None else await self._cache.get(question)
        return kept or await self._judge.ask(question)


class _Poll:
    """Count of what the answers to the questions about one sample or group took."""

    def __init__(self) -> None:
        self._answers: list[Answer] = []
        self._unread = 0

    def count(self, answer: Answer, *, readable: bool) -> None:
        """Add an answer; one from the cache took nothing."""
        free = replace(answer, input_tokens=0, output_tokens=0, cost=0.0, latency_s=0.0, tries=0)
        self._answers.append(free if answer.cached else answer)
        self._unread += not readable

    def parts(self, share: int = 1) -> dict[str, float]:
        """Return the parts to log, per sample of a group of `share`; what is not known is left
        out."""
        answers = self._answers
        if not answers:
            return {"no_answer": 0.0}
        columns: dict[str, list[float | None]] = {
            "cost": [one.cost for one in answers],
            "input_tokens": [one.input_tokens for one in answers],
            "output_tokens": [one.output_tokens for one in answers],
            "tries": [float(one.tries) for one in answers],
        }
        sums = {
            name: sum(known) / share
            for name, column in columns.items()
            if len(known := [value for value in column if value is not None]) == len(column)
        }
        return sums | {
            "no_answer": 0.0,
            "latency_s": fmean(one.latency_s for one in answers),
            "cached": fmean(one.cached for one in answers),
            "unread": self._unread / len(answers),
        }


def pairs_of(size: int, opponents: int | None) -> list[tuple[int, int]]:
    """Return the pairs of samples that are compared: all, or each sample with the next `opponents`
    ones, in a circle, no pair twice."""
    reach = size - 1 if opponents is None else min(opponents, size - 1)
    found = {
        tuple(sorted((first, (first + step) % size))): (first, (first + step) % size)
        for step in range(reach, 0, -1)
        for first in range(size)
    }
    return sorted(found.values())


async def _done(work: Sequence[Coroutine[Any, Any, V]]) -> list[V | Exception]:
    """Run all coroutines at once; return the result of each, or its exception."""
    found: list[V | Exception] = []
    for each in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(each, BaseException) and not isinstance(each, Exception):
            raise each
        found.append(each)
    return found


async def _all(work: Sequence[Coroutine[Any, Any, V]]) -> list[V]:
    """Run all coroutines at once; return the results, or raise the first exception."""
    good: list[V] = []
    for each in await _done(work):
        if isinstance(each, Exception):
            raise each
        good.append(each)
    return good


def _require_half(found: Sequence[V | Exception], what: str) -> list[V]:
    """Return the results among `found`; raise if they are less than half.

    The error is the exception itself if `found` has one item, else UnreadableError with the
    numbers. `what` is the plural noun in its message.
    """
    good = [each for each in found if not isinstance(each, Exception)]
    failed = [each for each in found if isinstance(each, Exception)]
    if 2 * len(good) >= len(found):
        return good
    if len(found) == 1:
        raise failed[-1]
    raise UnreadableError(
        f"{len(failed)} of {len(found)} {what} failed, the last one: "
        f"{type(failed[-1]).__name__}: {failed[-1]}"
    ) from failed[-1]


def _seed(messages: Sequence[str], vote: int) -> int:
    """Return a seed of 31 bits that depends on the question and the number of the vote alone."""
    text = f"{vote}/{messages[vote % len(messages)]}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1


def _order(samples: Sequence[Sample], vote: int) -> list[int]:
    """Return the order in which a vote sees the samples; it depends on their texts alone."""
    texts = "\0".join(sample.response_text for sample in samples)
    seed = hashlib.blake2b(f"{vote}/{texts}".encode(errors="replace"), digest_size=8).hexdigest()
    return random.Random(seed).sample(range(len(samples)), len(samples))
