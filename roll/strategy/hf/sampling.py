"""Sampling of tokens from logits, and log-probs of the distribution they are sampled from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from roll.core.types import SamplingParams


class Distribution:
    """The distribution that tokens of one request are sampled from.

    Logits are changed in vLLM's order: bias, repetition penalty, frequency and presence penalty,
    temperature, min-p, top-k, top-p. Greedy sampling (temperature 0) takes the likeliest token
    after the penalties, so the rest has no effect on it.

    Args:
        num_prompt_tokens: number of tokens of the request's prompt.
    """

    def __init__(self, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        penalties = list(_penalties(sampling, num_prompt_tokens))
        self.reads_tokens = bool(penalties)
        """True if the distribution depends on the tokens so far by more than the logits."""
        self._steps = LogitsProcessorList([*_biases(sampling), *penalties, *_cuts(sampling)])

    def logprobs(self, logits_NV: Tensor, tokens_NT: Tensor | None = None) -> Tensor:
        """Compute the log-probs, float32 `[N, V]`, natural logarithm; -inf for removed tokens.

        Args:
            logits_NV: logits of the next token.
            tokens_NT: prompt and response so far, int64; needed where `reads_tokens`.
        """
        if tokens_NT is None:
            tokens_NT = torch.empty(len(logits_NV), 0, dtype=torch.long, device=logits_NV.device)
        changed_NV: Tensor = self._steps(tokens_NT, logits_NV.float())
        return changed_NV.log_softmax(-1)


class OccurrencePenalty(LogitsProcessor):  # type: ignore[misc]
    """Penalties of OpenAI's API: each logit less `frequency` times the number of times that the
    response has the token, and less `presence` if it has it at all."""

    def __init__(self, presence: float, frequency: float, num_prompt_tokens: int) -> None:
        self._presence, self._frequency, self._begin = presence, frequency, num_prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        written_NT = input_ids[:, self._begin :]
        once_NT = torch.ones_like(written_NT, dtype=scores.dtype)
        counts_NV = torch.zeros_like(scores).scatter_add_(1, written_NT, once_NT)
        return scores - self._frequency * counts_NV - self._presence * (counts_NV > 0)


def _biases(sampling: SamplingParams) -> Iterator[LogitsProcessor]:
    """Yield what adds a constant to logits."""
    if sampling.logit_bias:
        pairs = [[[token], float(bias)] for token, bias in sampling.logit_bias.items()]
        yield SequenceBiasLogitsProcessor(pairs)


def _penalties(sampling: SamplingParams, num_prompt_tokens: int) -> Iterator[LogitsProcessor]:
    """Yield what changes logits by the tokens so far."""
    if sampling.repetition_penalty != 1:
        yield RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
    if presence or frequency:
        yield OccurrencePenalty(presence, frequency, num_prompt_tokens)


def _cuts(sampling: SamplingParams) -> Iterator[LogitsProcessor]:
    """Yield what scales the logits and removes unlikely tokens; nothing for greedy sampling."""
    if sampling.temperature == 0:
        return
    if sampling.temperature != 1:
        yield TemperatureLogitsWarper(float(sampling.temperature))
    if sampling.min_p > 0:
        yield MinPLogitsWarper(sampling.min_p)
    if sampling.top_k > 0:
        yield TopKLogitsWarper(sampling.top_k)
    if sampling.top_p < 1:
        yield TopPLogitsWarper(sampling.top_p)


def sample_tokens(
    logprobs_NV: Tensor, generators: Sequence[torch.Generator], *, greedy: bool
) -> Tensor:
    """Sample one token id per row, int64 `[N]` on the CPU.

    Row i draws from generator i, so the rows do not affect each other.

    Args:
        greedy: take the most probable token in place of drawing.
    """
    if greedy:
        return logprobs_NV.argmax(-1).cpu()
    probs_NV = logprobs_NV.exp().cpu()
    draws = [
        torch.multinomial(row, 1, generator=generator)
        for row, generator in zip(probs_NV, generators, strict=True)
    ]
    return torch.cat(draws)
