"""Where rows come from and how they become tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from roll.config.base import Config


class ColumnsConfig(Config):
    """Names of the columns in the source."""

    prompt: str | None = "prompt"
    """Text of the question; or use `messages`."""
    messages: str | None = None
    """List of {role, content}, or its JSON text; excludes `prompt`."""
    answer: str | None = "answer"
    """Ground truth handed to the reward; null where there is none."""
    tag: str | None = None
    """Column that holds the tag of each row; left out: the source's `tag`."""

    @model_validator(mode="after")
    def _one_of_prompt_and_messages(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("set exactly one of `prompt` and `messages` (the other to null)")
        return self


class FileConfig(Config, ABC):
    """One file, folder or hub dataset, whatever its columns are."""

    path: str
    """JSONL, JSON, Parquet or CSV file; a folder written by `datasets.save_to_disk`; or `org/name`
    on the hub."""
    format: Literal["auto", "jsonl", "json", "parquet", "csv", "disk", "hub"] = "auto"
    """`auto` goes by the ending; a folder is `disk`, `org/name` without such a file is `hub`."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    split: str = "train"
    """Split of a hub or disk dataset."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the rows drawn from this source, relative to the others."""
    system: str | None = None
    """System message put before every conversation."""
    limit: int | None = Field(default=None, ge=1)
    """Take only the first rows."""
    made_by: str | None = Field(default=None, min_length=1)
    """Command that makes `path`; named in the message when `path` does not exist yet."""

    @property
    @abstractmethod
    def columns_used(self) -> tuple[str, ...]:
        """Columns that every row must have."""


class SourceConfig(FileConfig):
    """Prompts."""

    columns: ColumnsConfig = ColumnsConfig()
    tag: str = "default"
    """Routes the samples of this source to their rewards and teachers."""

    @property
    def columns_used(self) -> tuple[str, ...]:
        columns = self.columns
        return _named(columns.prompt, columns.messages, columns.answer, columns.tag)


class TextColumns(Config):
    """Names of the columns of texts to imitate."""

    messages: str | None = "messages"
    """A conversation, list of {role, content}, or its JSON text; or use `completion`."""
    prompt: str | None = None
    """With `completion`: text, or a conversation, that comes before it and is not trained."""
    completion: str | None = None
    """Text to write, or a list of messages; excludes `messages`."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.messages is None) == (self.completion is None):
            raise ValueError(
                "set exactly one of `messages` and `completion` (the other to null), and `prompt` "
                "with `completion` only"
            )
        if self.messages is not None and self.prompt is not None:
            raise ValueError("`prompt` goes with `completion`; a conversation holds its own")
        return self


class TextSource(FileConfig):
    """Texts to imitate."""

    columns: TextColumns = TextColumns()

    @property
    def columns_used(self) -> tuple[str, ...]:
        return _named(self.columns.messages, self.columns.prompt, self.columns.completion)


class TaughtColumns(TextColumns):
    """Names of the columns of texts that a teacher comments on."""

    tag: str | None = None
    """Column that holds the tag of each row; left out: the source's `tag`."""


class TaughtSource(TextSource):
    """Texts that a teacher comments on."""

    columns: TaughtColumns = TaughtColumns()
    tag: str = "default"
    """Routes the rows of this source to their teacher."""

    @property
    def columns_used(self) -> tuple[str, ...]:
        return (*super().columns_used, *_named(self.columns.tag))


class PreferenceColumns(Config):
    """Names of the columns of preferences: pairs, or single responses with a label."""

    prompt: str | None = "prompt"
    """Text or messages before the responses; null where each response is a whole conversation."""
    chosen: str | None = "chosen"
    """The better response: text or messages."""
    rejected: str | None = "rejected"
    """The worse one."""
    margin: str | None = None
    """How much better, a number; for reward models."""
    completion: str | None = None
    """A response by itself, with `label`; excludes `chosen` and `rejected`."""
    label: str | None = None
    """Whether `completion` is wanted: true or false."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        pair = (self.chosen is not None, self.rejected is not None)
        single = (self.completion is not None, self.label is not None)
        if {pair, single} != {(True, True), (False, False)}:
            raise ValueError(
                "set `chosen` and `rejected`, or (with these two null) `completion` and `label`"
            )
        return self


class PreferenceSource(FileConfig):
    """Preferences."""

    columns: PreferenceColumns = PreferenceColumns()

    @property
    def columns_used(self) -> tuple[str, ...]:
        columns = self.columns
        return _named(
            columns.prompt,
            columns.chosen,
            columns.rejected,
            columns.margin,
            columns.completion,
            columns.label,
        )


def _named(*columns: str | None) -> tuple[str, ...]:
    return tuple(name for name in columns if name is not None)


class TemplateConfig(Config):
    """How rows become text."""

    chat_template: bool = True
    """Render with the tokenizer's chat template; false takes texts as they are."""
    chat_template_kwargs: dict[str, Any] = {}
    """Passed to the chat template, for example {enable_thinking: false}."""
    shuffle: bool = True
    """A new order each epoch, drawn from the seed; false keeps the order of the sources."""


class DataConfig(TemplateConfig):
    """Prompts of one kind of run."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    prompts_per_step: int = Field(ge=1)
    """Prompts (not samples) of one step."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Responses generated for each prompt."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longer prompts are left out; how many is reported."""


class RowsConfig(TemplateConfig):
    """Sequences that lie there before a run begins."""

    rows_per_step: int = Field(ge=1)
    """Rows (a pair is one) of one optimizer step, over all ranks."""
    max_tokens: int = Field(default=2048, ge=2)
    """Of one sequence."""
    too_long: Literal["drop", "cut_start", "cut_end", "refuse"] = "drop"
    """What becomes of longer ones: the row is left out; the beginning of what comes before the
    response goes; the end goes; or the run does not start. All are counted and reported."""


class TextDataConfig(RowsConfig):
    """Texts to imitate."""

    sources: tuple[TextSource, ...] = Field(min_length=1)
    train_on: Literal["assistant", "last_assistant"] = "assistant"
    """Which turns of a conversation: all of the assistant's, or the last one."""


class TaughtDataConfig(TextDataConfig):
    """Texts that a teacher comments on."""

    sources: tuple[TaughtSource, ...] = Field(min_length=1)


class PreferenceDataConfig(RowsConfig):
    """Preferences."""

    sources: tuple[PreferenceSource, ...] = Field(min_length=1)
