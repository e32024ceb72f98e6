"""`SampleWriter`: writes the samples of steps and validations as Parquet, beside the run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.config.sections.model import ModelConfig
from roll.core.types import Sample, WorkerSpec
from roll.distributed.remote_contents import fetch_samples
from roll.distributed.worker import Worker
from roll.output_dir.sample_files import Origin, Split, sample_file, write_samples
from roll.rollout.types import ScoredSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS = 512
"""Number of samples whose tokens are fetched, converted and written at a time."""


@dataclass(frozen=True, slots=True)
class SampleJob:
    """Samples of one file."""

    step: int
    split: Split
    samples: Sequence[ScoredSample]
    """Samples whose tokens are here or elsewhere."""
    sets: Sequence[str | None]
    """Name of the validation set of each sample; None in training."""
    baselines: Sequence[float | None]
    """Reward of the greedy response to the prompt of each sample: None without such a response, NaN
    if a reward failed on it."""


class SampleWriter(Worker):
    """The worker of `samples`, on the machine of the driver, where the folder of the run is.

    The tokens come from the object stores of the engines' nodes, so they do not pass the driver.

    Args:
        output_dir: folder of the run.
        model: model whose tokenizer reads the turns of agents.
        origin: what the samples are made with.
    """

    def __init__(
        self, spec: WorkerSpec, output_dir: Path, model: ModelConfig, origin: Origin
    ) -> None:
        super().__init__(spec)
        self._output_dir = output_dir
        self._model = model
        self._origin = origin

    async def write(self, job: SampleJob) -> str | None:
        """Write a file; return why it could not be written, or None if it is complete.

        Raises:
            WaitTimeoutError: tokens did not arrive in time.
            WorkerError: tokens are lost with their node.
        """
        return await asyncio.to_thread(self.write_file, job)

    def write_file(self, job: SampleJob) -> str | None:
        """Do what `write` does, in the thread of the caller."""
        path = sample_file(self._output_dir, job.split, job.step)
        try:
            write_samples(path, self._tables(job), self._origin)
        except OSError as error:
            return f"{path}: {error.strerror or error}"
        return None

    def _tables(self, job: SampleJob) -> Iterator[Any]:
        """Return an iterator over the job's samples in tables of `ROWS` rows."""
        # Here: the driver and most other workers import this module for its types.
        from roll.workers.sample_writer.table import table_of

        for begin in range(0, len(job.samples), ROWS):
            rows = slice(begin, begin + ROWS)
            yield table_of(
                with_tokens(job.samples[rows]),
                step=job.step,
                split=job.split,
                sets=job.sets[rows],
                baselines=job.baselines[rows],
                read=self._read,
            )

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        # Only when it is needed: most samples have no turns, and its library loads slowly.
        from roll.models.load import load_tokenizer

        return load_tokenizer(self._model, fetch=False)

    def _read(self, tokens: Sequence[int]) -> str:
        """Decode token ids to text, special tokens included."""
        return str(self._tokenizer.decode(tokens))


def with_tokens(samples: Sequence[ScoredSample]) -> list[ScoredSample]:
    """Return the samples with the tokens of all their rows here; errors as in `contents_here`."""
    here = iter(fetch_samples([row for scored in samples for row in scored.rows]))
    found = []
    for scored in samples:
        rows: list[Sample] = [next(here) for _ in scored.rows]
        found.append(replace(scored, sample=rows[0], branches=tuple(rows[1:])))
    return found
