"""The answers to the questions of `roll init`: given as options, asked for, or proposed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from roll.commands.begin.columns import (
    Columns,
    Data,
    likely_columns,
    likely_pipeline,
    look_at,
    read_columns,
)
from roll.config.errors import UserError, nearest
from roll.config.pipelines import PIPELINES
from roll.core.hub import may_be_on_hub
from roll.envs.loading import ENVS
from roll.rewards.built_in import REWARDS
from roll.strategy.available import status

ENGINES = ("vllm", "sglang", "hf")
"""Engines that write responses."""
TRAINERS = ("fsdp2", "deepspeed", "megatron")
"""Backends that train, for pipelines without an engine."""
GENERATING = ("rlvr", "agentic")
"""Pipelines with an engine."""
JUDGED_BY = {
    "rlvr": "a built-in reward such as math, exact or code, or my_module:function",
    "agentic": "an environment such as frozen_lake, or my_module:Class",
    "distill": "a folder, or a name on the hub",
}
"""What `--reward` names, of pipelines that ask for it."""

COMPARING = (
    *("bleu", "crossthink", "exact", "math", "multiple_choice", "number", "qa", "rouge"),
    "similarity",
)
"""Built-in rewards that need the answer of a row."""

T = TypeVar("T")
Ask = Callable[[str, str | None], str]
"""Function that asks a question, with the proposed answer, and returns what the user wrote."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of which a run file is made."""

    model: str
    data: Data
    pipeline: str
    columns: Columns
    reward: str | None
    """Reward, environment or teacher; None for pipelines that need none of them."""
    engine: str
    gpus: int
    """Number of GPUs of the run; 0: the cores of the machine."""


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions with the options that answer them beforehand."""

    given: Mapping[str, str | None]
    """Name of each option -> what was given."""
    ask: Ask | None
    """None: nobody is asked."""
    proposals: bool
    """Whether proposals answer what nobody is asked."""
    tell: Callable[[str], None] = lambda line: None
    """Function that shows why an answer is asked for once more."""

    def settle(self, gpus: int) -> Answers:
        """Return all answers.

        Args:
            gpus: number of GPUs of a run, unless the answer about the engine has another.

        Raises:
            UserError: an option is wrong, or an answer is missing and nobody can be asked.
        """
        model = self._one("model", "Model: a folder, or a name on the hub", None, _model)
        data = self._one(
            "data",
            "Data: a file, a dataset on the hub, or a number of tasks that an environment makes",
            None,
            look_at,
        )
        known = ", ".join(PIPELINES)
        pipeline = self._one(
            "pipeline", f"Pipeline: {known}", likely_pipeline(data), partial(_pipeline, data=data)
        )
        columns = self._columns(pipeline, data)
        reward = self._reward(pipeline, data, columns)
        kinds = ENGINES if pipeline in GENERATING else TRAINERS
        installed = next((kind for kind in kinds if status(kind).ok), kinds[0])
        what = "Engine that writes responses" if kinds is ENGINES else "Backend that trains"
        engine, used = self._one(
            "engine",
            f"{what}: {', '.join(kinds)}; with a number of GPUs, as in {kinds[0]}:8",
            f"{installed}:{gpus}",
            partial(_engine, known=kinds, gpus=gpus),
        )
        return Answers(model, data, pipeline, columns, reward, engine, used)

    def _columns(self, pipeline: str, data: Data) -> Columns:
        """Return the columns of the data: those that are named, else those that are likely."""
        given = self.given.get("columns")
        if data.seeds is not None:
            if given is not None:
                raise UserError("--columns: tasks that are made of seeds have none; drop it")
            return {}
        likely: Columns = {}
        if given is None:
            try:
                likely = likely_columns(pipeline, data)
            except UserError:
                if self.ask is None:
                    raise
        there = ", ".join(data.first) if data.first is not None else "not looked at"
        return self._one(
            "columns",
            f"Columns as FIELD=COLUMN,... (in the data: {there})",
            ",".join(f"{field}={column}" for field, column in likely.items()) or None,
            partial(read_columns, pipeline=pipeline, data=data),
        )

    def _reward(self, pipeline: str, data: Data, columns: Columns) -> str | None:
        """Return what judges the responses; None if the pipeline learns from rows alone."""
        if pipeline not in JUDGED_BY:
            if self.given.get("reward") is not None:
                raise UserError(
                    f"--reward: pipeline {pipeline} learns from its rows alone; drop it, or name "
                    f"another --pipeline: {', '.join(JUDGED_BY)}"
                )
            return None
        proposal = likely_reward(data, columns) if pipeline == "rlvr" else None
        checks: dict[str, Callable[[str], str]] = {
            "rlvr": partial(_reward, answered=columns.get("answer") is not None),
            "agentic": _environment,
            "distill": _model,
        }
        what = {"rlvr": "Reward", "agentic": "Environment", "distill": "Teacher"}[pipeline]
        return self._one("reward", f"{what}: {JUDGED_BY[pipeline]}", proposal, checks[pipeline])

    def _one(self, name: str, question: str, proposal: str | None, check: Callable[[str], T]) -> T:
        """Return one answer, checked: the option, what the user writes, or the proposal."""
        given = self.given.get(name)
        if given is not None:
            try:
                return check(_printable(given))
            except UserError as error:
                raise UserError(f"--{name}: {error}") from None
        if self.ask is None:
            if proposal is not None and self.proposals:
                return check(proposal)
            if self.proposals:
                raise UserError(f"--{name} is missing, and nothing is proposed for it. {question}")
            open_ones = [f"--{key}" for key, value in self.given.items() if value is None]
            raise UserError(
                f"--{name} is missing, and there is no terminal to ask at: give "
                f"{', '.join(open_ones)}, or --yes for what is proposed. {question}"
            )
        while True:
            try:
                return check(_printable(self.ask(question, proposal)))
            except UserError as error:
                self.tell(str(error))


def likely_reward(data: Data, columns: Columns) -> str | None:
    """Return the reward that fits the first row; None if no row was read, or it has no answer."""
    row = data.first or {}
    for column, reward in (
        ("instruction_id_list", "ifeval"),
        ("input_output", "code"),
        ("test_list", "code"),
        ("choices", "multiple_choice"),
        ("options", "multiple_choice"),
    ):
        if column in row:
            return reward
    answer = columns.get("answer")
    if answer is None or answer not in row:
        return None
    number = re.search(r"####|\\boxed|^\s*[-+]?[\d.,/]+\s*%?$", str(row[answer]))
    return "math" if number else "qa"


def _printable(text: str) -> str:
    """Return a text without white space around it; UserError if it is empty or holds control
    characters."""
    text = text.strip()
    if not text or not text.isprintable():
        raise UserError(f"{text!r} is no answer; expected a word or a path")
    return text


def _model(text: str) -> str:
    """Return the name of a model; UserError if it is neither a folder nor written as on the hub."""
    if Path(text).expanduser().is_dir() or may_be_on_hub(text):
        return text
    raise UserError(f"{text!r} is neither the folder of a model nor `org/name` on the hub")


def _pipeline(text: str, data: Data) -> str:
    """Return a pipeline; UserError if it is unknown, or needs rows and there are only seeds."""
    if data.seeds is not None and text != "agentic":
        raise UserError(
            f"{text!r} reads rows, and {data.seeds} is no file; a number of tasks is for agentic, "
            "whose environments make them"
        )
    return _of(text, tuple(PIPELINES))


def _reward(text: str, answered: bool) -> str:
    """Return a reward; UserError if it is unknown, or compares with an answer and the rows have
    none."""
    if text in COMPARING and not answered:
        raise UserError(
            f"reward {text!r} compares with the right answer, and no column holds one; name it, as "
            "in --columns prompt=question,answer=solution"
        )
    return text if ":" in text else _of(text, tuple(REWARDS))


def _engine(text: str, known: tuple[str, ...], gpus: int) -> tuple[str, int]:
    """Return a backend and its number of GPUs, which is `gpus` unless the text says another;
    UserError if either is unknown."""
    kind, colon, number = text.partition(":")
    if colon and not (number.isascii() and number.isdecimal() and len(number) < 6):
        raise UserError(f"{text!r}: expected a number of GPUs behind the colon, as in {kind}:8")
    return _of(kind, known), int(number) if colon else gpus


def _environment(text: str) -> str:
    return text if ":" in text else _of(text, tuple(ENVS))


def _of(text: str, known: tuple[str, ...]) -> str:
    """Return one of the known names; UserError for another one."""
    if text not in known:
        raise UserError(f"{text!r} is unknown{nearest(text, known)} (known: {', '.join(known)})")
    return text
