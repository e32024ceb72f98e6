"""Settings of the data: sources, columns, and the way from rows to tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from roll.config.base import Config
from roll.config.column_texts import Column, TurnConfig, columns_in
from roll.config.user_code.own import OrOwn, OwnPart


class ColumnsConfig(Config):
    """Names of the columns of a source of prompts. `prompt` and `answer` may also be a text with
    names of columns in braces, such as `Question: {question}`."""

    prompt: Column | None = "prompt"
    """Column with the text of the question. Set either this or `messages`, the other to null."""
    messages: Column | tuple[TurnConfig, ...] | None = None
    """Column with a conversation: a list of {role, content}, or its JSON text; or the turns of one
    that is made of several columns. Set either this or `prompt`."""
    answer: Column | None = "answer"
    """Column with the correct answer, which is passed to the reward. null: there is none."""
    tag: str | None = None
    """Column with the tag of each row. If left out: the source's `tag`."""
    images: str | None = None
    """Column with the pictures of a row: one, or a list. Each `<image>` in the texts of the row
    stands for the next of them; without any, they come first. null: `<image>` is text, and only
    messages may hold pictures."""

    @model_validator(mode="after")
    def _one_of_prompt_and_messages(self) -> Self:
        """Require exactly one of `prompt` and `messages`."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("set exactly one of `prompt` and `messages` (the other to null)")
        return self


class FileConfig(Config, ABC):
    """Base of all data sources: one file, folder or hub dataset."""

    path: str
    """JSONL, JSON, Parquet or CSV file; a folder written by `datasets.save_to_disk`; or `org/name`
    of a dataset on the Hugging Face hub."""
    format: Literal["auto", "jsonl", "json", "parquet", "csv", "disk", "hub"] = "auto"
    """Format of `path`. `auto` decides by the file name's ending; a folder is `disk`, and
    `org/name` is `hub` where no such file exists."""
    subset: str | None = None
    """Configuration name of a hub dataset; refused for anything else."""
    split: str = "train"
    """Split of a dataset of the hub, or of a folder with several; refused for anything else."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the rows that is drawn from this source, relative to the weights of the other
    sources."""
    system: str | None = None
    """System message put before every conversation. null: none."""
    limit: int | None = Field(default=None, ge=1)
    """Number of rows to use, from the first row on. null: all rows."""
    part: tuple[float, float] | None = None
    """Range within 0 to 1, such as [0, 0.98] for training and [0.98, 1] for validation: only rows
    whose hash lies in it (not at its end) are used. The hash is of the question alone, so a row
    keeps its part when others are added. null: all rows."""
    made_by: str | None = Field(default=None, min_length=1)
    """Command that creates `path`; shown in the error message if `path` does not exist yet."""
    fn: str | None = None
    """Function `my_module:row` in a file beside the YAML. It gets the columns of a row as a dict
    and returns those that the run sees: a dict; None to leave the row out; or a list of dicts for
    several rows. null: rows stay as they are."""

    @field_validator("part")
    @classmethod
    def _a_range(cls, part: tuple[float, float] | None) -> tuple[float, float] | None:
        """Require 0 <= begin < end <= 1."""
        if part is not None and not 0 <= part[0] < part[1] <= 1:
            raise ValueError(f"{list(part)} must be a range within 0 to 1, such as [0, 0.98]")
        return part

    @property
    @abstractmethod
    def mapped(self) -> tuple[str | tuple[TurnConfig, ...], ...]:
        """Values of `columns`: columns, texts made of columns, and turns made of columns."""

    @property
    def columns_used(self) -> tuple[str, ...]:
        """Columns that every row of the source must have."""
        found: list[str] = []
        for each in self.mapped:
            texts = [each] if isinstance(each, str) else [turn.content for turn in each]
            for text in texts:
                alone = isinstance(each, str) and not columns_in(text)
                found += [text] if alone else columns_in(text)
        return tuple(found)

    @property
    def templates(self) -> tuple[str, ...]:
        """Texts made of columns, which rows have as columns of this name."""
        return tuple(each for each in self.mapped if isinstance(each, str) and columns_in(each))


class SourceConfig(FileConfig):
    """Source of prompts."""

    columns: ColumnsConfig = ColumnsConfig()
    tag: str = "default"
    """Tag of all samples of this source; it selects their rewards and teachers."""

    @property
    def mapped(self) -> tuple[str | tuple[TurnConfig, ...], ...]:
        columns = self.columns
        return _named(columns.prompt, columns.messages, columns.answer, columns.tag, columns.images)


class TextColumns(Config):
    """Names of the columns of a source of texts to imitate. `prompt` and `completion` may also be a
    text with names of columns in braces, such as `Question: {question}`."""

    messages: Column | tuple[TurnConfig, ...] | None = "messages"
    """Column with a conversation: a list of {role, content}, or its JSON text; or the turns of one
    that is made of several columns. Set either this or `completion`, the other to null."""
    prompt: Column | None = None
    """Column with the text or conversation that comes before `completion` and is not trained on;
    only together with `completion`."""
    completion: Column | None = None
    """Column with the text to imitate, or a list of messages. Set either this or `messages`."""
    images: str | None = None
    """Column with the pictures of a row: one, or a list. Each `<image>` in the texts of the row
    stands for the next of them; without any, they come first. null: `<image>` is text, and only
    messages may hold pictures."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        """Require either `messages`, or `completion` with or without `prompt`."""
        if (self.messages is None) == (self.completion is None):
            raise ValueError(
                "set exactly one of `messages` and `completion` (the other to null), and `prompt` "
                "with `completion` only"
            )
        if self.messages is not None and self.prompt is not None:
            raise ValueError("`prompt` goes with `completion`; a conversation holds its own")
        return self


class TextSource(FileConfig):
    """Source of texts to imitate."""

    columns: TextColumns = TextColumns()

    @property
    def mapped(self) -> tuple[str | tuple[TurnConfig, ...], ...]:
        columns = self.columns
        return _named(columns.messages, columns.prompt, columns.completion, columns.images)


class TaughtColumns(TextColumns):
    """Names of the columns of a source of texts for distillation."""

    tag: str | None = None
    """Column with the tag of each row. If left out: the source's `tag`."""


class TaughtSource(TextSource):
    """Source of texts for distillation."""

    columns: TaughtColumns = TaughtColumns()
    tag: str = "default"
    """Tag of all rows of this source; it selects their teacher."""

    @property
    def mapped(self) -> tuple[str | tuple[TurnConfig, ...], ...]:
        return (*super().mapped, *_named(self.columns.tag))


class PreferenceColumns(Config):
    """Names of the columns of a source of preferences: pairs, or single responses with a label.
    `prompt` and those of responses may also be a text with names of columns in braces."""

    prompt: Column | None = "prompt"
    """Column with the text or messages before the responses. null: each response is a whole
    conversation."""
    chosen: Column | None = "chosen"
    """Column with the better response: text or messages."""
    rejected: Column | None = "rejected"
    """Column with the worse response: text or messages."""
    margin: str | None = None
    """Column with a number that says how much better the chosen response is; only for reward
    models."""
    completion: Column | None = None
    """Column with a single response; needs `label`, and excludes `chosen` and `rejected`."""
    label: str | None = None
    """Column that says if the response in `completion` is wanted: true or false."""
    images: str | None = None
    """Column with the pictures of a row: one, or a list. Each `<image>` in prompt and response
    stands for the next of them; without any, they come first. null: `<image>` is text, and only
    messages may hold pictures."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        """Require either `chosen` and `rejected`, or `completion` and `label`."""
        pair = (self.chosen is not None, self.rejected is not None)
        single = (self.completion is not None, self.label is not None)
        if {pair, single} != {(True, True), (False, False)}:
            raise ValueError(
                "set `chosen` and `rejected`, or (with these two null) `completion` and `label`"
            )
        return self


class PreferenceSource(FileConfig):
    """Source of preferences."""

    columns: PreferenceColumns = PreferenceColumns()

    @property
    def mapped(self) -> tuple[str | tuple[TurnConfig, ...], ...]:
        columns = self.columns
        return _named(
            columns.prompt,
            columns.chosen,
            columns.rejected,
            columns.margin,
            columns.completion,
            columns.label,
            columns.images,
        )


def _named(
    *columns: str | tuple[TurnConfig, ...] | None,
) -> tuple[str | tuple[TurnConfig, ...], ...]:
    """Return the columns that are not None."""
    return tuple(name for name in columns if name is not None)


class PicturesConfig(Config):
    """Settings of the way from the pictures of rows to the patches that a model reads."""

    min_pixels: int | None = Field(default=None, ge=1)
    """Smallest area of a picture, in pixels; smaller ones are enlarged. null: that of the model's
    image processor, or none if it lies above `max_pixels`."""
    max_pixels: int | None = Field(default=None, ge=1)
    """Largest area of a picture, in pixels; larger ones are reduced. The number of tokens is in
    proportion to it. null: that of the model's image processor, or `min_pixels` if this is
    larger."""
    workers: int = Field(default=2, ge=1)
    """Number of processes that make patches, on the machine of the driver."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit for the pictures of one row, in seconds. A row that takes longer is left out."""

    @model_validator(mode="after")
    def _a_range(self) -> Self:
        """Require min_pixels <= max_pixels."""
        low, high = self.min_pixels, self.max_pixels
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_pixels = {low} must not lie above max_pixels = {high}")
        return self


class OwnTemplateConfig(OwnPart):
    """Base of the chat templates that users bring; see `roll.data.own`."""

    sort: ClassVar[str] = "chat template"
    place: ClassVar[str] = "data.chat_template"


class RenderConfig(Config):
    """Settings of the way from rows to text."""

    chat_template: Annotated[bool, OrOwn(OwnTemplateConfig, "roll.extend.ChatTemplate")] = True
    """Render rows with the tokenizer's chat template, or with a class of yours, `{kind:
    my_module:MyTemplate}`. False uses texts as they are."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the tokenizer's chat template, for example {enable_thinking: false}. A name that
    the template does not mention is refused."""

    @model_validator(mode="after")
    def _template_has_variables(self) -> Self:
        """Refuse variables of a chat template that is not rendered, or is a class of the user's."""
        if self.chat_template_kwargs and self.chat_template is not True:
            raise ValueError(
                "chat_template_kwargs: are for the tokenizer's own template; drop them, or set "
                "chat_template: true (a class of yours has settings beside its `kind`)"
            )
        return self


class TemplateConfig(RenderConfig):
    """Settings of the way from rows to text, of their pictures, and of the order of rows."""

    pictures: PicturesConfig = PicturesConfig()
    shuffle: bool = True
    """Draw a new order of rows for each epoch, from the seed. False keeps the order of the
    sources."""
    overlap: Literal["warn", "drop", "refuse"] = "warn"
    """What becomes of training rows with the tokens of a row of a validation set. `warn`: the log
    tells how many there are. `drop`: they are left out of training. `refuse`: the run does not
    start."""
    cache: str | None = "~/.cache/roll/rows"
    """Folder that keeps the tokenized rows of sources of 32 MiB or more, for later starts; any run
    may use it, and it may be removed at any time between runs. null: they are made at each start,
    in the folder for temporary files."""


class CurriculumBase(Config):
    """Base of every preference for prompts by their pass rates."""

    memory: float = Field(default=0.5, ge=0, lt=1)
    """Share of the earlier pass rate in the recent one, when another group of the prompt has
    ended."""
    pass_score: float = 1.0
    """Reward from which on a sample passes."""
    sources: bool = False
    """Multiply the weight of a source by the same preference, of the recent pass rate of all of its
    prompts. False: sources keep their weights."""
    column: str | None = None
    """Column with a pass rate known beforehand, from 0 to 1. If left out: nothing is known."""


class CurriculumConfig(CurriculumBase):
    """Preference for prompts that the policy solves sometimes, but not always: equal rewards teach
    nothing. The pass rate of a prompt is known after its first group; prompts without a known one
    are always taken."""

    kind: Literal["pass_rate"] = "pass_rate"
    low: float = Field(default=0.1, ge=0, le=1)
    """Recent pass rate up to which a prompt is too hard."""
    high: float = Field(default=0.9, ge=0, le=1)
    """Recent pass rate from which on a prompt is too easy."""
    outside: float = Field(default=0.1, gt=0, le=1)
    """Chance of a prompt with pass rate 0 or 1 to be taken when its turn comes in an epoch, so that
    it is tried again now and then. From there the chance grows linearly to 1 at `low` and at
    `high`."""

    @model_validator(mode="after")
    def _a_band(self) -> Self:
        """Require low <= high."""
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} must not lie above high = {self.high:g}")
        return self


class OwnCurriculumConfig(OwnPart, CurriculumBase):
    """Base of the curricula that users bring; see `roll.data.own`."""

    sort: ClassVar[str] = "curriculum"
    place: ClassVar[str] = "data.curriculum"


class DataConfig(TemplateConfig):
    """Data of an RLVR run: sources of prompts, and prompts and samples per step."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    prompts_per_step: int = Field(ge=1)
    """Number of prompts (not samples) of one step."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Number of responses generated for each prompt."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt, in tokens. Longer prompts are left out, and their number is reported."""
    curriculum: (
        Annotated[CurriculumConfig, OrOwn(OwnCurriculumConfig, "roll.extend.Curriculum")] | None
    ) = None
    """Preference for prompts by their pass rate, or a class of yours, `{kind:
    my_module:MyCurriculum}`. null: every prompt is drawn once per epoch."""


class RowsConfig(TemplateConfig):
    """Data of a run on existing rows: rows per step, and longest sequence."""

    rows_per_step: int = Field(ge=1)
    """Number of rows of one optimizer step, over all ranks; a pair counts as one row."""
    max_tokens: int = Field(default=2048, ge=2)
    """Longest sequence, in tokens."""
    too_long: Literal["drop", "cut_start", "cut_end", "refuse"] = "drop"
    """Treatment of rows whose sequence is longer than `max_tokens`. `drop`: the row is left out.
    `cut_start`: the beginning of the text before the response is cut off. `cut_end`: the end is cut
    off. `refuse`: the run does not start. A row that cannot be cut, or that would have no trained
    token left, is left out. Rows that are too long are counted and reported."""


class TextDataConfig(RowsConfig):
    """Data of a run that imitates texts."""

    sources: tuple[TextSource, ...] = Field(min_length=1)
    train_on: Literal["assistant", "last_assistant"] = "assistant"
    """Turns of a conversation that are trained on: all turns of the assistant, or the last one."""


class TaughtDataConfig(TextDataConfig):
    """Data of a distillation run."""

    sources: tuple[TaughtSource, ...] = Field(min_length=1)


class PreferenceDataConfig(RowsConfig):
    """Data of a run that learns from preferences."""

    sources: tuple[PreferenceSource, ...] = Field(min_length=1)
