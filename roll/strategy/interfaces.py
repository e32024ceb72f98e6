"""Protocols of the backends. There is no base class: backends share functions instead.

Training and scoring methods are collective: every rank of a cluster calls them together, each rank
with its own share of the batch. Engines are asynchronous: one event loop drives all requests of a
replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from roll.algorithms.loss_interface import TermsLoss
from roll.core.batches import TokenBatch, TrainBatch
from roll.core.completion import Completion
from roll.core.metrics import Metrics
from roll.core.teacher_outputs import OutputHead
from roll.core.types import GenerateRequest, Heartbeat, RankInfo
from roll.weight_sync.channel import Channel
from roll.weight_sync.manifest import Manifest

T_co = TypeVar("T_co", covariant=True)
B = TypeVar("B", bound=TrainBatch)


class ScoreStrategy(Protocol[T_co]):
    """A model that computes forward passes only.

    `T` is the type of the results: `PolicyTerms` for a policy, `ValueTerms` for a critic,
    `ScoreTerms` for a reward model, `TeacherTerms` for a teacher.
    """

    @property
    def rank_info(self) -> RankInfo:
        """Place of this rank in the data parallel layout."""
        ...

    def score(self, batch: TokenBatch, *, entropy: bool = False, squares: bool = False) -> T_co:
        """Compute the results of all rows, in order, without gradients. Collective.

        Tensors of the result have shape `[B, T]`, are on the CPU, and are 0 at padding and at
        position 0. A teacher takes a TrainBatch and gives a `TeacherRow` of the trained tokens for
        each row, in place of such tensors; ranks that are no data parallel leader may give none.

        Args:
            entropy: also compute a policy's entropy at each token; other models ignore this.
            squares: also compute the sum of a policy's squared probabilities at each token; other
                models ignore this.
        """
        ...

    def output_head(self) -> OutputHead:
        """Return the full layer that turns hidden states into logits, on the CPU. Collective.

        Raises:
            ConfigError: the model changes its logits in a way that students cannot follow.
        """
        ...

    def offload(self) -> None:
        """Move parameters and optimizer state off the device; a no-op on CPUs."""
        ...

    def onload(self) -> None:
        """Move parameters and optimizer state back to the device; a no-op on CPUs."""
        ...

    def close(self) -> None:
        """Leave the process groups. No other method may be called afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class Saving:
    """A checkpoint that has begun, as far as this rank has to write it. Neither function sends
    anything to other ranks, so both may run in a thread beside the training."""

    write: Callable[[], None]
    """Function that writes the files of this rank."""
    complete: Callable[[], None]
    """Function that writes what belongs to all ranks. Only rank 0 calls it, after `write` has ended
    on every rank."""


class TrainStrategy(ScoreStrategy[T_co], Protocol[T_co]):
    """A model that can be trained, in addition to scoring."""

    def train(self, batch: B, loss: TermsLoss[T_co, B]) -> Metrics:
        """Take one optimizer step on the rows of all ranks and return the metrics of this rank.

        Collective. Merging the metrics of all data parallel leaders gives those of the update. The
        step is skipped if the gradient norm is zero or not finite; the learning rate schedule
        advances even then.

        Raises:
            ConfigError: the model was built without an optimizer.
            ValueError: `batch.token_weights` is not set.
        """
        ...

    def weight_manifest(self, *, adapter: bool = False) -> Manifest:
        """Return the Hugging Face names, the shapes and the dtypes of the weights.

        The manifest also says which rank sends which part of each tensor. Every rank gets the same
        manifest. Not collective.

        Args:
            adapter: describe only the LoRA factors of the model's adapter, under PEFT's names.
        """
        ...

    def frozen_weights(self) -> frozenset[str]:
        """Return the names in the manifest whose values never change. Not collective."""
        ...

    def export_parts(self, *, adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of each tensor, in the order of the manifest.

        All ranks exhaust the iterator together. A part that is the full tensor has its shape; any
        other part is flat, and may be empty. Parts may have another floating-point dtype than the
        manifest says. They may share memory with the model: use them before the next update.

        Args:
            adapter: yield only the LoRA factors of the model's adapter. If False, the weights are
                yielded with the adapter added to them.
        """
        ...

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and full tensors in the order of the manifest.

        All ranks exhaust the iterator together.
        """
        ...

    def begin_save(self, path: Path, *, copied: bool, optimizer: bool) -> Saving:
        """Return what this rank has to do to write the states of model, optimizer, schedule and
        RNGs to the folder `path`, which is made if it does not exist. Collective.

        Args:
            copied: copy the states to the memory of the machine, so that the next update does not
                change what is written. If False, both functions must be called before it.
            optimizer: write the state of the optimizer, too.

        Raises:
            ConfigError: the model was built without an optimizer.
        """
        ...

    def save(self, path: Path, *, optimizer: bool = True) -> None:
        """Do all of `begin_save` at once. Collective.

        Raises:
            ConfigError: the model was built without an optimizer.
            CheckpointError: a rank could not write. All ranks raise an error.
        """
        ...

    def load(self, path: Path) -> None:
        """Restore the states that `save` wrote, also if the number of ranks has changed.

        Collective. A rank that the saving run did not have keeps its random states.

        Raises:
            ConfigError: the model was built without an optimizer.
            CheckpointError: files are missing or damaged, or belong to another model.
        """
        ...

    def score_base(self, batch: TokenBatch) -> T_co:
        """Compute the same results as `score` with the reference: the copy that follows the
        weights, or else the model with its adapter switched off.

        Collective. No entropy is computed.

        Raises:
            ConfigError: the model has neither.
        """
        ...

    def save_hf(self, path: Path, *, merged: bool = False) -> None:
        """Write a folder that `from_pretrained` of the model's class loads, tokenizer included.

        A language model gets the layers that predict further tokens (MTP), if they are not trained,
        from the checkpoint at `model.path`.

        If the model has an adapter, write the adapter alone, in PEFT's format. Collective; rank 0
        writes.

        Args:
            merged: if the model has an adapter, write the full model with the adapter added to
                the weights.
        """
        ...


@runtime_checkable
class KeepsReference(Protocol):
    """A model that keeps a copy of its trained weights, with which `score_base` computes."""

    def move_reference(self, decay: float) -> None:
        """Make the copy `decay` times itself plus 1 - `decay` times the weights. Every rank calls
        this, but nothing is sent."""
        ...


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Report of an engine after it has loaded new weights."""

    version: int
    """Version of the new weights."""
    num_tensors: int
    num_bytes: int
    checksum: str | None
    """Checksum of the received tensors; None unless verification was requested. Equal to the
    sender's `SendReport.checksum`."""
    receive_s: float = 0.0
    """Time that the slowest process of the replica waited for bytes and copied them, in seconds."""
    load_s: float = 0.0
    """Time spent on writing the weights into the engine's own memory layout, in seconds."""


class EnginePart(Protocol):
    """Part of an inference engine on one of its further nodes."""

    async def follow(self) -> None:
        """Compute what the engine asks for, until this part fails or is closed.

        Raises:
            EngineMissingError: the engine is not installed here, or its version is not supported.
            EngineError: this part could not start, or one of its processes died.
        """
        ...

    async def close(self) -> None:
        """Stop the processes of this part."""
        ...


class InferenceStrategy(Protocol):
    """Replica of an inference engine. All methods run on one event loop.

    After one of the engine's processes has died, every method raises EngineDiedError, and running
    calls end within seconds.
    """

    async def start(self) -> None:
        """Load the model; return when the engine can serve requests.

        Raises:
            EngineMissingError: the engine is not installed, or its version is not supported. The
                message names what to install.
        """
        ...

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Generate `request.n` completions, in sibling order. After `abort` they end with ABORT.

        Raises:
            EngineError: the request was refused.
            IncompleteWeightsError: a push of weights failed partway, during the request or before.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a running request. An unknown id is ignored."""
        ...

    async def heartbeat(self) -> Heartbeat:
        """Make a round trip to the process that computes, and report the newly generated tokens.

        The report covers the tokens generated since the last heartbeat. The method does not return
        while that process is stopped or stuck: the caller sets the time limit. If the caller gives
        up a call, pieces of the report may be lost; the start position of later pieces shows the
        gap.
        """
        ...

    async def load_weights(
        self, channel: Channel, version: int, *, receiver: int, verify: bool
    ) -> LoadReport:
        """Replace all weights by those that arrive on `channel`.

        Tokens generated afterwards are marked with `version`. Running requests pause, then continue
        with the new weights; their KV cache is recomputed.

        Args:
            version: version of the new weights.
            receiver: index of the replica's first process among the receivers of this push. The
                indices of its other processes follow.
            verify: compute a checksum of the received tensors.

        Raises:
            WeightSyncError: a name is unknown, missing or duplicate, or a shape differs. This is
                checked before the first byte is received, so the old weights stay in use. Or the
                push failed partway: running requests end with an IncompleteWeightsError, and the
                engine refuses requests until a push has succeeded.
        """
        ...

    async def sleep(self, *, drop_weights: bool = False) -> None:
        """Free device memory between rollouts; a no-op on CPUs.

        Args:
            drop_weights: the weights need not be kept, because a push of all of them comes before
                the next request. Engines may keep them all the same.

        The driver receives any exception of `sleep` and `wake` as an EngineError.
        """
        ...

    async def wake(self, *, weights_only: bool = False) -> None:
        """Allocate again the device memory that `sleep` freed.

        Args:
            weights_only: allocate memory for the weights only. This is enough for `load_weights`,
                but not for `generate`.
        """
        ...

    async def close(self) -> None:
        """Stop the engine and every process it started."""
        ...


@runtime_checkable
class ServesAdapters(Protocol):
    """An engine that can hold a LoRA adapter separately from the weights of the model."""

    async def load_adapter(
        self, channel: Channel, version: int, *, receiver: int, alpha: float, verify: bool
    ) -> LoadReport:
        """Replace the LoRA adapter by the one that arrives on `channel`; keep the model's weights.

        Arguments and errors are those of `InferenceStrategy.load_weights`, except `alpha`.

        Args:
            alpha: LoRA's alpha: the adapter adds `alpha / rank * B @ A` to each adapted weight.
        """
        ...
