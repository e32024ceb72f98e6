"""The `ifeval` reward: does a response follow the instructions of its row?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

from roll.config.errors import nearest
from roll.core.errors import DataError
from roll.core.types import Sample
from roll.rewards.api import Reward
from roll.rewards.instructions.arguments import arguments_of, list_of
from roll.rewards.instructions.checkers import CHECKERS
from roll.rewards.instructions.hardening import HARDENED
from roll.rewards.instructions.sentences import sentences
from roll.rewards.languages import language_of
from roll.rewards.thinking import final_text

Check = Callable[[str], bool]


def ifeval_reward(
    sample: Sample,
    *,
    mode: Literal["strict", "loose"] = "strict",
    score: Literal["all", "share"] = "all",
    hardened: bool = False,
    ids: str = "instruction_id_list",
    arguments: str = "kwargs",
) -> Reward:
    """Return 1 if the response follows all instructions, or the share that it follows, else 0.

    The checks are those of IFEval (`roll.rewards.instructions.checkers`). `strict` looks at the
    response itself. `loose` is content if an instruction is followed by the response, by the
    response without its first line, its last line or both, or by one of these four without
    asterisks. An empty response follows nothing, and neither does a thought that does not end. Text
    before the end of the thoughts is not looked at.

    The row says which instructions there are, in the columns of google/IFEval: a list of ids and a
    list of arguments. Both may be JSON texts. If the row lacks these columns, the answer must be a
    JSON object that has them.

    Args:
        sample: sample to score.
        mode: `strict` or `loose`, see above.
        score: `all`: 1 only if all instructions are followed; `share`: the share that is followed.
        hardened: also refuse what follows the letter of an instruction only; see
            `roll.rewards.instructions.hardening`. The score is then not IFEval's.
        ids: column with the list of ids.
        arguments: column with the list of arguments, one mapping for each id.

    Parts: `all` and `share`, and for each id of the row the share of its instructions that are
    followed.

    Raises:
        DataError: the row names no instruction, an unknown one, or wrong arguments.
    """
    checks = list(_checks(sample, ids, arguments, hardened))
    final = final_text(sample.response_text, prompt=sample.prompt.text)
    if final is None:
        texts = []
    else:
        # What a thought leaves behind is no empty paragraph of the answer.
        answer = final if final == sample.response_text else final.lstrip()
        texts = [answer] if mode == "strict" else variants(answer)
    texts = [text for text in texts if text.strip()]
    by_id: dict[str, list[bool]] = {}
    for name, check in checks:
        by_id.setdefault(name, []).append(any(check(text) for text in texts))
    followed = [each for several in by_id.values() for each in several]
    parts = {name: sum(several) / len(several) for name, several in by_id.items()}
    parts |= {"all": float(all(followed)), "share": sum(followed) / len(followed)}
    return Reward(parts[score], parts)


def variants(response: str) -> list[str]:
    """Return the eight texts of the loose mode, without those that occur twice."""
    lines = response.split("\n")
    cut = [response] + ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return list(dict.fromkeys([*cut, *(text.replace("*", "") for text in cut)]))


def start_ifeval() -> None:
    """Load the models of sentences and languages (a second).

    Raises:
        ConfigError: a package is missing.
    """
    next(sentences("One."))
    language_of("One.")


def _checks(
    sample: Sample, ids: str, arguments: str, hardened: bool
) -> Iterator[tuple[str, Check]]:
    """Yield id and check of each instruction of the row, with its arguments bound.

    DataError if there are none, or if an id or its arguments are wrong.
    """
    row = _columns(sample, ids, arguments)
    where = f"row {sample.prompt.id}"
    try:
        names = list_of(row[ids])
        given = list_of(row.get(arguments) or [None] * len(names))
    except ValueError as error:
        raise DataError(f"{where}: columns {ids!r} and {arguments!r}: {error}") from None
    if not names or len(names) != len(given):
        raise DataError(
            f"{where}: {len(names)} ids in {ids!r} and {len(given)} arguments in {arguments!r}; "
            "expected at least one, and as many of one as of the other"
        )
    for name, values in zip(names, given, strict=True):
        if name not in CHECKERS:
            raise DataError(f"{where}: unknown instruction {name!r}{nearest(str(name), CHECKERS)}")
        try:
            bound = arguments_of(name, values, CHECKERS[name].arguments)
        except ValueError as error:
            raise DataError(f"{where}: {error}") from None
        yield name, partial(_follows, name, bound, hardened)


def _follows(name: str, arguments: Mapping[str, Any], hardened: bool, text: str) -> bool:
    """Return whether a text follows the instruction `name`, and with `hardened` its further
    condition."""
    if hardened and name in HARDENED and not HARDENED[name](text, **arguments):
        return False
    return CHECKERS[name].follows(text, **arguments)


def _columns(sample: Sample, ids: str, arguments: str) -> Mapping[str, Any]:
    """Return the columns of the instructions, from the row or from its answer; DataError if neither
    has them."""
    if ids in sample.extra:
        return sample.extra
    try:
        row = json.loads(sample.answer)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or ids not in row:
        raise DataError(
            f"row {sample.prompt.id}: has no column {ids!r} with the ids of instructions, and its "
            f"answer is no JSON object with the keys {ids!r} and {arguments!r}; name the column in "
            "`kwargs: {ids: ..., arguments: ...}`"
        )
    return row
