"""Data of a run, which the driver reads and checks before anything expensive is started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from roll.config.agentic_base import AgenticBase
from roll.config.errors import nearest
from roll.config.rlvr_base import RlvrBase
from roll.config.sections.data import PicturesConfig
from roll.config.sections.engines import NO_PICTURES, EngineConfig, SglangConfig
from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError, DataError
from roll.core.types import Prompt
from roll.data.chat.templates import DatedTokenizer
from roll.data.chat.variables import check_variables
from roll.data.datasets import Dataset, Item, Source, content_of, identity, load_prompts
from roll.data.examples import Example
from roll.data.pictures.placeholders import Placeholders
from roll.data.preparation.overlap import without_overlap
from roll.data.store.load import RowStore
from roll.data.store.rows import StoredRows
from roll.data.tasks import load_tasks
from roll.models.image_processor import load_image_processor
from roll.models.load import load_tokenizer
from roll.models.vocabulary import check_token_ids
from roll.output_dir.replay_folder import ReplayFolder
from roll.output_dir.resume import rendering_moment

Row = TypeVar("Row", bound=Item)
Named = TypeVar("Named", Prompt, Example)


class Taker(Protocol):
    """Reward, teacher or environment that takes rows with certain tags."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the rows that it takes."""
        ...


@dataclass(frozen=True)
class RunData(Generic[Row]):
    """Tokenizer of a run, and its rows for training and for validation."""

    tokenizer: PreTrainedTokenizerBase
    train: Dataset[Row]
    held_out: Dataset[Row]
    rendered_at: datetime
    """Date and time that chat templates treated as the present."""
    replay: ReplayFolder | None = None
    """Kept samples that the run trains on; then it has no rows."""

    def rows_told(self) -> list[dict[str, Any]]:
        """Return what became of the rows of each source and validation set, as plain JSON."""
        return [
            {
                "name": report.name,
                "validation": dataset is self.held_out,
                "read": report.rows,
                "kept": report.kept,
                "left_out": dict(report.left_out),
            }
            for dataset in (self.train, self.held_out)
            for report in dataset.report
        ]


def load_data(config: RlvrBase) -> RunData[Prompt]:
    """Read and tokenize all prompts for training and validation, and check their tags.

    Raises:
        CheckpointError: the checkpoint to resume from, which holds the date for chat templates, is
            not in the format of this version.
        ConfigError: the tokenizer cannot be loaded or lacks a token that a sampling names, or rows
            have pictures and the model or the engine takes none.
        DataError: a source cannot be read, a prompt has a tag that no reward or teacher takes, or
            no training prompt has the tag of one of `domains`.
    """
    tokenizer, moment = load_tokenizer(config.train_model), rendering_moment(config)
    check_token_ids(config.samplings | config.validation_samplings, tokenizer)
    check_variables("data.chat_template_kwargs", config.data.chat_template_kwargs, tokenizer)
    dated = DatedTokenizer(tokenizer, moment)
    seen = placeholders(config.train_model, config.data.pictures)
    store = RowStore.at(config.data.cache)
    train = load_prompts(config.data.sources, config.data, dated, seen, store=store)
    sets = load_prompts(config.validation.sets, config.data, dated, seen, store=store)
    held_out = apart(sets, train)
    rule = config.data.overlap
    train = without_overlap(train, held_out, rule, content_of, identity)
    if config.rewards:
        for dataset in (train, held_out):
            check_tags(dataset, "reward", config.rewards.values())
    if config.teachers:
        check_tags(train, "teacher", config.teachers.values())
    check_domains(train, config.domains)
    for dataset in (train, held_out):
        check_pictures(dataset, config.actor_infer.strategy)
    return RunData(tokenizer, train, held_out, moment)


def placeholders(model: ModelConfig, config: PicturesConfig, *, fetch: bool = True) -> Placeholders:
    """Return the placeholders of a model; its image processor is loaded when it is needed, with the
    arguments and errors of `load_image_processor`."""
    return Placeholders(partial(load_image_processor, model, config, fetch=fetch))


def load_task_data(config: AgenticBase) -> RunData[Prompt]:
    """Load the tasks of an agentic run for training and validation, and check their tags.

    Raises:
        CheckpointError, ConfigError: see `load_data`.
        DataError: a source cannot be read, a task has a tag that no environment takes, or no task
            of training has the tag of one of `domains`.
    """
    tokenizer, moment = load_tokenizer(config.train_model), rendering_moment(config)
    check_token_ids(config.samplings | config.validation_samplings, tokenizer)
    check_variables("data.chat_template_kwargs", config.data.chat_template_kwargs, tokenizer)
    train = load_tasks(config.data.sources)
    held_out = apart(load_tasks(config.validation.sets), train)
    for dataset in (train, held_out):
        check_tags(dataset, "environment", config.environments.values())
    if config.teachers:
        check_tags(train, "teacher", config.teachers.values())
    check_domains(train, config.domains)
    return RunData(tokenizer, train, held_out, moment)


def apart(held_out: Dataset[Named], train: Dataset[Named]) -> Dataset[Named]:
    """Return the validation sets; ids of a set with the name of a training source begin with
    `val/`, so no two rows of a run share one.

    Groups, requests, episodes and seeds have their names from these ids, and validation may run
    while groups of training do. Other sets keep their ids, and so the seeds of earlier versions.
    """
    trained = {source.name for source in train.sources}

    def renamed(source: Source[Named]) -> Source[Named]:
        if source.name not in trained:
            return source
        if isinstance(source.items, StoredRows):
            return replace(source, items=source.items.with_prefix(f"val/{source.name}"))
        items = (replace(item, id=f"val/{item.id}") for item in source.items)
        return replace(source, items=tuple(items))

    return replace(held_out, sources=tuple(map(renamed, held_out.sources)))


def tag_shares(dataset: Dataset[Prompt]) -> dict[str, float]:
    """Return tag -> expected share of the drawn prompts with this tag. The shares follow from the
    weights of the sources, and sum to 1."""
    total = sum(source.weight for source in dataset.sources)
    shares: dict[str, float] = {}
    for source in dataset.sources:
        for tag, count in source.tags.items():
            part = source.weight / total * count / len(source.items)
            shares[tag] = shares.get(tag, 0.0) + part
    return shares


def samples_by_tag(shares: Mapping[str, float], samples: int) -> dict[str, float]:
    """Return tag -> expected number of samples with this tag, out of `samples` in total."""
    return {tag: share * samples for tag, share in shares.items()}


def check_domains(dataset: Dataset[Prompt], domains: Iterable[str]) -> None:
    """Raise DataError unless each of these tags occurs in the training prompts."""
    tags = dataset.tags
    for tag in domains:
        if tag not in tags:
            raise DataError(
                f"domains.{tag}: no training prompt has the tag {tag!r}{nearest(tag, tags)} "
                f"(tags of the data: {', '.join(sorted(tags))})"
            )


def check_pictures(dataset: Dataset[Prompt], engine: EngineConfig) -> None:
    """Raise ConfigError if a prompt has pictures and the engine of the policy takes none."""
    if not isinstance(engine, SglangConfig):
        return
    for prompt in dataset.in_memory:
        if prompt.pictures is not None:
            raise ConfigError(f"row {prompt.id} has pictures, and {NO_PICTURES}")


def check_tags(dataset: Dataset[Any], takes: str, takers: Iterable[Taker]) -> None:
    """Raise DataError unless every row has a tag that one of `takers` takes.

    This is checked on the data and not on the config, because tags may come from a column.

    Args:
        dataset: rows to check.
        takes: word for a taker in the error message, such as `reward`.
        takers: rewards, teachers or environments, each with its tags.
    """
    taken = {tag for taker in takers for tag in taker.tags}
    if taken.issuperset(dataset.tags):
        return
    for item in dataset.items:
        if item.tag not in taken:
            raise DataError(
                f"row {item.id} has the tag {item.tag!r}, which no {takes} takes "
                f"(tags with a {takes}: {', '.join(sorted(taken))})"
            )
