"""`InferWorker`: hosts one inference engine, a replica."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from roll.config.sections.model import ModelConfig
from roll.config.sections.training import InferRole
from roll.core.completion import Completion, FinishReason
from roll.core.errors import EngineError
from roll.core.types import (
    GenerateRequest,
    Heartbeat,
    SamplingParams,
    WorkerPart,
    WorkerSpec,
)
from roll.distributed.dispatch import dispatch
from roll.distributed.remote_contents import CONTENTS_APART
from roll.distributed.worker import Follower, Worker
from roll.models.load import load_tokenizer
from roll.platform.processes import stopped_below
from roll.rewards.decoding import Decode, make_decode
from roll.strategy.build import build_engine, build_engine_part
from roll.strategy.interfaces import LoadReport, ServesAdapters
from roll.weight_sync.channel import Channel
from roll.weight_sync.transport_choice import Endpoint
from roll.weight_sync.transports.kept_groups import KEPT


class InferFollower(Follower):
    """The part of a replica on a further node, for an engine that lies on several.

    Args:
        max_model_len: as for `InferWorker`.
    """

    starts_processes = True

    def __init__(
        self, spec: WorkerSpec, role: InferRole, model: ModelConfig, max_model_len: int
    ) -> None:
        super().__init__(spec)
        self.part = build_engine_part(role, model, spec, max_model_len=max_model_len)

    async def follow(self) -> None:
        """Start the engine's processes on this node, and watch them; errors as in `EnginePart`."""
        await self.part.follow()

    def stopped_processes(self) -> list[str]:
        """Return id and name of each process of the engine that a signal has stopped."""
        return stopped_below(os.getpid())

    async def close(self) -> None:
        """Stop the engine's processes on this node."""
        await self.part.close()
        super().close()


class InferWorker(Worker):
    """A replica of `actor_infer`. All methods run on one event loop, which serves many requests.

    Args:
        max_model_len: maximum length of prompt plus response, in tokens; see `build_engine`.
    """

    starts_processes = True
    follower = InferFollower
    model: ModelConfig | None = None
    """Model whose tokenizer decodes completions; None: they are not decoded here."""
    _decode: Decode | None = None

    def __init__(
        self, spec: WorkerSpec, role: InferRole, model: ModelConfig, max_model_len: int
    ) -> None:
        super().__init__(spec)
        self.engine = build_engine(role, model, spec, max_model_len=max_model_len)
        self.lora = model.lora if model.serves_adapter else None
        self.model = model

    async def start(self) -> None:
        """Load the model and its tokenizer. Return when the engine can serve requests."""
        if self.model is not None:
            self._decode = make_decode(await asyncio.to_thread(load_tokenizer, self.model))
        await self.engine.start()

    @dispatch(CONTENTS_APART)
    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Generate the completions of a request; see `InferenceStrategy.generate`. Finished ones
        have their text: to decode all of them would take most of the driver's time."""
        written = await self.engine.generate(request)
        return [self._with_text(one, request.sampling) for one in written]

    def _with_text(self, written: Completion, sampling: SamplingParams) -> Completion:
        """Return the completion with its text, unless another replica will continue it."""
        if self._decode is None or written.finish is FinishReason.ABORT:
            return written
        return written.with_text(sampling.text_of(written, self._decode))

    async def abort(self, request_id: str) -> None:
        """End a running request, whose call of `generate` then returns; ignore an unknown id."""
        await self.engine.abort(request_id)

    async def heartbeat(self) -> Heartbeat:
        """Ask the engine for its progress; see `InferenceStrategy.heartbeat`.

        The answer carries the tokens that running requests have written since the last heartbeat.
        Each token is reported once, so only one caller may ask.
        """
        return await self.engine.heartbeat()

    def stopped_processes(self) -> list[str]:
        """Return id and name of each process of the engine that a signal has stopped."""
        return stopped_below(os.getpid())

    async def places(self) -> list[Endpoint]:
        """Return node, device and host of each process of this replica, in the order in which the
        processes are numbered as receivers of weights."""
        spec = self.spec
        parts = spec.parts or (WorkerPart(spec.node, spec.host, spec.devices),)
        return [Endpoint(part.node, each, part.host) for part in parts for each in part.devices]

    async def load_weights(
        self, channel: Channel, version: int, receivers: Mapping[int, int], verify: bool
    ) -> LoadReport:
        """Replace the engine's weights, or its adapter, by those that arrive on `channel`. The
        errors are those of `InferenceStrategy.load_weights`.

        Args:
            version: version of these weights, which later tokens carry.
            receivers: rank of each replica -> index of its first process among the receivers.
            verify: check the weights by their checksum.
        """
        receiver = receivers[self.spec.rank]
        if self.lora is not None:
            assert isinstance(self.engine, ServesAdapters)  # `roll check` rejects other engines
            return await self.engine.load_adapter(
                channel, version, receiver=receiver, alpha=self.lora.alpha, verify=verify
            )
        return await self.engine.load_weights(channel, version, receiver=receiver, verify=verify)

    async def sleep(self, drop_weights: bool = False) -> None:
        """Free device memory between rollouts; see `InferenceStrategy.sleep`.

        Raises:
            EngineError: the engine failed for any reason. It is then unknown how much device memory
                the engine holds.
        """
        with self._moving("give its device memory back"):
            await self.engine.sleep(drop_weights=drop_weights)

    async def wake(self, weights_only: bool = False) -> None:
        """Take device memory again; see `InferenceStrategy.wake`. Errors are those of `sleep`."""
        with self._moving("take its device memory back"):
            await self.engine.wake(weights_only=weights_only)

    async def close(self) -> None:
        """Stop the engine and all processes that it started."""
        await self.engine.close()
        await asyncio.to_thread(KEPT.close)  # of an engine in this process
        super().close()

    @contextmanager
    def _moving(self, doing: str) -> Iterator[None]:
        """Turn any exception inside the block into an EngineError. Most of these failures are lack
        of memory, and each engine (and each kind of its processes) raises a different exception."""
        try:
            yield
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(
                f"the engine of {self.spec.name} could not {doing}: {type(error).__name__}: {error}"
            ) from error
