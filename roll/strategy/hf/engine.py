"""Generation with plain Hugging Face forward passes: exact, and available without other packages.

Requests run concurrently: a single thread computes the decoding steps of all requests in turn.
Between two steps requests start, end or are aborted, and weights are replaced. Steps of different
requests are not batched together, because the numbers of a request would then depend on other
requests, and a run would not be reproducible bit by bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from roll.config.sections.engines import HfEngineConfig
from roll.core.completion import Completion
from roll.core.errors import EngineDiedError, EngineError, IncompleteWeightsError, WeightSyncError
from roll.core.types import GenerateRequest, Heartbeat
from roll.models.load import load_causal_lm, load_tokenizer
from roll.models.vision.tower import find_tower
from roll.platform.cuda import free_cached
from roll.strategy.backend_setup import EngineSetup
from roll.strategy.hf.decoding import Decoding
from roll.strategy.hf.grammar import Grammars, Matcher
from roll.strategy.hf.memory import WeightMemory
from roll.strategy.hf.passes import Weights
from roll.strategy.interfaces import LoadReport
from roll.strategy.serving.pictures import PictureReader
from roll.strategy.serving.progress import Progress
from roll.strategy.serving.report import numbers_of
from roll.weight_sync.channel import Channel
from roll.weight_sync.checks import check_shapes
from roll.weight_sync.manifest import Manifest, TensorMeta
from roll.weight_sync.transfer import receive

P = ParamSpec("P")
R = TypeVar("R")


class HfEngine:
    """Implementation of `InferenceStrategy` without an external engine."""

    def __init__(self, config: HfEngineConfig, setup: EngineSetup) -> None:
        self._spec = setup.spec
        self._config = setup.model
        self._dtype: torch.dtype = getattr(torch, setup.dtype)
        self._max_model_len = setup.max_model_len
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hf-engine")
        """Thread for all work on the model, done in order; the event loop is never blocked."""
        self._running: dict[str, Decoding] = {}
        self._pictures = PictureReader(setup.model)
        self._preparing: set[str] = set()
        """Ids of the requests whose pictures are fetched, and whose grammar is compiled."""
        self._aborted_early: set[str] = set()
        """Ids of those of them that were aborted meanwhile."""
        self._progress = Progress()
        self._prefilled_tokens = 0
        self._loading = False
        self._closed = False
        self._broken: str | None = None
        """Error of the push that left the weights incomplete; None if the weights are usable."""
        self._held: frozenset[str] = frozenset()
        """Names of the tensors that earlier pushes have delivered."""

    async def start(self) -> None:
        """Load the model."""
        await self._run(self._load_model)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        room = self._max_model_len - len(request.prompt_tokens)
        if room <= 0:
            raise EngineError(
                f"request {request.id!r} has {len(request.prompt_tokens)} prompt tokens; "
                f"the engine takes fewer than {self._max_model_len}"
            )
        limit = min(request.sampling.max_new_tokens, room)
        request, matchers = await self._prepare(request)
        decoding = self._begun(request, limit, matchers)
        if request.id in self._aborted_early:
            decoding.end()
        completions: list[Completion] = []
        self._progress.begin(request.id, request.n)
        self._running[request.id] = decoding
        try:
            self._submit(self._step, decoding)
            completions = await asyncio.wrap_future(decoding.over)
            return completions
        finally:
            decoding.end()
            self._aborted_early.discard(request.id)
            del self._running[request.id]
            self._progress.end(request.id, completions)

    def _begun(self, request: GenerateRequest, limit: int, matchers: list[Matcher]) -> Decoding:
        """Return a request that begins, of at most `limit` tokens. Tests choose its tokens."""
        return Decoding(request, self._tokenizer, limit=limit, eos=self._eos, matchers=matchers)

    async def _prepare(self, request: GenerateRequest) -> tuple[GenerateRequest, list[Matcher]]:
        """Fetch the pictures of a request, and compile its grammar.

        Returns:
            The request with its pictures here, and a grammar for each sibling, or none at all.
        """
        schema = request.sampling.json_schema
        if schema is None and request.pictures is None:
            return request, []
        self._preparing.add(request.id)
        try:
            request = await self._pictures.fetch(request)
            if schema is None:
                return request, []
            work = self._run(self._grammars.matchers, schema, request.n, self._eos)
            return request, await work
        except BaseException:
            self._aborted_early.discard(request.id)
            raise
        finally:
            self._preparing.discard(request.id)

    async def abort(self, request_id: str) -> None:
        if decoding := self._running.get(request_id):
            decoding.end()
        elif request_id in self._preparing:
            self._aborted_early.add(request_id)

    async def heartbeat(self) -> Heartbeat:
        """Wait for a turn of the compute thread; report the tokens generated since the last call.

        During a push of weights there is no wait, because a push has time limits of its own.
        """
        if not self._loading:
            await self._run(lambda: None)
        return self._progress.heartbeat(self._weights.version, self._prefilled_tokens, self._read)

    async def load_weights(
        self, channel: Channel, version: int, *, receiver: int, verify: bool
    ) -> LoadReport:
        self._loading = True
        try:
            return await self._run(self._receive, channel, version, receiver, verify)
        finally:
            self._loading = False

    async def sleep(self, *, drop_weights: bool = False) -> None:
        """Move the weights to host memory and give the device memory back; a no-op on CPUs.

        `drop_weights` changes nothing.
        """
        if self._spec.platform == "cuda":
            await self._run(self._move, "cpu")
            free_cached()

    async def wake(self, *, weights_only: bool = False) -> None:
        """Move the weights back to the device.

        `weights_only` changes nothing, as every request allocates a KV cache of its own.
        """
        if self._spec.platform == "cuda":
            await self._run(self._move, "cuda")

    async def close(self) -> None:
        """End all running requests and stop the thread."""
        self._closed = True
        for decoding in self._running.values():
            decoding.end()
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `work` in the thread and return its result; EngineDiedError: the engine was
        closed."""
        return await asyncio.wrap_future(self._submit(work, *args, **kwargs))

    def _submit(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queue `work` for the thread; EngineDiedError: the engine was closed."""
        if self._closed:
            raise EngineDiedError(f"the engine of {self._spec.name} was closed")
        return self._thread.submit(work, *args, **kwargs)

    def _load_model(self) -> None:
        """Load tokenizer and model onto the device, as version 0, with what requests need of
        them."""
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(self._config)
        model = load_causal_lm(self._config, dtype=self._dtype).eval()
        self._weights = Weights(model, 0, find_tower(model, self._config))
        self._memory = WeightMemory(model)
        self._move("cuda" if self._spec.platform == "cuda" else "cpu")
        self._eos = eos_ids(model, self._tokenizer)
        self._grammars = Grammars(self._tokenizer, model.config.get_text_config().vocab_size)

    def _move(self, device: str) -> None:
        self._weights.model.to(torch.device(device))

    @torch.inference_mode()
    def _step(self, decoding: Decoding) -> None:
        """Run one decoding step of a request, then queue its next step behind other requests."""
        if decoding.over.done():
            return
        try:
            self._require_whole_weights()
            self._prefilled_tokens += decoding.step(self._weights)
            if not decoding.over.done():
                self._thread.submit(self._step, decoding)
        except EngineError as error:
            decoding.fail(error)
        except Exception as error:  # noqa: BLE001 - one request's failure is that request's
            failure = EngineError(f"request {decoding.request.id!r} failed: {error}")
            failure.__cause__ = error
            decoding.fail(failure)

    def _read(self, request_id: str, starts: Sequence[int]) -> list[Completion]:
        """Return what each sibling `i` of a request wrote after its first `starts[i]` tokens."""
        siblings = self._running[request_id].siblings
        return [s.completion(start) for s, start in zip(siblings, starts, strict=True)]

    def _require_whole_weights(self) -> None:
        """Raise IncompleteWeightsError if a push failed partway and none has succeeded since."""
        if self._broken is not None:
            raise IncompleteWeightsError(
                f"the engine of {self._spec.name} has incomplete weights; push all of them again "
                f"({self._broken})"
            )

    def _push_failure(self, error: Exception) -> WeightSyncError:
        """Return `error` if it is a WeightSyncError, else one that names type and message."""
        if isinstance(error, WeightSyncError):
            return error
        return WeightSyncError(
            f"the engine of {self._spec.name} could not take a push of weights: "
            f"{type(error).__name__}: {error}"
        )

    @torch.inference_mode()
    def _receive(self, channel: Channel, version: int, receiver: int, verify: bool) -> LoadReport:
        """Load a push into the model; if it fails once begun, mark the weights as broken."""
        memory, places = self._memory, self._memory.places()
        begun = False

        def check(manifest: Manifest) -> None:
            check_shapes(manifest, memory.shapes, optional=memory.optional, held=self._held)

        def in_place(meta: TensorMeta) -> Tensor | None:
            """Return the model's own memory for a tensor, if the push can write into it."""
            nonlocal begun
            begun = True
            return places.place(meta)

        try:
            with receive(channel, receiver, check=check) as incoming:
                if verify and not incoming.verify:
                    raise WeightSyncError("a checksum was asked for, but the sender makes none")
                for name, tensor in incoming.tensors(in_place):
                    places.take(name, tensor)
        except Exception as error:
            # Any kind of error: the tensors received so far stay in the model.
            failure = self._push_failure(error)
            if begun:
                self._broken = str(failure)
                self._held = frozenset()
            if failure is error:
                raise
            raise failure from error
        self._broken = None
        self._weights = replace(self._weights, version=version)
        self._held |= {meta.name for meta in incoming.manifest.tensors}
        return LoadReport(version, **numbers_of(incoming))


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of the tokens that end a response, from tokenizer and generation config."""
    ids: set[int] = set()
    for value in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        if isinstance(value, int):
            ids.add(value)
        elif value is not None:
            ids.update(value)
    return frozenset(ids)
