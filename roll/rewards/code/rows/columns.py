"""Rows of data sets as problems: which column has the cases, and in which form.

| data set | columns |
|---|---|
| LiveCodeBench | `public_test_cases`, `private_test_cases` (packed), `metadata` with `func_name` |
| APPS, TACO | `input_output`: `inputs`, `outputs` and perhaps `fn_name` |
| CodeContests | `public_tests`, `private_tests`, `generated_tests`: `input` and `output` |
| PRIME (Eurus-2) | `reward_model.ground_truth`, as `input_output` |
| DeepCoder | `tests`: as `input_output`, or a list of cases with `input`, `output` and `type` |
| SYNTHETIC-1 | `verification_info.test_cases`, the same list |
| HumanEval | `test`, `entry_point`, `prompt` |
| MBPP | `test_list`, `test_setup_code`, `test_imports` |
| KodCode | `test`, a pytest file |
| ROLL | `test_cases` and `case_type` |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roll.core.errors import DataError
from roll.core.types import Sample
from roll.rewards.code.rows.cases import Call, Calls, Checker, Problem, Suite, TextCase, Texts
from roll.rewards.code.rows.packing import unpack

Row = Mapping[str, Any]


def problem_of(sample: Sample, column: str | None = None) -> Problem:
    """Return the problem of a sample's row.

    Args:
        sample: sample whose prompt has the row's further columns.
        column: column with the cases; None: the first of the known ones that the row has, else the
            answer.

    Raises:
        DataError: there are no cases, or none that can be read; the message names the row.
    """
    row = sample.prompt.extra
    if column is not None and column not in row:
        known = ", ".join(sorted(row)) or "none"
        raise DataError(
            f"row {sample.prompt.id}: has no column {column!r} with cases (columns: {known})"
        )
    try:
        if column is not None:
            return _by_content(row[column], row)
        for names, read in _LAYOUTS:
            if all(_has(row, name) for name in names):
                return read(row)
        if sample.answer.strip():
            return _by_content(sample.answer, row)
        raise ValueError(
            "no column with cases is known, and there is no answer; name it in "
            "`kwargs: {cases: ...}`"
        )
    except DataError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        where = f"column {column!r}" if column is not None else "its cases"
        told = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"row {sample.prompt.id}: {where}: {told}") from None


def _has(row: Row, name: str) -> bool:
    """Return whether a row has something in a column, which may be a key of one (`a.b`)."""
    first, _, rest = name.partition(".")
    value = row.get(first)
    if rest:
        return isinstance(value, Mapping) and _has(value, rest)
    return value is not None and value not in ("", [], {}, "[]", "{}")


# -- layouts -----------------------------------------------------------------------------------


def _livecodebench(row: Row) -> Problem:
    """Return the problem of a LiveCodeBench row, with its public and private cases."""
    both = [name for name in ("public_test_cases", "private_test_cases") if _has(row, name)]
    cases = [case for name in both for case in _list(unpack(row[name]), name)]
    return _of_list(cases, {**row, **_mapping(row.get("metadata"))})


def _contests(row: Row) -> Problem:
    """Return the problem of a CodeContests row, with the cases of all columns of tests that it
    has."""
    names = [
        name for name in ("public_tests", "private_tests", "generated_tests") if _has(row, name)
    ]
    cases: list[TextCase] = []
    for name in names:
        found = unpack(row[name])
        cases += _texts(found["input"], found["output"])
    return _checked(Texts(cases, _checker(row)))


def _prime(row: Row) -> Problem:
    """Return the problem of a PRIME row, whose cases are in `reward_model.ground_truth`."""
    return _by_content(row["reward_model"]["ground_truth"], row)


def _synthetic(row: Row) -> Problem:
    """Return the problem of a SYNTHETIC-1 row, whose cases are in `verification_info`."""
    found = _mapping(row["verification_info"])
    return _by_content(found.get("test_cases") or found.get("test_code"), {**row, **found})


def _human_eval(row: Row) -> Problem:
    """Return the problem of a row with the column `test`, such as HumanEval's."""
    return _tests(row["test"], {**row})


def _mbpp(row: Row) -> Problem:
    """Return the problem of an MBPP row: a list of asserts, after set-up code and imports."""
    listed = [
        text
        for name in ("test_list", "challenge_test_list")
        if _has(row, name)
        for text in _list(unpack_list(row[name]), name)
    ]
    setup = [str(row.get("test_setup_code") or ""), *map(str, unpack_list(row.get("test_imports")))]
    return _tests("\n".join([*filter(None, setup), *map(str, listed)]), row)


def _of_roll(row: Row) -> Problem:
    """Return the problem of a row of ROLL's data sets, where `case_type` names the form of the
    cases."""
    kind = str(row["case_type"])
    cases = _list(unpack_list(row["test_cases"]), "test_cases")
    if kind in ("input", "stdin", "input_output", "text") or (
        isinstance(cases[0], Mapping) and {"input", "output"} <= cases[0].keys()
    ):
        return _of_list(cases, row)
    texts = [_text_of_case(case) for case in cases]
    style = {"pytest": "pytest", "check_based": "check"}.get(kind, "asserts")
    return _tests("\n\n".join(texts), row, style)


_LAYOUTS: tuple[tuple[tuple[str, ...], Callable[[Row], Problem]], ...] = (
    (("case_type", "test_cases"), _of_roll),
    (("private_test_cases",), _livecodebench),
    (("public_test_cases",), _livecodebench),
    (("input_output",), lambda row: _by_content(row["input_output"], row)),
    (("private_tests.input",), _contests),
    (("public_tests.input",), _contests),
    (("generated_tests.input",), _contests),
    (("official_tests",), lambda row: _by_content(row["official_tests"], row)),
    (("verification_info",), _synthetic),
    (("reward_model.ground_truth",), _prime),
    (("check_based",), lambda row: _tests(row["check_based"], row, "check")),
    (("pytest",), lambda row: _tests(row["pytest"], row, "pytest")),
    (("test_list",), _mbpp),
    (("test_cases",), lambda row: _by_content(row["test_cases"], row)),
    (("tests",), lambda row: _by_content(row["tests"], row)),
    (("test_code",), lambda row: _by_content(row["test_code"], row)),
    (("test",), lambda row: _by_content(row["test"], row)),
    (("ground_truth",), lambda row: _by_content(row["ground_truth"], row)),
)
"""What a row must have, and how it is read; the first that fits is taken."""


_CHECKERS = {
    "checker": ("input", "output", "expected"),
    "generated_checker": ("input", "expected", "output"),  # Codeforces by Open R1
}

# -- forms -------------------------------------------------------------------------------------


def _by_content(value: Any, row: Row) -> Problem:
    """Return the problem that a value holds, whatever its form."""
    if isinstance(value, str) and _is_python(value):
        return _tests(value, row)
    found = unpack(value)
    if isinstance(found, Mapping):
        if "inputs" in found:
            return _of_columns(found, row)
        if {"input", "output"} <= found.keys() and isinstance(found["input"], list):
            return _checked(Texts(_texts(found["input"], found["output"]), _checker(row)))
        for key in ("test_cases", "tests", "ground_truth", "test_code"):
            if key in found:
                return _by_content(found[key], {**row, **found})
        raise ValueError(f"has the keys {', '.join(map(str, found)) or 'none'}, not `inputs`")
    cases = _list(found, "the cases")
    if isinstance(cases[0], str):
        return _tests("\n".join(cases), row)
    return _of_list(cases, row)


def _is_python(text: str) -> bool:
    """Return whether a text is tests in Python, not packed cases."""
    return bool(re.search(r"^\s*(assert\b|def |class |import |from \w)", text, re.MULTILINE))


def _of_columns(found: Row, row: Row) -> Problem:
    """Return the problem of `inputs`, `outputs` and perhaps `fn_name`, as APPS has it."""
    inputs, outputs = _list(found["inputs"], "inputs"), _list(found["outputs"], "outputs")
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs; expected as many")
    entry = found.get("fn_name")
    if not entry:
        return _checked(Texts(_texts(inputs, outputs), _checker(row)))
    # A value stands in a list of its own, in all cases or in none.
    wrapped = all(isinstance(each, list) and len(each) == 1 for each in outputs)
    calls = [
        Call(
            [_keyed(each) for each in _arguments(given)],
            _keyed(right[0] if wrapped else right),
        )
        for given, right in zip(inputs, outputs, strict=True)
    ]
    return _checked(Calls(str(entry), calls))


def _arguments(given: Any) -> list[Any]:
    """Return the arguments of a case: a list, or text with the JSON of one in each line."""
    if isinstance(given, str):
        return _lines(given)
    return given if isinstance(given, list) else [given]


def _lines(text: str) -> list[Any]:
    """Return the JSON value of each line that is not blank; ValueError if one is no JSON."""
    return [_value(line) for line in text.split("\n") if line.strip()]


def _value(text: Any) -> Any:
    """Return the value of JSON text; any other value as it is."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f"an argument or result is no JSON: {text[:60]!r}") from None


def _keyed(value: Any) -> Any:
    """Return a dict with whole numbers as keys where JSON had them as text."""
    if isinstance(value, dict) and value and all(re.fullmatch(r"-?\d+", key) for key in value):
        return {int(key): each for key, each in value.items()}
    return value


def _of_list(cases: Sequence[Any], row: Row) -> Problem:
    """Return the problem of a list of cases, each with `input` and `output`."""
    if not cases:
        raise ValueError("no case")
    for case in cases:
        if not isinstance(case, Mapping):
            raise ValueError(f"a case is {type(case).__name__} {str(case)[:60]!r}, not a mapping")
    first = cases[0]
    entry = _entry_of(first, row)
    kind = str(first.get("type") or first.get("testtype") or "")
    if entry is not None and kind not in ("stdin", "stdin_stdout"):
        calls = [_call(case) for case in cases]
        return _checked(Calls(entry, calls))
    if kind in ("functional", "function_call"):
        raise ValueError("calls a function whose name is not given (`fn_name` or `func_name`)")
    texts = [TextCase(_text(case["input"]), _text(case["output"])) for case in cases]
    return _checked(Texts(texts, _checker(row)))


def _entry_of(case: Row, row: Row) -> str | None:
    """Return the name of the function that a case or its row names; None: there is none."""
    places = (case, _mapping(case.get("metadata")), row)
    for place in places:
        for key in ("fn_name", "func_name", "function_name"):
            if place.get(key):
                return str(place[key])
    return None


def _call(case: Row) -> Call:
    """Return the call of a case, whose input is a list of arguments, text with one JSON value per
    line, or a single argument."""
    given, right = case["input"], case["output"]
    if isinstance(given, str):
        return Call(_lines(given), _value(right))
    if not isinstance(given, list):
        given = [given]
    return Call(given, right)


def _texts(inputs: Any, outputs: Any) -> list[TextCase]:
    """Return the cases of two lists of equal length; ValueError for anything else."""
    both = zip(_list(inputs, "input"), _list(outputs, "output"), strict=True)
    return [TextCase(_text(given), _text(right)) for given, right in both]


def _text(value: Any) -> str:
    """Return a standard input or output, which some sets have as a list of lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(map(_text, value)) + "\n"
    if isinstance(value, bool | int | float):
        return str(value)
    raise ValueError(f"an input or output is {type(value).__name__}, not text")


def _tests(text: Any, row: Row, style: str | None = None) -> Suite:
    """Return a problem with tests in Python; if no style is given, it shows in their text."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError("expected tests in Python, found nothing")
    if style is None:
        is_file = re.search(
            r"^\s*(async )?def test_|^class Test|^import pytest|^from pytest", text, re.M
        )
        style = "pytest" if is_file else "asserts" if re.search(r"\bassert\b", text) else "check"
    entry = row.get("entry_point")
    prelude = row.get("prompt") if entry and isinstance(row.get("prompt"), str) else None
    return Suite(text, style, str(entry) if entry else None, prelude or "")


def _text_of_case(case: Any) -> str:
    """Return the code of a case, which is text or a mapping that has it under a known key."""
    if isinstance(case, str):
        return case
    for key in ("assert_code", "check_code", "test_code", "code", "test"):
        if isinstance(case.get(key), str):
            return str(case[key])
    raise ValueError(f"a case has the keys {', '.join(map(str, case))}, not `assert_code`")


def _checked(problem: Calls | Texts) -> Problem:
    """Return a problem unchanged; ValueError if it has no case."""
    number = len(problem.calls if isinstance(problem, Calls) else problem.cases)
    if not number:
        raise ValueError("no case")
    return problem


def _checker(row: Row) -> Checker | None:
    """Return the row's checker, with the order in which it takes its arguments; None: no
    checker."""
    for name, order in _CHECKERS.items():
        text = row.get(name)
        if isinstance(text, str) and text.strip():
            return Checker(text, order)
    return None


def _mapping(value: Any) -> Row:
    """Return the mapping that a value holds, perhaps as JSON text; empty if it holds none."""
    if value is None or value == "":
        return {}
    found = unpack(value)
    return found if isinstance(found, Mapping) else {}


def unpack_list(value: Any) -> list[Any]:
    """Return a list, which may be packed text (see `unpack`); an empty one for None or empty text.

    Raises:
        ValueError: the value is no list.
    """
    if value is None or value == "":
        return []
    return _list(unpack(value), "a list")


def _list(value: Any, what: str) -> list[Any]:
    """Return a list, tuple or array as a list; ValueError, which begins with `what`, for anything
    else. JSON text is not read: see `unpack_list`."""
    if isinstance(value, tuple) or type(value).__name__ == "ndarray":
        value = list(value)
    if not isinstance(value, list):
        raise ValueError(f"{what}: expected a list, found {type(value).__name__}")
    return value
