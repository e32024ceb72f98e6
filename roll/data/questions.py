"""Rows of a set of questions: the text of a question by a template, and options in an order that
depends on the row alone."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from roll.config.errors import ConfigError, nearest
from roll.config.evaluation import ChoicesConfig, QuestionData
from roll.config.sections.data import SourceConfig
from roll.core.errors import RowError
from roll.data.chat.prompts import MapRow
from roll.data.columns import PromptRow, RawRow, map_row

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
QUESTION = "data.template"
"""Column with the text of the template; those of the row stay, because rewards may read them."""


def mapper(data: QuestionData) -> MapRow:
    """Return the function that converts a raw row of a set of questions.

    It raises DataError if a row lacks a column that the options or the template name.

    Raises:
        ConfigError: the template is no valid Jinja.
    """
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["letters"] = LETTERS
    try:
        template = None if data.template is None else environment.from_string(data.template)
    except TemplateError as error:
        raise ConfigError(f"data.template is no valid Jinja: {error}") from None

    def map_one(row: RawRow, source: SourceConfig) -> PromptRow:
        values = dict(row.values)
        if data.choices is not None:
            values |= _ordered(data.choices, row)
        if template is not None:
            try:
                values[QUESTION] = template.render(values).strip("\n")
            except TemplateError as error:
                known = ", ".join(sorted(row.values))
                raise RowError(f"{row.place}: data.template: {error} (columns: {known})") from None
            columns = source.columns.model_copy(update={"prompt": QUESTION})
            source = source.model_copy(update={"columns": columns})
        return map_row(RawRow(row.place, values), source)

    return map_one


def _ordered(choices: ChoicesConfig, row: RawRow) -> Mapping[str, Any]:
    """Return the columns `choices`, the options in order, and `choice`, the letter of the right
    one.

    The order is drawn with a seed from the texts of the options, so it depends neither on the place
    of the row in its file nor on the order of the columns.

    Raises:
        DataError: a column is missing or no text, or two options are equal.
    """
    texts = []
    for column in (choices.right, *choices.wrong):
        value = row.values.get(column)
        if not isinstance(value, str) or not value.strip():
            hint = "" if column in row.values else nearest(column, row.values)
            raise RowError(f"{row.place}: column {column!r} must be the text of an option{hint}")
        texts.append(value.strip())
    order = sorted(texts)
    if len(set(order)) < len(order):
        raise RowError(f"{row.place}: two options are equal; correct the row, or remove it")
    seed = hashlib.blake2b("\0".join(order).encode(), digest_size=8).digest()
    random.Random(int.from_bytes(seed, "big")).shuffle(order)
    return {"choices": order, "choice": LETTERS[order.index(texts[0])]}
