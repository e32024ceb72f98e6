"""`HfEngine`: generation with plain Hugging Face forward passes, exact and always there.

One request is one batch: its siblings share a prompt, so nothing is padded, and requests run one
after the other. What a request yields therefore depends on its own seed and the weights alone,
never on what else is in flight: the same run twice gives the same bits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from roll.config.model import ModelConfig
from roll.config.strategy import HfEngineConfig
from roll.core.errors import EngineError, WeightSyncError
from roll.core.types import Completion, FinishReason, GenerateRequest, WorkerSpec
from roll.models.load import load_causal_lm, load_tokenizer
from roll.strategy.api import LoadReport
from roll.strategy.hf.sampling import sample_tokens, scaled_logprobs
from roll.weight_sync.channel import Channel
from roll.weight_sync.manifest import Manifest, check_shapes
from roll.weight_sync.transfer import receive

P = ParamSpec("P")
R = TypeVar("R")


class HfEngine:
    """Implements `InferenceStrategy`.

    Args:
        dtype: of weights and activations, `float32` or `bfloat16`.
        max_model_len: longest prompt plus response, in tokens.
    """

    def __init__(
        self,
        config: HfEngineConfig,
        *,
        spec: WorkerSpec,
        model: ModelConfig,
        dtype: str,
        max_model_len: int,
    ) -> None:
        self._spec = spec
        self._config = model
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._max_model_len = max_model_len
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hf-engine")
        """Everything that touches the model runs here, in order; the event loop stays free."""
        self._aborts: dict[str, threading.Event] = {}
        self._version = 0
        self._broken: str | None = None

    async def start(self) -> None:
        """Load the model."""
        await self._run(self._load_model)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """`request.n` completions, in sibling order. After `abort` they end with ABORT.

        Raises:
            EngineError: the prompt leaves no room for a response, or a push of weights broke off.
        """
        if len(request.prompt_tokens) >= self._max_model_len:
            raise EngineError(
                f"request {request.id!r} has {len(request.prompt_tokens)} prompt tokens; "
                f"the engine takes fewer than {self._max_model_len}"
            )
        aborted = self._aborts.setdefault(request.id, threading.Event())
        try:
            return await self._run(self._generate, request, aborted)
        except asyncio.CancelledError:
            aborted.set()
            raise
        finally:
            self._aborts.pop(request.id, None)

    async def abort(self, request_id: str) -> None:
        """End a running request; unknown ids are fine."""
        if aborted := self._aborts.get(request_id):
            aborted.set()

    async def load_weights(self, channel: Channel, version: int, *, verify: bool) -> LoadReport:
        """Replace all weights by those that arrive on `channel`; later tokens carry `version`.

        Requests that came before finish first.

        Raises:
            WeightSyncError: the push does not fit, and the old weights stay in use; or it broke
                off, and the engine generates no more until a push has succeeded.
        """
        return await self._run(self._receive, channel, version, verify)

    async def sleep(self) -> None:
        """Free device memory between rollouts; a no-op on CPUs."""
        if self._spec.platform == "cuda":
            await self._run(self._move, "cpu")

    async def wake(self, *, weights_only: bool = False) -> None:
        """Take the memory back. Caches come with each request: weights are all there is."""
        if self._spec.platform == "cuda":
            await self._run(self._move, "cuda")

    async def close(self) -> None:
        """End running requests and the thread."""
        for aborted in self._aborts.values():
            aborted.set()
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(work, *args, **kwargs))

    def _load_model(self) -> None:
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(self._config)
        self._model: PreTrainedModel = load_causal_lm(self._config, dtype=self._dtype).eval()
        self._move("cuda" if self._spec.platform == "cuda" else "cpu")
        self._eos = eos_ids(self._model, self._tokenizer)

    def _move(self, device: str) -> None:
        self._model.to(torch.device(device))

    @torch.inference_mode()
    def _generate(self, request: GenerateRequest, aborted: threading.Event) -> list[Completion]:
        if self._broken is not None:
            raise EngineError(
                f"the engine of {self._spec.name} has incomplete weights; push all of them again "
                f"({self._broken})"
            )
        siblings = [_Sibling.seeded(request.seed, index) for index in range(request.n)]
        limit = min(
            request.sampling.max_new_tokens, self._max_model_len - len(request.prompt_tokens)
        )
        device = self._model.device
        prompt = torch.tensor([request.prompt_tokens], device=device)
        cache = DynamicCache(config=self._model.config)
        output = self._model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
        logits_NV = output.logits[:, -1].expand(request.n, -1)
        cache.batch_repeat_interleave(request.n)
        greedy = request.sampling.temperature == 0
        live = list(range(request.n))
        while not aborted.is_set():
            logprobs_NV = scaled_logprobs(logits_NV, request.sampling)
            generators = [siblings[index].generator for index in live]
            tokens = sample_tokens(logprobs_NV, generators, greedy=greedy)
            chosen = logprobs_NV.gather(1, tokens.to(device)[:, None])[:, 0].tolist()
            for index, token, logprob in zip(live, tokens.tolist(), chosen, strict=True):
                siblings[index].add(token, logprob)
                siblings[index].finish = self._finish(siblings[index], request, limit)
            keep = [row for row, i in enumerate(live) if siblings[i].finish is FinishReason.ABORT]
            if not keep:
                break
            if len(keep) < len(live):
                rows = torch.tensor(keep, device=device)
                cache.batch_select_indices(rows)
                tokens = tokens[rows.to(tokens.device)]
                live = [live[row] for row in keep]
            output = self._model(input_ids=tokens.to(device)[:, None], past_key_values=cache)
            logits_NV = output.logits[:, -1]
        return [sibling.completion(self._version) for sibling in siblings]

    def _finish(self, sibling: _Sibling, request: GenerateRequest, limit: int) -> FinishReason:
        """ABORT while it goes on: that is what it is if nothing comes after."""
        sampling = request.sampling
        if not sampling.ignore_eos and sibling.tokens[-1] in self._eos:
            return FinishReason.STOP
        if sampling.stop:
            # A token is at least one character, or part of one: no stop string begins earlier.
            tail = sibling.tokens[-4 * max(map(len, sampling.stop)) :]
            text = self._tokenizer.decode(tail, skip_special_tokens=True)
            if any(stop in text for stop in sampling.stop):
                return FinishReason.STOP
        return FinishReason.LENGTH if len(sibling.tokens) >= limit else FinishReason.ABORT

    @torch.inference_mode()
    def _receive(self, channel: Channel, version: int, verify: bool) -> LoadReport:
        own = self._model.state_dict()
        seen: set[int] = set()
        tied = set()
        for name, tensor in own.items():
            if tensor.data_ptr() in seen:
                tied.add(name)
            seen.add(tensor.data_ptr())

        def check(manifest: Manifest) -> None:
            shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
            check_shapes(manifest, shapes, optional=frozenset(tied))

        begun = False
        try:
            with receive(channel, self._spec.rank, check=check) as incoming:
                if verify and not incoming.verify:
                    raise WeightSyncError("a checksum was asked for, but the sender makes none")
                for name, tensor in incoming.tensors():
                    begun = True
                    own[name].copy_(tensor)
        except WeightSyncError as error:
            self._broken = str(error) if begun else self._broken
            raise
        self._broken = None
        self._version = version
        manifest = incoming.manifest
        return LoadReport(version, len(manifest.tensors), manifest.num_bytes, incoming.checksum)


@dataclass(slots=True)
class _Sibling:
    """One continuation in the making."""

    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason = FinishReason.ABORT

    @classmethod
    def seeded(cls, seed: int | None, index: int) -> _Sibling:
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed + index)
        return cls(generator)

    def add(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def completion(self, version: int) -> Completion:
        versions = (version,) * len(self.tokens)
        return Completion(tuple(self.tokens), tuple(self.logprobs), versions, self.finish)


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a response: the tokenizer's and those of the generation config."""
    ids: set[int] = set()
    for value in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        if isinstance(value, int):
            ids.add(value)
        elif value is not None:
            ids.update(value)
    return frozenset(ids)
