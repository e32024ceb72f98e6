"""The data of a run, read and checked by the driver before anything expensive is started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from roll.config.rlvr import RlvrConfig
from roll.core.errors import DataError
from roll.core.types import Prompt
from roll.data.chat.templates import DatedTokenizer
from roll.data.datasets import Dataset, Item, load_prompts
from roll.models.load import load_tokenizer
from roll.output_dir.resume import rendering_moment

Row = TypeVar("Row", bound=Item)


class Taker(Protocol):
    """Somebody who takes rows of some tags."""

    @property
    def tags(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class RunData(Generic[Row]):
    """Rows to train on and to validate on."""

    tokenizer: PreTrainedTokenizerBase
    train: Dataset[Row]
    held_out: Dataset[Row]
    rendered_at: datetime
    """What chat templates took for now."""


def load_data(config: RlvrConfig) -> RunData[Prompt]:
    """Read and tokenize everything.

    Raises:
        CheckpointError: the checkpoint to go on from, whose day templates are told, is not of this
            version.
        ConfigError: no tokenizer.
        DataError: a source cannot be read, or a prompt has a tag that no reward or teacher takes.
    """
    tokenizer, moment = load_tokenizer(config.train_model), rendering_moment(config)
    dated = DatedTokenizer(tokenizer, moment)
    train = load_prompts(config.data.sources, config.data, dated)
    held_out = load_prompts(config.validation.sets, config.data, dated)
    if config.rewards:
        for dataset in (train, held_out):
            check_tags(dataset, "reward", config.rewards.values())
    if config.teachers:
        check_tags(train, "teacher", config.teachers.values())
    return RunData(tokenizer, train, held_out, moment)


def tag_shares(dataset: Dataset[Prompt]) -> dict[str, float]:
    """Tag -> share of the prompts that are drawn, by the weights of the sources; sums to 1."""
    total = sum(source.weight for source in dataset.sources)
    shares: dict[str, float] = {}
    for source in dataset.sources:
        for tag, count in Counter(prompt.tag for prompt in source.items).items():
            part = source.weight / total * count / len(source.items)
            shares[tag] = shares.get(tag, 0.0) + part
    return shares


def samples_by_tag(shares: Mapping[str, float], samples: int) -> dict[str, float]:
    """Expected samples of each tag among `samples`."""
    return {tag: share * samples for tag, share in shares.items()}


def check_tags(dataset: Dataset[Any], takes: str, takers: Iterable[Taker]) -> None:
    """Tags that come from a column are known only when the data are.

    Args:
        takes: what a taker of tags is called.

    Raises:
        DataError: a row has a tag that nobody takes.
    """
    taken = {tag for taker in takers for tag in taker.tags}
    for item in dataset.items:
        if item.tag not in taken:
            raise DataError(
                f"row {item.id} has the tag {item.tag!r}, which no {takes} takes "
                f"(tags with a {takes}: {', '.join(sorted(taken))})"
            )
