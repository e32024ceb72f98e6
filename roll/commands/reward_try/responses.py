"""Responses for `roll reward try`: from a file, or made of the rows' answers; and their labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from roll.core.completion import Completion, FinishReason
from roll.core.errors import DataError
from roll.core.types import Prompt, Sample
from roll.data.chat.templates import PromptTokenizer
from roll.data.columns import RawRow
from roll.data.readers import read_jsonl

OWN, OTHER, NOTHING = "its own answer", "another row's answer", "an empty response"
"""Kinds of made responses."""


@dataclass(frozen=True, slots=True)
class Response:
    """A response to a row, to be scored."""

    sample: Sample
    kind: str = ""
    """Kind of a made response; empty for one from a file."""
    label: float | None = None
    """Score that people gave it, in 0..1; None if it has none."""


def made_responses(
    prompts: Sequence[Prompt], others: Sequence[Prompt], tokenizer: PromptTokenizer
) -> list[Response]:
    """Return the responses that a verifier should tell apart: for each row its own answer, the
    answer of another row that has another one, and an empty text.

    A row without an answer, or for which no other answer is found, has fewer.

    Args:
        prompts: rows to make responses to.
        others: rows whose answers serve as wrong ones.
        tokenizer: tokenizer that counts the tokens of the responses.
    """
    made = []
    for place, prompt in enumerate(prompts):
        later = [*others[place + 1 :], *others[:place]]
        wrong = (one.answer for one in later if one.answer.strip() != prompt.answer.strip())
        texts = {OWN: prompt.answer, OTHER: next(wrong, ""), NOTHING: ""}
        kept = {kind: text for kind, text in texts.items() if text.strip() or kind == NOTHING}
        for number, (kind, text) in enumerate(kept.items()):
            made.append(Response(_sample(prompt, number, text, tokenizer), kind))
    return made


def read_responses(
    path: Path, prompts: Sequence[Prompt], tokenizer: PromptTokenizer, rows: int | None = None
) -> list[Response]:
    """Return the responses in the first `rows` lines (None: all) of a JSONL file, such as one of
    `rollouts/`.

    A line has `response` (a text) or `responses` (a list of texts), and may have `id` (of a sample
    or of a row), `label` or `labels`, and `finish_reason`. Without ids the lines belong to the rows
    in their order.

    Raises:
        DataError: the file cannot be read, a line has another form, or its row is unknown.
    """
    lines = _lines(path)[:rows]
    with_id = [line for line in lines if "id" in line.values]
    if with_id and len(with_id) < len(lines):
        bare = next(line for line in lines if "id" not in line.values)
        raise DataError(
            f"{bare.place}: has no `id`, but others have; give all of them one, or none"
        )
    if not with_id and len({prompt.source for prompt in prompts}) > 1:
        raise DataError(
            f"{path}: the run has several sources; give each line the `id` of its row, "
            f"<source>:<row>, such as {prompts[0].id!r}"
        )
    if not with_id and len(lines) > len(prompts):
        raise DataError(f"{path}: has {len(lines)} lines, but the run has {len(prompts)} rows")
    by_id = {prompt.id: prompt for prompt in prompts}
    found: list[Response] = []
    numbers: dict[str, count[int]] = {}
    for place, line in enumerate(lines):
        prompt = _prompt_of(line, by_id) if with_id else prompts[place]
        texts, labels = _texts(line), _labels(line)
        if labels and len(labels) != len(texts):
            raise DataError(f"{line.place}: {len(texts)} responses and {len(labels)} labels")
        number = numbers.setdefault(prompt.id, count())
        for at, text in enumerate(texts):
            sample = _sample(prompt, next(number), text, tokenizer, truncated=_truncated(line))
            found.append(Response(sample, label=labels[at] if labels else None))
    return found


def rows_needed(path: Path, rows: int | None = None) -> int:
    """Return how many first rows of each source must be read, so that every response has its row.

    Args:
        path: JSONL file of responses, see `read_responses`.
        rows: number of its lines that count; None: all.

    Raises:
        DataError: the file cannot be read, or has no lines.
    """
    lines = _lines(path)[:rows]
    numbers = [_row_of(str(line.values.get("id", "")))[1] for line in lines]
    return max(len(lines), 1 + max(numbers))


def with_labels(
    responses: Sequence[Response], path: Path, rows: int | None = None
) -> list[Response]:
    """Return the responses with the labels in the first `rows` lines (None: all) of a JSONL file.
    They have `label`, or `labels`, in the order of the responses.

    Raises:
        DataError: the file cannot be read, or has another number of labels.
    """
    labels = [label for line in _lines(path)[:rows] for label in _labels(line, needed=True)]
    if len(labels) != len(responses):
        raise DataError(
            f"{path}: has {len(labels)} labels for {len(responses)} responses; one is needed for "
            "each, in their order"
        )
    return [replace(one, label=label) for one, label in zip(responses, labels, strict=True)]


def _lines(path: Path) -> list[RawRow]:
    """Return the lines of a JSONL file; DataError if there is none."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected one JSON object in each line")
    lines = list(read_jsonl(path))
    if not lines:
        raise DataError(f"{path}: has no lines; expected one JSON object in each")
    return lines


def _texts(line: RawRow) -> list[str]:
    """Return the responses of a line; DataError if it has none."""
    found = line.values.get("responses", [line.values.get("response")])
    if not isinstance(found, list) or not found or not all(isinstance(t, str) for t in found):
        raise DataError(
            f"{line.place}: needs `response` (a text) or `responses` (a list of texts); found "
            f"{sorted(line.values)}"
        )
    return found


def _labels(line: RawRow, *, needed: bool = False) -> list[float]:
    """Return the labels of a line; DataError if one is no number in 0..1 and no bool, or if there
    is none but one is needed."""
    values: Mapping[str, Any] = line.values
    found = values.get("labels", [values["label"]] if values.get("label") is not None else [])
    if not isinstance(found, list) or (needed and not found):
        raise DataError(f"{line.place}: needs `label` or `labels`; found {sorted(values)}")
    for label in found:
        if not isinstance(label, bool | int | float) or not 0 <= label <= 1 or math.isnan(label):
            raise DataError(
                f"{line.place}: label {label!r:.40} must be true, false or a number from 0 to 1"
            )
    return [float(label) for label in found]


def _truncated(line: RawRow) -> bool:
    """Return whether the line says that the response ended at the length limit."""
    return line.values.get("finish_reason") == FinishReason.LENGTH.value


def _row_of(name: str) -> tuple[str, int]:
    """Return source and number of the row in the id of a row, `<source>:<row>`, or of a sample,
    `<step>/<source>:<row>/<sibling>`; -1 if there is no number."""
    parts = name.split("/")
    row = next((part for part in reversed(parts) if ":" in part), "").partition("+")[0]
    source, _, number = row.rpartition(":")
    return source, int(number) if number.isascii() and number.isdecimal() else -1


def _prompt_of(line: RawRow, by_id: Mapping[str, Prompt]) -> Prompt:
    """Return the row that the `id` of a line names; DataError if it is unknown."""
    name = str(line.values["id"])
    source, number = _row_of(name)
    found = by_id.get(name) or by_id.get(f"{source}:{number}")
    if found is None:
        sources = sorted({prompt.source for prompt in by_id.values()})
        raise DataError(
            f"{line.place}: `id` {name!r} names no row of the run; expected <source>:<row> or the "
            f"id of a sample (sources: {', '.join(sources)})"
        )
    return found


def _sample(
    prompt: Prompt, number: int, text: str, tokenizer: PromptTokenizer, *, truncated: bool = False
) -> Sample:
    """Return the response `text` to a row as a sample, with the tokens of the text and log-probs of
    0. `number` is that of the response among those to the row."""
    [tokens] = tokenizer([text], add_special_tokens=False)["input_ids"]
    finish = FinishReason.LENGTH if truncated else FinishReason.STOP
    done = Completion.of(tokens, [0.0] * len(tokens), [0] * len(tokens), finish)
    group = f"0/{prompt.id}"
    return Sample(f"{group}/{number}", group, prompt, done, text)
