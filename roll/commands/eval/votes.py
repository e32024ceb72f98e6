"""The answer of a response that maj@k counts: the final answer of mathematics, or the letter of an
option."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from roll.config.evaluation import QuestionSet
from roll.core.types import Sample
from roll.rewards.answers.letters import find_choice
from roll.rewards.answers.multiple_choice import options_of
from roll.rewards.thinking import final_text
from roll.runtime.validator import answer_key

Vote = Callable[[Sample], str | None]
"""Function that returns the normalised answer of a response; None if there is none."""


def votes_of(questions: QuestionSet) -> Mapping[str, Vote]:
    """Return the function that finds answers for each tag whose responses have comparable ones:
    those that `math` or `multiple_choice` scores. Responses with other tags have no majority."""
    found: dict[str, Vote] = {}
    for reward in questions.rewards.values():
        for tag in reward.tags:
            if reward.fn == "math":
                found[tag] = partial(answer_key, math_tags=frozenset({tag}))
            elif reward.fn == "multiple_choice":
                kwargs = reward.kwargs
                found[tag] = partial(
                    chosen_letters,
                    choices=kwargs.get("choices", "choices"),
                    num_choices=kwargs.get("num_choices", 10),
                )
    return found


def chosen_letters(sample: Sample, *, choices: str, num_choices: int) -> str | None:
    """Return the letters of the options that a response chooses, in order; None if it chooses
    none. The arguments are those of the `multiple_choice` reward."""
    final = final_text(sample.response_text, prompt=sample.prompt.text)
    if final is None:
        return None
    options = options_of(sample, choices, num_choices)
    letters = find_choice(final, options, truncated=sample.truncated).letters
    return "".join(sorted(letters)) or None
