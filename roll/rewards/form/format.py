"""The `format` reward: tags, language and length of a response."""

from __future__ import annotations

import re
from typing import Literal

from roll.core.errors import ConfigError
from roll.core.types import Sample
from roll.rewards.api import Reward
from roll.rewards.form.tags import in_order_and_once
from roll.rewards.instructions.words import count_words
from roll.rewards.languages import detectors, is_in
from roll.rewards.thinking import final_text

_TAG = re.compile(r"[A-Za-z][\w:-]*")


def format_reward(
    sample: Sample,
    *,
    tags: tuple[str, ...] = (),
    text_between: bool = False,
    language: str | None = None,
    words: tuple[int, int] | None = None,
    score: Literal["all", "share"] = "all",
) -> Reward:
    """Return 1 if a response has the form that is asked for, else 0.

    At least one of the conditions must be given. An answer without a word has no form.

    Args:
        sample: sample to score.
        tags: names of tags of which the response must consist: in this order, each once, none in
            another and none empty. `[think, answer]` is `<think>...</think><answer>...</answer>`.
        text_between: True allows text outside of the tags.
        language: ISO 639-1 code of the language of the text after the thoughts, as langdetect names
            it; `zh` is both `zh-cn` and `zh-tw`. A text whose language cannot be told has the wrong
            one. Texts below ten words are often mistaken.
        words: smallest and largest number of words of the text after the thoughts.
        score: `all`: 1 only if all conditions hold; `share`: the share of conditions that hold.

    Parts: `tags`, `language` and `words`, for the conditions that are given.
    """
    final = final_text(sample.response_text, prompt=sample.prompt.text)
    answer = final if final is not None else ""
    has_words = count_words(answer)
    held: dict[str, bool] = {}
    if tags:
        held["tags"] = in_order_and_once(
            sample.response_text, tags, prompt=sample.prompt.text, text_between=text_between
        )
    if language is not None:
        held["language"] = has_words > 0 and is_in(answer, language)
    if words is not None:
        held["words"] = words[0] <= has_words <= words[1]
    parts = {name: float(holds) for name, holds in held.items()}
    share = sum(parts.values()) / max(1, len(parts)) if has_words else 0.0
    return Reward(share if score == "share" else float(bool(parts) and share == 1.0), parts)


def check_format(
    tags: tuple[str, ...] = (),
    language: str | None = None,
    words: tuple[int, int] | None = None,
    **_: object,
) -> None:
    """Raise ConfigError if no condition is given, or one that cannot hold; or without
    langdetect."""
    if not tags and language is None and words is None:
        raise ConfigError("give at least one of tags, language and words")
    for tag in tags:
        if not _TAG.fullmatch(tag):
            raise ConfigError(f"tags has {tag!r}; expected a name without brackets, such as think")
    if len(set(tags)) < len(tags):
        raise ConfigError(f"tags names {', '.join(tags)}; expected each once")
    if words is not None and not 0 <= words[0] <= words[1]:
        raise ConfigError(f"words is {list(words)}; expected [smallest, largest]")
    if language is not None:
        known = sorted(detectors().get_lang_list())
        if language not in known and language != "zh":
            raise ConfigError(f"language {language!r} is unknown (known: {', '.join(known)})")
