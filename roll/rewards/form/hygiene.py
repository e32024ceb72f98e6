r"""The `hygiene` reward: rules against tricks that a policy learns when other rewards miss them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

from roll.core.errors import ConfigError
from roll.core.types import Sample
from roll.rewards.api import Reward
from roll.rewards.form.scripts import scripts_of
from roll.rewards.thinking import CHANNEL_TOKENS, MARK_TOKENS, final_text

Rule = Literal[
    "language_mixing",
    "repeated_boxes",
    "text_after_end",
    "empty_thoughts",
    "marks_in_answer",
    "tool_syntax",
]

COMMON_SCRIPTS = frozenset({"Latin", "Greek"})
"""Scripts of formulas and code, which any text may have."""
MAX_TAIL_CHARS = 200
"""Largest length of the text after the last box, in characters."""

_BOX = re.compile(r"\\(?:boxed|fbox)\b")
_TURNS = re.compile(
    r"<\|(?:im_start|im_end|endoftext|end_of_text|eot_id|start_header_id|user|assistant|system)\|>"
    r"|<(?:start|end)_of_turn>|\[/?INST\]|</s>|<eos>"
    r"|^[ \t]*(?:\*\*)?(?:Human|User|Assistant|System)(?:\*\*)?[ \t]*:",
    re.MULTILINE,
)
_TOOLS = re.compile(
    r"</?(?:tool_call|tool_calls|tool_response|tools|function_call|function_calls|function|invoke"
    r"|parameter)\b[^<>\n]{0,100}>|<function=|<\|(?:python_tag|tool_call|tool_calls|plugin)\b"
    r"|\[TOOL_CALLS\]|```[ \t]*tool_(?:code|call|output)\b"
    r"|[\"']name[\"'][ \t]*:[ \t]*[\"'][\w.-]{1,80}[\"'][ \t]*,\s{0,20}"
    r"[\"'](?:arguments|parameters)[\"'][ \t]*:",
    re.IGNORECASE,
)
_MARK = re.compile("|".join(map(re.escape, (*MARK_TOKENS, *CHANNEL_TOKENS))), re.IGNORECASE)


def hygiene_reward(
    sample: Sample,
    *,
    rules: tuple[Rule, ...],
    scripts: tuple[str, ...] = (),
) -> Reward:
    r"""Return 0 if a response keeps the rules that are named, else minus the share that it breaks.

    Add it to any other reward of the same tags; `weight` says how much it counts. The rules:

    * `language_mixing`: the response, with its thoughts, has a letter of a script that neither the
      prompt nor `scripts` has. Latin and Greek are always allowed, for formulas and code. Languages
      of one script are not told apart (see `format` with `language`).
    * `repeated_boxes`: the answer has more than one `\boxed{...}`.
    * `text_after_end`: text follows `</answer>` or a mark or word that begins another turn
      (`<|im_start|>`, `User:`), or more than 200 characters follow the last box.
    * `empty_thoughts`: a thought is begun or ended, and has no word. A response without any thought
      breaks no rule; `format` with `tags` asks for one.
    * `marks_in_answer`: the text after the thoughts has a mark of thoughts, such as `<think>`.
    * `tool_syntax`: the text after the thoughts has a call of a tool, in one of the usual forms.

    A thought that does not end breaks `empty_thoughts` only if it has no word; the other rules of
    the answer then look at nothing.

    Args:
        sample: sample to score.
        rules: names of the rules.
        scripts: scripts that `language_mixing` also allows, by the first word of their Unicode
            names: `Cyrillic`, `Arabic`, `Hangul`; `Han` is Chinese and Japanese.

    Parts: for each rule 1 if it is broken, else 0.
    """
    final = final_text(sample.response_text, prompt=sample.prompt.text)
    broken: dict[str, bool] = {}
    for rule in rules:
        if rule == "language_mixing":
            broken[rule] = _mixes(sample, frozenset(scripts))
        elif rule == "empty_thoughts":
            broken[rule] = _thought_is_empty(sample, final)
        else:
            broken[rule] = final is not None and _OF_ANSWERS[rule](final)
    parts = {rule: float(is_broken) for rule, is_broken in broken.items()}
    return Reward(0.0 - sum(parts.values()) / max(1, len(parts)), parts)


def _mixes(sample: Sample, scripts: frozenset[str]) -> bool:
    """Return whether a response has letters of a script that is neither common, nor in `scripts`,
    nor in the prompt."""
    allowed = COMMON_SCRIPTS | scripts | scripts_of(sample.prompt.text).keys()
    return bool(scripts_of(sample.response_text).keys() - allowed)


def _thought_is_empty(sample: Sample, final: str | None) -> bool:
    """Return whether a response has the marks of a thought but no word in it."""
    response = sample.response_text
    if final is None:
        thought = response
    elif final == response:
        return False
    else:
        # What stands before the answer; an answer may be cut at its end too.
        place = response.rfind(final) if final else len(response)
        if place < 0:
            return False
        thought = response[:place]
    return not re.search(r"\w", _MARK.sub("", thought))


def _repeats_boxes(final: str) -> bool:
    return len(_BOX.findall(final)) > 1


def _goes_on(final: str) -> bool:
    """Return whether an answer does not end where it should.

    Text follows `</answer>` or the begin of another turn, or too long a text follows the last box.
    """
    end = final.rfind("</answer>")
    if end >= 0 and final[end + len("</answer>") :].strip():
        return True
    boxes = [match.start() for match in _BOX.finditer(final)]
    if boxes:
        # The length of the box itself does not count, up to its closing brace on the same line.
        line_end = final.find("\n", boxes[-1])
        tail = "" if line_end < 0 else final[line_end:].strip()
        rest = final[boxes[-1] : line_end if line_end >= 0 else len(final)]
        after_brace = rest.rpartition("}")[2]
        if len(after_brace) + len(tail) > MAX_TAIL_CHARS:
            return True
    turn = _TURNS.search(final)
    return turn is not None and bool(final[turn.end() :].strip())


def _has_marks(final: str) -> bool:
    return bool(_MARK.search(final))


def _calls_tools(final: str) -> bool:
    return bool(_TOOLS.search(final))


_OF_ANSWERS: Mapping[str, Callable[[str], bool]] = {
    "repeated_boxes": _repeats_boxes,
    "text_after_end": _goes_on,
    "marks_in_answer": _has_marks,
    "tool_syntax": _calls_tools,
}
"""Rules that look at the text after the thoughts only."""


def check_hygiene(rules: tuple[Rule, ...] = (), scripts: tuple[str, ...] = (), **_: object) -> None:
    """Raise ConfigError if no rule is named, one twice, or scripts without the rule that reads
    them."""
    if not rules or len(set(rules)) < len(rules):
        raise ConfigError(f"rules is {list(rules)}; name at least one rule, each once")
    if scripts and "language_mixing" not in rules:
        raise ConfigError("scripts concerns the rule language_mixing; add it, or drop scripts")
