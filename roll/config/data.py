"""Where prompts come from and how they become tokens."""

from __future__ import annotations

from typing import Any, Literal

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
    def _one_of_prompt_and_messages(self) -> ColumnsConfig:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("set exactly one of `prompt` and `messages` (the other to null)")
        return self


class SourceConfig(Config):
    """One file, folder or hub dataset."""

    path: str
    """JSONL, JSON, Parquet or CSV file; a folder written by `datasets.save_to_disk`; or `org/name`
    on the hub."""
    format: Literal["auto", "jsonl", "json", "parquet", "csv", "disk", "hub"] = "auto"
    """`auto` goes by the ending; a folder is `disk`, `org/name` without such a file is `hub`."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    split: str = "train"
    """Split of a hub or disk dataset."""
    columns: ColumnsConfig = ColumnsConfig()
    tag: str = "default"
    """Routes the samples of this source to their rewards."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the prompts drawn from this source, relative to the others."""
    system: str | None = None
    """System message put before every conversation."""
    limit: int | None = Field(default=None, ge=1)
    """Take only the first rows."""
    made_by: str | None = Field(default=None, min_length=1)
    """Command that makes `path`; named in the message when `path` does not exist yet."""


class DataConfig(Config):
    """Prompts of one kind of run."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    prompts_per_step: int = Field(ge=1)
    """Prompts (not samples) of one step."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Responses generated for each prompt."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longer prompts are left out; how many is reported."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template; false takes the prompt text as it is."""
    chat_template_kwargs: dict[str, Any] = {}
    """Passed to the chat template, for example {enable_thinking: false}."""
    shuffle: bool = True
    """A new order each epoch, drawn from the seed; false keeps the order of the sources."""
