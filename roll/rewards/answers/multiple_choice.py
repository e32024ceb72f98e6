"""The `multiple_choice` reward: does a response choose the right option?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from roll.core.errors import ConfigError, DataError
from roll.core.types import Sample
from roll.rewards.answers.letters import NOTHING, find_choice, letters_of
from roll.rewards.api import Reward
from roll.rewards.instructions.arguments import list_of
from roll.rewards.thinking import final_text

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def multiple_choice_reward(
    sample: Sample,
    *,
    choices: str = "choices",
    num_choices: int = 10,
    truth: Literal["letter", "text", "index"] = "letter",
) -> Reward:
    """Return 1 if the response chooses exactly the right option, or options, else 0.

    `roll.rewards.answers.letters.find_choice` has the rules. Who names further options is wrong.

    Args:
        sample: sample to score.
        choices: column with the texts of the options in the order of the letters: a list, the JSON
            text of one, or a mapping with the lists `label` and `text` as ARC has it. With it, the
            text of an option counts as its letter. A row may lack the column.
        num_choices: number of options of a row that lacks the column; 10 is A to J.
        truth: what the answer of the row is: a `letter` such as `C`, or several such as `A, C`; the
            `text` of an option, for options that were shuffled; or an `index` that counts from 0.

    Parts: `right`, the same value; `formatted`, 1 if the option was boxed; `answered`, 1 if any
    option was found.

    Without a right answer the score is 0.

    Raises:
        DataError: the right answer is none of the options, or the options cannot be read.
    """
    options = options_of(sample, choices, num_choices)
    wanted = _wanted(sample, options, truth)
    final = final_text(sample.response_text, prompt=sample.prompt.text)
    chosen = NOTHING
    if final is not None:
        chosen = find_choice(final, options, truncated=sample.truncated)
    right = float(bool(wanted) and chosen.letters == wanted)
    parts = {
        "right": right,
        "formatted": float(chosen.boxed),
        "answered": float(bool(chosen.letters)),
    }
    return Reward(right, parts)


def options_of(sample: Sample, choices: str, num_choices: int) -> Mapping[str, str]:
    """Return the texts of a row's options by capital letter, in order.

    `choices` is the column that has them. If the row lacks it, there are `num_choices` options with
    empty texts.

    Raises:
        DataError: the column is no list of at most 26 texts.
    """
    column: Any = sample.extra.get(choices)
    if column is None:
        return dict.fromkeys(ALPHABET[:num_choices], "")
    try:
        if isinstance(column, Mapping):
            column = column["text"]
        texts = [str(text) for text in list_of(column)]
    except (KeyError, ValueError) as error:
        raise DataError(
            f"row {sample.prompt.id}: column {choices!r} must be a list of options ({error!r})"
        ) from None
    if not 1 <= len(texts) <= len(ALPHABET):
        raise DataError(f"row {sample.prompt.id}: {len(texts)} options; expected 1 to 26")
    return dict(zip(ALPHABET, texts, strict=False))


def _wanted(sample: Sample, options: Mapping[str, str], truth: str) -> frozenset[str]:
    """Return the letters of the right options, none for an empty answer.

    Args:
        options: text of each option, by letter.
        truth: form of `sample.answer`: `letter`, `text`, or `index` from 0.

    Raises:
        DataError: the answer names no option, or is the text of several.
    """
    answer, wanted = sample.answer.strip(), frozenset[str]()
    if truth == "letter":
        wanted = letters_of(answer, options)
    elif truth == "text":
        wanted = frozenset(letter for letter, text in options.items() if text.strip() == answer)
    elif answer.isdecimal() and int(answer[:3]) < len(options):
        wanted = frozenset({ALPHABET[int(answer[:3])]})
    if (answer and not wanted) or (truth == "text" and len(wanted) > 1):
        raise DataError(
            f"row {sample.prompt.id}: the answer {answer!r:.60} is not the {truth} of one of the "
            f"{len(options)} options; set `truth` to letter, text or index"
        )
    return wanted


def check_multiple_choice(num_choices: int = 10, **_: object) -> None:
    """Raise ConfigError unless `num_choices` is 2 to 26, the number of letters."""
    if not 2 <= num_choices <= len(ALPHABET):
        raise ConfigError(f"num_choices is {num_choices}; expected 2 to {len(ALPHABET)}")
