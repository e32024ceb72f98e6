"""Decoding of one request, one token per sibling and step.

The siblings of a request share a prompt and form a batch of their own. They always have equal
length, so nothing is padded. The result depends on the prompt, the sampling settings, the seed and
the weights alone, never on other requests.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from roll.core.completion import (
    LOGPROB_TYPE,
    TOKEN_TYPE,
    Completion,
    FinishReason,
    VersionRuns,
)
from roll.core.types import GenerateRequest
from roll.strategy.hf.grammar import Matcher, restrict
from roll.strategy.hf.passes import Weights
from roll.strategy.hf.sampling import Distribution, sample_tokens


@dataclass(slots=True)
class Sibling:
    """Running continuation of a prompt."""

    generator: torch.Generator
    tokens: array[int] = field(default_factory=lambda: array(TOKEN_TYPE))
    logprobs: array[float] = field(default_factory=lambda: array(LOGPROB_TYPE))
    versions: list[int] = field(default_factory=list)
    """Version of the weights that generated each token. Appended last: other threads read only as
    many tokens as there are versions."""
    finish: FinishReason = FinishReason.ABORT
    """Reason of the end; ABORT while the sibling is running, which is right if it is cut off."""

    def add(self, token: int, logprob: float, version: int) -> None:
        """Append a token, its log-prob and the version of the weights that generated it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def completion(self, start: int = 0) -> Completion:
        """Return the completion without its first `start` tokens."""
        end = len(self.versions)
        return Completion.of(
            self.tokens[start:end],
            self.logprobs[start:end],
            VersionRuns.of_tokens(self.versions[start:end]),
            self.finish,
        )


class Decoding:
    """A request, its siblings, and the KV cache of the running siblings.

    A single thread calls `step`. Any thread may call `end` and `Sibling.completion`.

    Args:
        limit: maximum number of tokens of a response.
        eos: ids of the tokens that end a response.
        matchers: grammar of each sibling; empty if they follow none.
    """

    def __init__(
        self,
        request: GenerateRequest,
        tokenizer: PreTrainedTokenizerBase,
        *,
        limit: int,
        eos: frozenset[int],
        matchers: Sequence[Matcher] = (),
    ) -> None:
        self.request = request
        self._matchers = matchers
        self.over: Future[list[Completion]] = Future()
        """Completions or error of the request, set once when the request ends."""
        self.siblings = [Sibling(_generator(request.seed, index)) for index in range(request.n)]
        self._tokenizer = tokenizer
        self._limit = limit
        self._eos = eos
        self._live = list(range(request.n))
        self._cache: DynamicCache | None = None
        self._cached_for: Weights | None = None
        self._last_N = torch.empty(0, dtype=torch.long)
        """Id of the newest token of each running sibling, int64 `[N]`."""
        self._prefilled = 0
        self._distribution = Distribution(request.sampling, len(request.prompt_tokens))

    def step(self, weights: Weights) -> int:
        """Generate one token for every running sibling; end the request if none is left running.

        Returns:
            Number of tokens that this step read into a new KV cache: those of the prompt and, after
            a change of the weights, those generated before. 0 if the cache was reused.
        """
        self._prefilled = 0
        logits_NV = self._forward(weights)
        if self._matchers:
            logits_NV = restrict(logits_NV, [self._matchers[index] for index in self._live])
        logprobs_NV = self._distribution.logprobs(logits_NV, self._tokens_so_far(logits_NV.device))
        tokens_N = self._choose(logprobs_NV)
        chosen = logprobs_NV.gather(1, tokens_N.to(logprobs_NV.device)[:, None])[:, 0].tolist()
        for index, token, logprob in zip(self._live, tokens_N.tolist(), chosen, strict=True):
            sibling = self.siblings[index]
            sibling.add(token, logprob, weights.version)
            if self._matchers:
                self._matchers[index].accept(token)
            sibling.finish = self._finish(sibling)
        self._drop_finished(tokens_N, weights.model.device)
        if not self._live:
            self.end()
        return self._prefilled

    def end(self) -> None:
        """End the request with the tokens generated so far. Running siblings end with ABORT."""
        with contextlib.suppress(InvalidStateError):  # the request has ended already
            self.over.set_result([sibling.completion() for sibling in self.siblings])

    def fail(self, error: Exception) -> None:
        """End the request with an error, unless it has ended already."""
        with contextlib.suppress(InvalidStateError):
            self.over.set_exception(error)

    def _choose(self, logprobs_NV: Tensor) -> Tensor:
        """Sample the next token of each running sibling, int64 `[N]` on the CPU."""
        generators = [self.siblings[index].generator for index in self._live]
        greedy = self.request.sampling.temperature == 0
        return sample_tokens(logprobs_NV, generators, greedy=greedy)

    def _tokens_so_far(self, device: torch.device) -> Tensor | None:
        """Return prompt and response of each running sibling, int64 `[N, T]`; None if the
        distribution does not depend on them."""
        if not self._distribution.reads_tokens:
            return None
        rows = [[*self.request.prompt_tokens, *self.siblings[i].tokens] for i in self._live]
        return torch.tensor(rows, device=device)

    def _forward(self, weights: Weights) -> Tensor:
        """Compute the logits `[N, V]` of the next token of each running sibling."""
        pictures = self.request.pictures
        if self._cache is not None and self._cached_for is weights:
            return weights.read_next(self._last_N, pictures, self._cache)
        cache = DynamicCache(config=weights.model.config)
        prompt = list(self.request.prompt_tokens)
        written = [self.siblings[index].tokens for index in self._live]
        if written[0]:  # these tokens were generated with other weights
            inputs_NT = torch.tensor([[*prompt, *tokens] for tokens in written])
            logits_NV = weights.read(inputs_NT, pictures, cache)
        else:
            inputs_NT = torch.tensor([prompt])
            logits_NV = weights.read(inputs_NT, pictures, cache).expand(len(written), -1)
            cache.batch_repeat_interleave(len(written))
        self._cache, self._cached_for = cache, weights
        self._prefilled = inputs_NT.numel()
        return logits_NV

    def _drop_finished(self, tokens_N: Tensor, device: torch.device) -> None:
        """Remove finished siblings from the running ones, their last tokens and the KV cache."""
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
        """Return why the sibling ends after its last token; ABORT means that it goes on."""
        sampling, last = self.request.sampling, sibling.tokens[-1]
        if last in sampling.stop_token_ids or (last in self._eos and not sampling.ignore_eos):
            return FinishReason.STOP
        if sampling.stop:
            # A character takes at most four tokens (UTF-8 bytes), so a stop string fits here.
            tail = sibling.tokens[-4 * max(map(len, sampling.stop)) :]
            text = self._tokenizer.decode(tail.tolist(), skip_special_tokens=True)
            if any(stop in text for stop in sampling.stop):
                return FinishReason.STOP
        return FinishReason.LENGTH if len(sibling.tokens) >= self._limit else FinishReason.ABORT


def _generator(seed: int | None, index: int) -> torch.Generator:
    """Make the generator of sibling `index`; without a seed, seed it at random."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed + index)
    return generator
