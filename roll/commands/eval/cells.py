"""Cells of an evaluation: a set of questions with one temperature, and the data of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from roll.config.evaluation import QuestionSet
from roll.config.loading.question_sets import load_set
from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError
from roll.core.types import Prompt
from roll.data.chat.templates import DatedTokenizer
from roll.data.chat.variables import check_variables
from roll.data.datasets import Dataset, load_prompts, named_sources
from roll.data.questions import mapper
from roll.models.load import load_tokenizer
from roll.models.vocabulary import check_token_ids
from roll.runtime.run_data import check_tags


@dataclass(frozen=True, slots=True)
class Cell:
    """A set of questions with one temperature."""

    set_name: str
    questions: QuestionSet
    file: Path

    @property
    def name(self) -> str:
        """Name of the cell's folder, such as `gsm8k-t0.6`."""
        return f"{self.set_name}-t{self.questions.sampling.temperature:g}"


def cells_of(
    files: Mapping[str, Path],
    temperatures: Sequence[float],
    samples: int | None,
    overrides: Mapping[str, Sequence[str]],
) -> list[Cell]:
    """Load sets and return their cells, set after set.

    Args:
        files: name of a set -> its file.
        temperatures: temperatures, each of which makes a cell of every set; empty: that of the set.
        samples: number of responses to each question; None: that of the set.
        overrides: name of a set -> `key.sub=value`, which win over its file.

    Raises:
        ConfigError: a set is wrong, or `samples` are asked of cells that are all greedy.
    """
    cells: list[Cell] = []
    for name, file in files.items():
        questions = load_set(file, overrides.get(name, ()))
        if samples is not None:
            questions = questions.model_copy(update={"samples_per_prompt": samples})
        for temperature in temperatures or (questions.sampling.temperature,):
            cells.append(Cell(name, _at(questions, temperature), file))
    if samples not in (None, 1) and all(one.questions.sampling.is_greedy for one in cells):
        raise ConfigError(
            f"-n {samples}: {', '.join(one.name for one in cells)} are greedy, so all {samples} "
            "responses would be equal; give a --temperature above 0, or leave out -n"
        )
    return cells


def _at(questions: QuestionSet, temperature: float) -> QuestionSet:
    """Return a set at one temperature; a greedy one has a single sample per prompt."""
    sampling = questions.sampling.model_copy(update={"temperature": temperature})
    changed: dict[str, Any] = {"sampling": sampling}
    if sampling.is_greedy:
        changed["samples_per_prompt"] = 1
    return questions.model_copy(update=changed)


def load_questions(
    cells: Sequence[Cell], model: ModelConfig, moment: datetime
) -> dict[str, Dataset[Prompt]]:
    """Read and tokenize the prompts of all sets for one model; return them by the set's name.

    Args:
        moment: date and time that the chat template treats as the present.

    Raises:
        ConfigError: the tokenizer or a template cannot be used, or there is no such token as a
            sampling names.
        DataError: a source cannot be read, or a row has a tag that no reward takes.
    """
    plain = load_tokenizer(model)
    check_token_ids({f"{cell.set_name}.sampling": cell.questions.sampling for cell in cells}, plain)
    tokenizer = DatedTokenizer(plain, moment)
    by_name = {cell.set_name: cell.questions for cell in cells}
    for name, own in by_name.items():
        key = f"{name}.data.chat_template_kwargs"
        check_variables(key, own.data.chat_template_kwargs, plain)
    return {name: _load(name, own, tokenizer) for name, own in by_name.items()}


def _load(name: str, questions: QuestionSet, tokenizer: DatedTokenizer) -> Dataset[Prompt]:
    """Return the prompts of one set, which `load_questions` reads."""
    own = questions.data.sources
    sources: Mapping[str, Any] = {name: own[0]}
    if len(own) > 1:
        sources = {f"{name}/{stem}": one for stem, one in named_sources(own).items()}
    data = load_prompts(sources, questions.data, tokenizer, map_one=mapper(questions.data))
    check_tags(data, "reward", questions.rewards.values())
    return data
