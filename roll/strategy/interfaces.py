"""What a backend can do. Three small protocols and no base class: backends share functions.

Training and scoring methods are collective: every rank of a cluster calls them with its own share
of the batch. Engines are asynchronous: one event loop drives all requests of a replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from roll.algorithms.loss_interface import TermsLoss
from roll.core.batches import TokenBatch, TrainBatch
from roll.core.metrics import Metrics
from roll.core.teacher_outputs import OutputHead
from roll.core.types import Completion, GenerateRequest, Heartbeat, RankInfo
from roll.weight_sync.channel import Channel
from roll.weight_sync.manifest import Manifest

T_co = TypeVar("T_co", covariant=True)
B = TypeVar("B", bound=TrainBatch)


class ScoreStrategy(Protocol[T_co]):
    """Forward passes only. T is what they give: `PolicyTerms`, `ValueTerms` of a critic,
    `ScoreTerms` of a reward model, `TeacherTerms` of a teacher."""

    @property
    def rank_info(self) -> RankInfo: ...

    def score(self, batch: TokenBatch, *, entropy: bool = False) -> T_co:
        """`[B, T]` on the CPU, without gradients, rows in given order."""
        ...

    def output_head(self) -> OutputHead:
        """The layer that makes logits of hidden states, whole and on the CPU; collective.

        Raises:
            ConfigError: the backend cannot tell it.
        """
        ...

    def offload(self) -> None:
        """Move parameters and optimizer state off the device; a no-op on CPUs."""
        ...

    def onload(self) -> None: ...

    def close(self) -> None: ...


class TrainStrategy(ScoreStrategy[T_co], Protocol[T_co]):
    """A model that learns."""

    def train(self, batch: B, loss: TermsLoss[T_co, B]) -> Metrics:
        """One optimizer step on the rows of all ranks. `batch.token_weights` must be set."""
        ...

    def weight_manifest(self, *, adapter: bool = False) -> Manifest:
        """Names, shapes and dtypes of the weights, under Hugging Face names, and which rank holds
        what of them. The same on every rank; not collective.

        Args:
            adapter: of the factors of the model's adapter instead, under PEFT's names.
        """
        ...

    def frozen_weights(self) -> frozenset[str]:
        """Names in the manifest whose values never change; not collective."""
        ...

    def export_parts(self, *, adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        """What this rank holds of each tensor of the manifest, in its order, one at a time. An
        adapter is added to the weights, unless it is exported by itself.

        All ranks exhaust it together. Parts may have another floating dtype than the manifest
        says, and may share memory with the model: use them before the next update.
        """
        ...

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors as the manifest says, one at a time. All ranks exhaust it together."""
        ...

    def save(self, path: Path) -> None:
        """Model, optimizer, schedule and RNG states into the folder `path`."""
        ...

    def load(self, path: Path) -> None:
        """What `save` wrote, on any number of ranks.

        Raises:
            CheckpointError: files are missing or belong to another model.
        """
        ...

    def score_base(self, batch: TokenBatch) -> T_co:
        """As `score`, with the adapter switched off.

        Raises:
            ConfigError: there is none.
        """
        ...

    def save_hf(self, path: Path, *, merged: bool = False) -> None:
        """A folder that `from_pretrained` of the model's class loads, tokenizer included.

        Of a model with an adapter it holds the adapter alone, in PEFT's format, unless `merged`.
        """
        ...


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an engine says after new weights."""

    version: int
    num_tensors: int
    num_bytes: int
    checksum: str | None
    """Of the received tensors, when asked for; equals the sender's `SendReport.checksum`."""
    receive_s: float = 0.0
    """Waited for bytes, and took them in; of the slowest process of the replica."""
    load_s: float = 0.0
    """Put them where the model computes with them, which engines do in layouts of their own."""


class InferenceStrategy(Protocol):
    """One engine replica. All methods run on one event loop.

    Every method raises EngineDiedError once one of the engine's processes is gone; calls that are
    under way then end within seconds.
    """

    async def start(self) -> None:
        """Load the model; returns when the engine can serve.

        Raises:
            EngineMissingError: not installed or not in the supported range; says what to install.
        """
        ...

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """`request.n` completions, in sibling order. After `abort` they end with ABORT.

        Raises:
            EngineError: the request was refused.
            IncompleteWeightsError: a push of weights broke off while it ran, or before it.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a running request; unknown ids are fine."""
        ...

    async def heartbeat(self) -> Heartbeat:
        """A round trip to the innermost process, and what was written since the last one.

        It does not return while that process is stopped or stuck: the caller sets the time limit.
        A call that is given up may lose pieces; later ones show it by where they begin.
        """
        ...

    async def load_weights(
        self, channel: Channel, version: int, *, receiver: int, verify: bool
    ) -> LoadReport:
        """Replace all weights by those that arrive on `channel`; later tokens carry `version`.

        Requests under way pause and go on with the new weights, their KV cache computed anew.

        Args:
            receiver: index, in this push, of the replica's first process; the others follow.

        Raises:
            WeightSyncError: a name is unknown, missing or duplicate, or a shape differs; checked
                before the first byte, the old weights stay in use. Or the push broke off: requests
                under way end with an IncompleteWeightsError, and none is taken until a push has
                succeeded.
        """
        ...

    async def sleep(self) -> None:
        """Free device memory between rollouts; a no-op on CPUs. Whatever it raises is told to the
        driver as an EngineError, and so is what `wake` raises."""
        ...

    async def wake(self, *, weights_only: bool = False) -> None:
        """Take the memory back; `weights_only` does for `load_weights`, but not for `generate`."""
        ...

    async def close(self) -> None:
        """Stop the engine and every process it started."""
        ...


@runtime_checkable
class ServesAdapters(Protocol):
    """An engine that keeps a LoRA adapter beside its weights."""

    async def load_adapter(
        self, channel: Channel, version: int, *, receiver: int, alpha: float, verify: bool
    ) -> LoadReport:
        """As `InferenceStrategy.load_weights`, of the adapter alone: the weights stay.

        Args:
            alpha: the adapter adds alpha / rank * B A to each weight.
        """
        ...
