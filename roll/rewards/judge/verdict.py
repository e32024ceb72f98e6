"""Reading of a judge's answer: strict, so that only the judge itself can give the verdict.

A judge may quote what it judges. So a verdict counts only where the judge was told to put it, and
an answer with two verdicts has none.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, assert_never

from roll.config.sections.services.judge import (
    ClassVerdictConfig,
    JsonVerdictConfig,
    NumberVerdictConfig,
    PreferenceVerdictConfig,
    RankingVerdictConfig,
    VerdictConfig,
)
from roll.core.errors import ConfigError
from roll.rewards.judge.question import Answer
from roll.rewards.judge.template import label
from roll.rewards.packages import optional_package
from roll.rewards.thinking import final_text

MAX_LISTED = 101
"""Largest number of whole numbers that a grammar lists one by one; more are a range."""
PATTERN_TIMEOUT_S = 1.0
"""Time limit of the regular expression of a class, in seconds."""
_NUMBER = re.compile(
    r"[*_#\s]*+(?:(?:final\s++)?(?:score|rating|grade|verdict)[*_\s]*+[:=])?[*_\s]*+"
    r"(-?\d++(?:\.\d++)?)(?:\s*+/\s*+(\d++(?:\.\d++)?))?[*_.\s]*+",
    re.IGNORECASE,
)
_BLOCK = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)


class UnreadableError(Exception):
    """Error: the answer of a judge has no verdict."""


@dataclass(frozen=True, slots=True)
class Form:
    """Form of an answer: what the judge is told, and the grammar that a server can enforce."""

    instruction: str
    """End of the message; empty if the user's template says it."""
    schema: dict[str, Any] | None = None
    """JSON schema of the answer; None if it is no JSON."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Decision of a judge about one sample."""

    score: float
    parts: dict[str, float] = field(default_factory=dict)


def form_of(config: VerdictConfig, size: int = 2) -> Form:
    """Return the form of an answer; `size` is the number of samples that are ranked."""
    match config:
        case JsonVerdictConfig():
            return _json_form(config)
        case NumberVerdictConfig():
            asked = f"a number from {config.low:g} to {config.high:g}"
            return Form(f'End your answer with one line that reads "Score: N", where N is {asked}.')
        case ClassVerdictConfig():
            return Form("")
        case PreferenceVerdictConfig():
            return _object_form(
                {"reason": {"type": "string"}, "better": {"enum": ["A", "B", "tie"]}},
                '"better": "A", "B" or "tie"',
            )
        case RankingVerdictConfig():
            labels = [label(place) for place in range(size)]
            ranking = {
                "type": "array",
                "items": {"enum": labels},
                "minItems": size,
                "maxItems": size,
            }
            return _object_form(
                {"reason": {"type": "string"}, "ranking": ranking},
                f'"ranking": the names {", ".join(labels)} in a list, each once, best first',
            )
    assert_never(config)


def read_score(config: VerdictConfig, answer: Answer) -> Verdict:
    """Return the verdict on one sample.

    Raises:
        UnreadableError: the answer was cut off, has no verdict, several, or one out of range.
    """
    text = _final(answer)
    match config:
        case JsonVerdictConfig():
            return _read_json(config, text)
        case NumberVerdictConfig():
            return Verdict(_scaled(config, _read_number(config, text)))
        case ClassVerdictConfig():
            return Verdict(_read_class(config, text))
    raise ValueError(f"a {config.kind} is no verdict on one sample")


def read_preference(answer: Answer) -> float:
    """Return the share of the comparison that the first sample wins: 1, 0.5 (a tie) or 0;
    UnreadableError as of `read_score`."""
    found = _object(_final(answer), {"reason", "better"})["better"]
    wins = {"A": 1.0, "tie": 0.5, "B": 0.0}
    if not isinstance(found, str) or found not in wins:
        raise UnreadableError(f'"better" is {found!r:.60}; expected "A", "B" or "tie"')
    return wins[found]


def read_ranking(answer: Answer, size: int) -> list[float]:
    """Return the score of each of `size` samples, in the order of the message: from 1 for the best
    to 0 for the worst; UnreadableError as of `read_score`."""
    found = _object(_final(answer), {"reason", "ranking"})["ranking"]
    labels = [label(place) for place in range(size)]
    if not isinstance(found, list) or sorted(map(repr, found)) != sorted(map(repr, labels)):
        raise UnreadableError(f'"ranking" is {found!r:.80}; expected each of {labels} once')
    return [1 - found.index(one) / (size - 1) for one in labels]


def check_verdict(config: VerdictConfig) -> None:
    """Raise ConfigError if the regular expression of a class is not valid, or its package is
    missing."""
    if isinstance(config, ClassVerdictConfig):
        regex = optional_package("regex", "regex", "class of a judge is read")
        try:
            compiled = regex.compile(config.pattern)
        except regex.error as error:
            raise ConfigError(f"verdict.pattern: {error}") from None
        if compiled.groups != 1:
            raise ConfigError(
                f"verdict.pattern: has {compiled.groups} groups; expected one, around the class"
            )
        if len({name.casefold() for name in config.scores}) < len(config.scores):
            raise ConfigError("verdict.scores: two classes differ only in upper and lower case")


def _json_form(config: JsonVerdictConfig) -> Form:
    """Return the form of a JSON verdict on one sample."""
    asked = f"a {'whole ' if config.integer else ''}number from {config.low:g} to {config.high:g}"
    number = _number_schema(config)
    fields: dict[str, Any] = {"reason": {"type": "string"}} if config.reason else {}
    fields |= dict.fromkeys(config.criteria, number)
    told = [f'"{name}": {asked}' for name in config.criteria]
    if config.classes is None:
        fields["score"] = number
        told.append(f'"score": {asked}')
    else:
        fields["verdict"] = {"enum": list(config.classes)}
        told.append(f'"verdict": one of {", ".join(map(json.dumps, config.classes))}')
    return _object_form(fields, ", ".join(told))


def _number_schema(config: JsonVerdictConfig) -> dict[str, Any]:
    """Return the JSON schema of a number in the range of the verdict."""
    if not config.integer:
        return {"type": "number", "minimum": config.low, "maximum": config.high}
    low, high = int(config.low), int(config.high)
    if high - low < MAX_LISTED:  # a list is known to every server, a range is not
        return {"enum": list(range(low, high + 1))}
    return {"type": "integer", "minimum": low, "maximum": high}


def _object_form(fields: dict[str, Any], told: str) -> Form:
    """Return the form of an answer that is one JSON object: what the judge is told, and the schema
    of all `fields`, each required."""
    reason = '"reason": a short text, ' if "reason" in fields else ""
    schema = {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }
    return Form(f"Answer with one JSON object and nothing else: {{{reason}{told}}}", schema)


def _final(answer: Answer) -> str:
    """Return the text of an answer after the judge's thoughts; UnreadableError if there is none."""
    if not answer.complete:
        raise UnreadableError(f"the answer was cut off: ...{answer.text[-60:]!r}")
    text = final_text(answer.text)
    if text is None or not text.strip():
        raise UnreadableError(f"the answer has no text after its thoughts: {answer.text[-60:]!r}")
    return text.strip()


def _object(text: str, keys: set[str]) -> dict[str, Any]:
    """Return the JSON object that is the whole text, or the whole of its only fenced block;
    UnreadableError unless it has exactly these keys."""
    block = _BLOCK.fullmatch(text)
    try:
        found = json.loads(block[1] if block else text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(
            f"the answer is not one JSON object ({error}): {text!r:.80}"
        ) from None
    if not isinstance(found, dict) or found.keys() != keys:
        raise UnreadableError(f"the answer is {text!r:.80}; expected an object with {sorted(keys)}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dictionary; ValueError if a key stands there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _read_json(config: JsonVerdictConfig, text: str) -> Verdict:
    """Read the JSON verdict on one sample; UnreadableError if it has not the form that was
    asked."""
    key = "score" if config.classes is None else "verdict"
    found = _object(text, {key, *config.criteria, *(("reason",) if config.reason else ())})
    parts = {name: _checked(config, found[name], name) for name in config.criteria}
    if config.classes is None:
        return Verdict(_scaled(config, _checked(config, found[key], key)), parts)
    if not isinstance(found[key], str) or found[key] not in config.classes:
        raise UnreadableError(f'"verdict" is {found[key]!r:.60}; expected {list(config.classes)}')
    return Verdict(config.classes[found[key]], parts)


def _checked(config: JsonVerdictConfig, value: Any, name: str) -> float:
    """Return a number of a JSON verdict; UnreadableError if it is none, or out of range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or (config.integer and value % 1):
        kind = "a whole number" if config.integer else "a number"
        raise UnreadableError(f'"{name}" is {value!r:.60}; expected {kind}')
    return _in_range(config, float(value), name)


def _read_number(config: NumberVerdictConfig, text: str) -> float:
    """Read the number in the last line of the answer; UnreadableError if it has none."""
    last = text.splitlines()[-1]
    found = _NUMBER.fullmatch(last)
    if found is None:
        raise UnreadableError(f'the last line is {last!r:.80}; expected "Score: N"')
    if found[2] is not None and float(found[2]) != config.high:
        raise UnreadableError(f"the last line is {last!r:.80}; expected a score of {config.high:g}")
    return _in_range(config, float(found[1]), "score")


def _in_range(config: JsonVerdictConfig | NumberVerdictConfig, value: float, name: str) -> float:
    """Return the value; UnreadableError, which names `name`, if it is out of the range."""
    if not config.low <= value <= config.high:
        raise UnreadableError(
            f'"{name}" is {value:g}; expected a number from {config.low:g} to {config.high:g}'
        )
    return value


def _scaled(config: JsonVerdictConfig | NumberVerdictConfig, value: float) -> float:
    """Return the value on a scale where `low` is 0 and `high` is 1."""
    return (value - config.low) / (config.high - config.low)


def _read_class(config: ClassVerdictConfig, text: str) -> float:
    """Return the score of the class that the regular expression finds.

    UnreadableError if it finds none, different ones or an unknown one, or takes too long.
    """
    regex = optional_package("regex", "regex", "class of a judge is read")
    try:
        places = regex.finditer(config.pattern, text, timeout=PATTERN_TIMEOUT_S)
        found = {(place[1] or "").strip().casefold() for place in places}
    except TimeoutError:
        raise UnreadableError(
            f"the pattern took more than {PATTERN_TIMEOUT_S:g} s on the answer"
        ) from None
    scores = {name.casefold(): score for name, score in config.scores.items()}
    known = found & scores.keys()
    if len(found) != 1 or not known:
        shown = sorted(found) or "nothing"
        raise UnreadableError(f"the pattern finds {shown!r:.80}; expected one of {list(scores)}")
    return scores[known.pop()]
