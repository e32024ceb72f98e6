"""The `qa` reward: is the short answer of a response one of the right ones?"""

from __future__ import annotations

import json
from typing import Literal

from roll.core.errors import ConfigError, DataError
from roll.core.types import Sample
from roll.rewards.answers.spans import Place, find_span
from roll.rewards.answers.squad import contains, exact_match, f1
from roll.rewards.api import Reward
from roll.rewards.instructions.arguments import list_of
from roll.rewards.thinking import final_text


def qa_reward(
    sample: Sample,
    *,
    metric: Literal["exact", "f1", "contains"] = "exact",
    place: Place = "auto",
    golds: str | None = None,
    max_words: int = 30,
) -> Reward:
    """Return the best score of the response's answer over all right answers, in 0..1.

    `roll.rewards.answers.spans.find_span` finds the answer; `roll.rewards.answers.squad` compares
    it with the rules of SQuAD, which search question answering (Natural Questions, HotpotQA) uses
    too.

    Args:
        sample: sample to score.
        metric: `exact`: 1 if equal when normalised; `f1`: overlap of words; `contains`: 1 if the
            right answer stands in the response's answer.
        place: where the answer stands: in a `tag` (`<answer>`), a `box`, after "answer:" on a
            `line`, or `all` of the text; `auto` tries these in this order.
        golds: column with the list of right answers (or its JSON text, or `{"text": [...]}` as
            SQuAD has it). If left out: the answer of the row, a text or the JSON text of a list.
        max_words: number of words of the longest answer that `contains` accepts.

    Parts: `exact` and `f1`; `found`, 1 if there was an answer at its place; `formatted`, 1 if a tag
    or a box marked it.

    Raises:
        DataError: the row has no right answer.
    """
    right = right_answers(sample, golds)
    final = final_text(sample.response_text, prompt=sample.prompt.text)
    span = None if final is None else find_span(final, place, truncated=sample.truncated)
    text = span.text if span else ""
    if not text and (span is None or any(gold.strip() for gold in right)):
        scores = {"exact": 0.0, "f1": 0.0, "contains": 0.0}
    else:
        scores = {
            "exact": max(exact_match(text, gold) for gold in right),
            "f1": max(f1(text, gold) for gold in right),
            "contains": max(contains(text, gold, max_words) for gold in right),
        }
    found = {"found": float(bool(text)), "formatted": float(bool(span and span.formatted))}
    return Reward(scores[metric], {"exact": scores["exact"], "f1": scores["f1"], **found})


def right_answers(sample: Sample, golds: str | None) -> list[str]:
    """Return the right answers of a row.

    They are in the column `golds`. None: they are in the answer, a text or the JSON text of a list.

    Raises:
        DataError: the column is missing, is no list of texts or is empty.
    """
    where = f"row {sample.prompt.id}"
    if golds is None:
        answer = sample.answer.strip()
        if not (answer.startswith('["') and answer.endswith('"]')):
            return [sample.answer]
        try:
            return [str(gold) for gold in json.loads(answer)]
        except ValueError:
            return [sample.answer]
    if golds not in sample.extra:
        raise DataError(f"{where}: has no column {golds!r}; name the right one in `golds`")
    column = sample.extra[golds]
    try:
        if isinstance(column, dict):
            column = column["text"]
        texts = [str(gold) for gold in list_of(column)]
    except (KeyError, ValueError) as error:
        raise DataError(f"{where}: column {golds!r} must be a list of texts ({error!r})") from None
    if not texts:
        raise DataError(f"{where}: column {golds!r} is empty; drop rows without a right answer")
    return texts


def check_qa(max_words: int = 30, **_: object) -> None:
    """Raise ConfigError unless `max_words` is at least 1."""
    if max_words < 1:
        raise ConfigError(f"max_words is {max_words}; expected at least 1")
