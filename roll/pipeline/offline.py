"""`OfflinePipeline`: base class of the pipelines that train on given rows and generate nothing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from roll.algorithms.loss_interface import TermsLoss
from roll.algorithms.weights import token_weights
from roll.config.algorithm import Aggregation
from roll.config.offline import DistillationConfig, SftConfig
from roll.config.offline_base import OfflineConfig, PreferenceConfig
from roll.config.sections.roles import Role
from roll.core.batches import TrainBatch
from roll.core.errors import RollError, ValidationCutError
from roll.core.metrics import Last, Metrics
from roll.data.chat.templates import DatedTokenizer
from roll.data.chat.variables import check_variables
from roll.data.examples import Example, content_of, identity, load_preferences, load_texts
from roll.data.mixing import Sampler
from roll.data.preparation.overlap import without_overlap
from roll.data.store.load import RowStore
from roll.distributed.cluster import Cluster, Placement
from roll.models.load import load_tokenizer
from roll.output_dir.checkpoints import RunState
from roll.output_dir.resume import rendering_moment
from roll.pipeline.base import Pipeline
from roll.pipeline.updates import balanced
from roll.runtime.device_sharing import DeviceSharing
from roll.runtime.pictures.examples import ExamplePictures
from roll.runtime.run_data import RunData, apart, placeholders
from roll.strategy.training.heads import Head
from roll.workers.learner import LearnerWorker

C = TypeVar("C", bound=OfflineConfig)
B = TypeVar("B", bound=TrainBatch)
T = TypeVar("T")
L = TypeVar("L", bound=LearnerWorker[Any, Any])

REPORTED = {"nll": "loss", "preference_loss": "loss"}
"""Name of a loss's metric -> its name in the validation scores; other metrics keep their names."""


def load_offline(config: OfflineConfig) -> RunData[Example]:
    """Read and tokenize all rows for training and validation.

    Raises:
        ConfigError: the tokenizer cannot be loaded, or rows have pictures and the model takes none.
        CheckpointError: the checkpoint to resume from, which holds the date for chat templates, is
            not in the format of this version.
        DataError: a source cannot be read, or none of its rows can be used.
    """
    tokenizer, moment = load_tokenizer(config.train_model), rendering_moment(config)
    check_variables("data.chat_template_kwargs", config.data.chat_template_kwargs, tokenizer)
    dated = DatedTokenizer(tokenizer, moment)
    seen = placeholders(config.train_model, config.data.pictures)
    store = RowStore.at(config.data.cache)
    if isinstance(config, SftConfig | DistillationConfig):
        train = load_texts(config.data.sources, config.data, dated, seen, store)
        held_out = load_texts(config.validation.sets, config.data, dated, seen, store)
    else:
        assert isinstance(config, PreferenceConfig)
        train = load_preferences(config.data.sources, config.data, dated, seen, store)
        held_out = load_preferences(config.validation.sets, config.data, dated, seen, store)
    held_out = apart(held_out, train)
    train = without_overlap(train, held_out, config.data.overlap, content_of, identity)
    return RunData(tokenizer, train, held_out, moment)


class OfflinePipeline(Pipeline[C], Generic[C, B, L]):
    """Run that trains on given rows. A subclass makes the batches, and starts the cluster that
    learns from them (in `open`, with `start_learner`)."""

    data: RunData[Example]
    learner: Cluster[L]
    aggregation: Aggregation
    """Rule that combines the losses of all tokens of an update into one number."""

    @classmethod
    def prepare(cls, config: C) -> tuple[C, RunData[Example]]:
        """Load the rows; return the config, with `max_steps` computed from `epochs` if these are
        set, and the rows.

        Raises:
            ConfigError, CheckpointError, DataError: see `load_offline` and
                `OfflineConfig.with_steps`.
        """
        data = load_offline(config)
        return config.with_steps(len(data.train)), data

    @abstractmethod
    def make_batch(self, examples: Sequence[Example]) -> B:
        """Return the rows as a batch, with all fields that the loss needs."""

    def start_learner(self, worker: type[L], head: Head[T], loss: TermsLoss[T, Any]) -> None:
        """Start the cluster of `actor_train` as `learner`; set up `rows`, `pictures` and `sharing`.

        Args:
            worker: class of the workers.
            head: output of the model's forward pass, which the loss reads.
            loss: loss to minimise.
        """
        config, role = self.config, self.config.actor_train
        self.rows, self.rows_ahead = (
            Sampler(self.data.train, seed=config.seed, shuffle=config.data.shuffle)
            for _ in range(2)
        )
        self.pictures = ExamplePictures.start(config, self.data, self.launcher, self.loop)
        self.sharing = DeviceSharing(config, taking_turns=self.platform == "cuda")
        cluster = self.launcher.start(
            worker,
            Placement(Role.ACTOR_TRAIN, pool=role.pool, seed=config.seed, env=role.env),
            role,
            config.train_model,
            head,
            loss,
            config.total_updates(),
        )
        self.learner = self.sharing.share(Role.ACTOR_TRAIN, cluster)

    def step(self, step: int) -> Metrics:
        """Draw the rows of one optimizer step, train on them, and return the metrics."""
        batch = self.make_batch(self.draw())
        self.pictures.begin(self.ahead())
        weights_BT = token_weights(batch.loss_mask, self.aggregation)
        batch = replace(batch, token_weights=weights_BT)
        with self.sharing.colocation.use(Role.ACTOR_TRAIN), self.timers.timed("train"):
            update = balanced(batch, self.learner.dp_size)
            metrics = self.learner.call(LearnerWorker.train, update)
        tokens = int(batch.lengths.sum())
        rate = tokens / max(self.timers.seconds("train"), 1e-9)
        return (
            metrics
            | self.pictures.take_metrics()
            | {
                "perf/trained_tokens_per_s": Last(rate),
                "data/tokens": Last(tokens),
                "data/epoch": Last(
                    (step + 1) * self.config.data.rows_per_step / len(self.data.train)
                ),
            }
        )

    def ahead(self) -> list[Example]:
        """Return the rows that the next step will draw, unless some of them are broken; empty if no
        row has pictures."""
        if self.pictures.maker is None:
            return []
        self.rows_ahead.restore(self.rows.state(), self.data.train.find)
        drawn: list[Example] = []
        for _ in range(self.config.data.rows_per_step):
            drawn.append(next(self.rows_ahead))
            self.rows_ahead.settle(drawn[-1])
        return drawn

    def draw(self) -> list[Example]:
        """Return the rows of the next step, with the patches of their pictures, and mark them as
        used in `rows`. Other rows replace those with broken pictures.

        Raises:
            RollError: so many rows were replaced one after another that none may be left.
        """
        drawn: list[Example] = []
        replaced = 0
        while missing := self.config.data.rows_per_step - len(drawn):
            found = [next(self.rows) for _ in range(missing)]
            for example, made in zip(found, self.pictures.made(found), strict=True):
                if made is None:
                    self.rows.replace(example)
                    replaced += 1
                else:
                    self.rows.settle(example)
                    drawn.append(made)
                    replaced = 0
            if replaced > 2 * len(self.data.train):
                raise RollError("no row is left: the pictures of all of them are broken (see log)")
        return drawn

    def validate(self, step: int) -> dict[str, float]:
        """Return `val/<set>/<score>` and `time/validate_s` after `step` steps; empty if none is
        due."""
        if not self.config.validation.due(step, last=self.config.max_steps):
            return {}
        scores: dict[str, float] = {}
        with self.timers.timed("validate"):
            for source in self.data.held_out.sources:
                for name, value in self.evaluate(source.items).values_by_name().items():
                    scores[f"val/{source.name}/{REPORTED.get(name, name)}"] = value
        return {**scores, **self.timers.take().values_by_name()}

    def evaluate(self, examples: Sequence[Example]) -> Metrics:
        """Return the metrics of the loss over all `examples`, without training; ValidationCutError
        if the run is asked to end meanwhile."""
        parts = []
        for some in _chunks(examples, self.config.data.rows_per_step):
            if self.wish.reason:
                raise ValidationCutError(self.wish.reason)
            found = self.pictures.made(some, counted=False)
            made = [example for example in found if example is not None]
            if not made:
                continue
            batch = filled(self.make_batch(made), self.learner.dp_size)
            with self.sharing.colocation.use(Role.ACTOR_TRAIN):
                parts.append(self.learner.call(LearnerWorker.evaluate, batch))
        return Metrics.concat(parts) if parts else Metrics()

    def restore(self, checkpoint: Path | None, state: RunState | None) -> None:
        """Restore the position in the data and the models from a checkpoint; CheckpointError if the
        data or the model is another. Without a checkpoint, do nothing."""
        if checkpoint is not None and state is not None:
            self.rows.restore(state.sampler, self.data.train.find)
            self.load(checkpoint)
        self.timers.take()

    def learners(self) -> dict[Role, Cluster[Any]]:
        return {Role.ACTOR_TRAIN: self.learner}

    def exclusive_devices(self, role: Role) -> AbstractContextManager[None]:
        return self.sharing.colocation.use(role)

    def sampler_state(self) -> dict[str, Any]:
        return self.rows.state()

    def close(self) -> None:
        """Do nothing: `open` starts only clusters, which the launcher ends."""


def filled(batch: B, ranks: int) -> B:
    """Return the batch, filled up until its units (pairs, or single rows) divide evenly over the
    ranks. The added units are copies of the last one with an empty loss mask."""
    missing = -(len(batch) // batch.unit) % ranks
    if not missing:
        return batch
    last = [len(batch) - batch.unit + i for i in range(batch.unit)]
    more = batch.select(last * missing)
    more = replace(more, loss_mask=torch.zeros_like(more.loss_mask))
    return type(batch).concat([batch, more])


def _chunks(examples: Sequence[Example], size: int) -> Iterator[Sequence[Example]]:
    """Yield the examples in chunks of `size`; the last chunk may be smaller. A last chunk of a
    single example is joined to the one before, because some losses compare rows."""
    starts = list(range(0, len(examples), size))
    if len(starts) > 1 and len(examples) - starts[-1] == 1:
        starts.pop()
    for start, stop in zip(starts, [*starts[1:], len(examples)], strict=True):
        yield examples[start:stop]
