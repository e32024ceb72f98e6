"""`Decoding`: one request on its way, a token for each of its siblings at a time.

A request is a batch of its own: its siblings share a prompt and grow in step, so nothing is padded,
and what a request yields depends on its seed and the weights alone, never on what else runs.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from roll.core.types import Completion, FinishReason, GenerateRequest
from roll.strategy.hf.sampling import sample_tokens, scaled_logprobs


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A model as it is between two pushes. A cache belongs to one of these."""

    model: PreTrainedModel
    version: int


@dataclass(slots=True)
class Sibling:
    """One continuation in the making."""

    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Written last: other threads read as many tokens as there are versions."""
    finish: FinishReason = FinishReason.ABORT
    """ABORT while it goes on: that is what it is if nothing comes after."""

    def add(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def completion(self, start: int = 0) -> Completion:
        """What comes after the first `start` tokens."""
        end = len(self.versions)
        return Completion(
            tuple(self.tokens[start:end]),
            tuple(self.logprobs[start:end]),
            tuple(self.versions[start:end]),
            self.finish,
        )


class Decoding:
    """A request, its siblings, and the cache of those that go on.

    One thread calls `step`; `end` and `Sibling.completion` are for others too.

    Args:
        limit: most tokens that a sibling may have.
        eos: tokens that end a response.
    """

    def __init__(
        self,
        request: GenerateRequest,
        tokenizer: PreTrainedTokenizerBase,
        *,
        limit: int,
        eos: frozenset[int],
    ) -> None:
        self.request = request
        self.over: Future[list[Completion]] = Future()
        """Set once, when the request has ended, however it did."""
        self.siblings = [Sibling(_generator(request.seed, index)) for index in range(request.n)]
        self._tokenizer = tokenizer
        self._limit = limit
        self._eos = eos
        self._live = list(range(request.n))
        self._cache: DynamicCache | None = None
        self._cached_for: Weights | None = None
        self._last_N = torch.empty(0, dtype=torch.long)
        """Newest token of each live sibling."""
        self._prefilled = 0

    def step(self, weights: Weights) -> int:
        """One more token for every live sibling; ends the request with its last one.

        Returns:
            Tokens that were read into the cache before: those of the prompt, and after new weights
            those that are written too.
        """
        self._prefilled = 0
        logits_NV = self._forward(weights)
        sampling = self.request.sampling
        logprobs_NV = scaled_logprobs(logits_NV, sampling)
        generators = [self.siblings[index].generator for index in self._live]
        tokens_N = sample_tokens(logprobs_NV, generators, greedy=sampling.temperature == 0)
        chosen = logprobs_NV.gather(1, tokens_N.to(logprobs_NV.device)[:, None])[:, 0].tolist()
        for index, token, logprob in zip(self._live, tokens_N.tolist(), chosen, strict=True):
            sibling = self.siblings[index]
            sibling.add(token, logprob, weights.version)
            sibling.finish = self._finish(sibling)
        self._drop_finished(tokens_N, weights.model.device)
        if not self._live:
            self.end()
        return self._prefilled

    def end(self) -> None:
        """Give what there is; siblings that were still at work end with ABORT."""
        with contextlib.suppress(InvalidStateError):  # it has ended already
            self.over.set_result([sibling.completion() for sibling in self.siblings])

    def fail(self, error: Exception) -> None:
        with contextlib.suppress(InvalidStateError):
            self.over.set_exception(error)

    def _forward(self, weights: Weights) -> Tensor:
        """Logits `[N, V]` of the next token of each live sibling."""
        model = weights.model
        if self._cache is not None and self._cached_for is weights:
            return _logits(model, self._last_N[:, None], self._cache)
        cache = DynamicCache(config=model.config)
        prompt = list(self.request.prompt_tokens)
        written = [self.siblings[index].tokens for index in self._live]
        if written[0]:  # with other weights
            inputs_NT = torch.tensor([prompt + tokens for tokens in written])
            logits_NV = _logits(model, inputs_NT, cache)
        else:
            inputs_NT = torch.tensor([prompt])
            logits_NV = _logits(model, inputs_NT, cache).expand(len(written), -1)
            cache.batch_repeat_interleave(len(written))
        self._cache, self._cached_for = cache, weights
        self._prefilled = inputs_NT.numel()
        return logits_NV

    def _drop_finished(self, tokens_N: Tensor, device: torch.device) -> None:
        rows = [
            row
            for row, index in enumerate(self._live)
            if self.siblings[index].finish is FinishReason.ABORT
        ]
        if self._cache is not None and 0 < len(rows) < len(self._live):
            self._cache.batch_select_indices(torch.tensor(rows, device=device))
        self._last_N = tokens_N[rows]
        self._live = [self._live[row] for row in rows]

    def _finish(self, sibling: Sibling) -> FinishReason:
        sampling = self.request.sampling
        if not sampling.ignore_eos and sibling.tokens[-1] in self._eos:
            return FinishReason.STOP
        if sampling.stop:
            # A token is at least one character, or part of one: no stop string begins earlier.
            tail = sibling.tokens[-4 * max(map(len, sampling.stop)) :]
            text = self._tokenizer.decode(tail, skip_special_tokens=True)
            if any(stop in text for stop in sampling.stop):
                return FinishReason.STOP
        return FinishReason.LENGTH if len(sibling.tokens) >= self._limit else FinishReason.ABORT


def _logits(model: PreTrainedModel, inputs_NT: Tensor, cache: DynamicCache) -> Tensor:
    """Of the last position, `[N, V]`; `cache` grows by the inputs."""
    output = model(input_ids=inputs_NT.to(model.device), past_key_values=cache, logits_to_keep=1)
    logits_NV: Tensor = output.logits[:, -1]
    return logits_NV


def _generator(seed: int | None, index: int) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed + index)
    return generator
