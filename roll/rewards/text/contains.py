"""The `contains` reward: phrases that must, or must not, occur."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

from roll.core.errors import ConfigError
from roll.core.types import Sample
from roll.rewards.answers.qa import right_answers
from roll.rewards.api import Reward
from roll.rewards.form.scripts import WITHOUT_SPACES
from roll.rewards.text.references import final_of

_LETTER = rf"[^\W{WITHOUT_SPACES}]"
"""A character that makes a longer word of a word beside it."""
_WORD = re.compile(rf"(?=\w)[{WITHOUT_SPACES}]|[^\s{WITHOUT_SPACES}]+")


def contains_reward(
    sample: Sample,
    *,
    phrases: tuple[str, ...] = (),
    column: str | None = None,
    how: Literal["all", "any", "none", "share"] = "all",
    case: bool = False,
    whole_words: bool = True,
    max_words: int | None = None,
) -> Reward:
    """Return 1 if the phrases occur in the text after the thoughts as `how` says, else 0.

    Texts are compared in compatible form (NFKC), with one space for any white space. An empty text
    scores 0, also for `none`.

    Args:
        sample: sample to score.
        phrases: texts to look for, the same for all rows.
        column: column with the list of texts to look for; `phrases` must then be left out. If both
            are left out: the answer of the row, a text or the JSON text of a list.
        how: `all`, `any` or `none` of them must occur; `share` is the share that occurs.
        case: True: case counts.
        whole_words: False finds a phrase inside of words, too. Chinese, Japanese and Thai have no
            spaces between words, so that a phrase is found anywhere there.
        max_words: largest number of words of the text; a longer one, which may list everything,
            scores 0. A Chinese, Japanese or Thai character is a word.

    Parts: `share`, the share that occurs; `short`, 1 unless the text is too long.

    Raises:
        DataError: the column is missing, is no list of texts or is empty.
    """
    wanted = phrases or tuple(each for each in right_answers(sample, column) if each.strip())
    final = final_of(sample)
    text = _plain(final, case)
    found = [_occurs(_plain(phrase, case), text, whole_words) for phrase in wanted]
    share = sum(found) / len(found) if found else 0.0
    short = max_words is None or len(_WORD.findall(final)) <= max_words
    holds = {"all": share == 1.0, "any": share > 0, "none": share == 0.0}
    score = share if how == "share" else float(holds[how])
    parts = {"share": share, "short": float(short)}
    return Reward(score if text and found and short else 0.0, parts)


def _plain(text: str, case: bool) -> str:
    """Return a text as it is compared; with `case` False in small letters."""
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    return text if case else text.casefold()


def _occurs(phrase: str, text: str, whole_words: bool) -> bool:
    """Return whether a phrase stands in the text, with `whole_words` not inside of a word. Letters
    beside it are of another word where a script has no spaces."""
    if not whole_words:
        return phrase in text
    before = rf"(?<!{_LETTER})" if _ends_word(phrase[:1]) else ""
    after = rf"(?!{_LETTER})" if _ends_word(phrase[-1:]) else ""
    return bool(re.search(before + re.escape(phrase) + after, text))


def _ends_word(char: str) -> bool:
    """Return whether a character at the edge of a phrase must be the edge of a word."""
    return char.isalnum() and re.match(_LETTER, char) is not None


def check_contains(
    phrases: tuple[str, ...] = (),
    column: str | None = None,
    max_words: int | None = None,
    **_: object,
) -> None:
    """Raise ConfigError if there are two sources of phrases or an empty phrase, or if `max_words`
    is below 1."""
    if phrases and column is not None:
        raise ConfigError("give phrases or column, not both")
    if not all(phrase.strip() for phrase in phrases):
        raise ConfigError("phrases has an empty text")
    if max_words is not None and max_words < 1:
        raise ConfigError(f"max_words is {max_words}; expected at least 1")
