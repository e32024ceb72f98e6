"""The `crossthink` reward: choice and free-form questions of any domain, answered in a box."""

from __future__ import annotations

import re
from typing import Literal

from roll.core.types import Sample
from roll.rewards.answers.letters import find_choice, letters_of
from roll.rewards.answers.multiple_choice import options_of
from roll.rewards.answers.spans import find_span
from roll.rewards.answers.squad import exact_match
from roll.rewards.api import Reward
from roll.rewards.thinking import final_text

_LETTERED = re.compile(r"\s*(?:\(([A-Z])\)|([A-Z])[).:](?=\s|$)|([A-Z])\s*$)\s*(.*)", re.DOTALL)


def crossthink_reward(
    sample: Sample,
    *,
    format: Literal["required", "ignored"] = "required",
    thoughts: bool = True,
    choices: str = "choices",
) -> Reward:
    r"""Return 1 if the answer is right and the response has its format, else 0.

    This is the rule of Nemotron-CrossThink (Akter et al. 2025, arXiv:2504.13941): accuracy and
    format must both be given. The format: thoughts that end and are not empty, then exactly one
    `\boxed{...}`, with the answer. The kind of a question is seen from its right answer. If it is a
    letter, `(C) text`, `C. text` or the text of one of the row's options, the question is one of
    choice, and the box must choose this option. Any other question is free-form, and the box must
    match the right answer exactly after SQuAD's normalisation.

    Args:
        sample: sample to score.
        format: `ignored` scores accuracy alone, and takes an answer without a box too.
        thoughts: False if the model writes no thoughts; then the format is only the box.
        choices: column with the options; a row may lack it.

    Parts: `right` and `formatted`, each for itself; `choice`, 1 for a question of choice.
    """
    final = final_text(sample.response_text, prompt=sample.prompt.text)
    options = options_of(sample, choices, 26)
    lettered = _LETTERED.fullmatch(sample.answer)
    truth = next((g for g in lettered.groups()[:3] if g), "") if lettered else ""
    wanted = letters_of(truth or sample.answer, options) if truth or any(options.values()) else None
    right = False
    if final is not None and wanted:
        # The text that follows the letter of the right answer may stand for it.
        if lettered and lettered[4].strip() and not options[truth]:
            options = dict(options) | {truth: lettered[4]}
        right = find_choice(final, options, truncated=sample.truncated).letters == wanted
    elif final is not None:
        span = find_span(final, "auto", truncated=sample.truncated)
        right = bool(span and span.text and exact_match(span.text, sample.answer))
    formatted = final is not None and final.count("\\boxed") == 1 and _has_box(final)
    if thoughts:
        formatted = formatted and _has_thought(sample, final or "")
    passed = right and (formatted or format == "ignored")
    parts = {"right": right, "formatted": formatted, "choice": bool(wanted)}
    return Reward(float(passed), {name: float(part) for name, part in parts.items()})


def _has_box(final: str) -> bool:
    """Return True if the text has a box that is not empty."""
    span = find_span(final, "box")
    return span is not None and bool(span.text.strip())


def _has_thought(sample: Sample, final: str) -> bool:
    """Return whether the response has a thought that is not empty apart from its marks."""
    before = sample.response_text[: len(sample.response_text) - len(final)]
    return bool(re.sub(r"<[^<>\n]{1,40}>|\[/?THINK\]|\W", "", before))
