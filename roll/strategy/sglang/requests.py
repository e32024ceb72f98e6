"""From a `GenerateRequest` to SGLang's terms, and from its outputs to completions."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from roll.core.errors import EngineError
from roll.core.types import Completion, FinishReason, GenerateRequest, SamplingParams

STREAM_INTERVAL = 32
"""Tokens of a request that arrive together: what a replica that dies can lose of each sibling."""
STOP_INTERVAL = 4
"""The same where stop strings are looked for: so many tokens may be written in vain."""


@dataclass(slots=True)
class Sibling:
    """One continuation on its way."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: FinishReason = FinishReason.ABORT

    def after(self, start: int) -> Completion:
        """What was written from token `start` on."""
        return Completion(
            tuple(self.tokens[start:]),
            tuple(self.logprobs[start:]),
            tuple(self.versions[start:]),
            self.finish,
        )

    def stop_at(self, length: int) -> None:
        """A stop string ends with token `length`; what came after is dropped."""
        del self.tokens[length:], self.logprobs[length:], self.versions[length:]
        self.finish = FinishReason.STOP

    def extend(self, output: dict[str, Any], sampling: SamplingParams) -> None:
        """Take over what an output of SGLang has more than the last one.

        Raises:
            EngineError: it is a refusal.
        """
        meta = output["meta_info"]
        finish = meta["finish_reason"]
        if finish is not None and finish.get("status_code") == HTTPStatus.BAD_REQUEST:
            raise EngineError(f"SGLang refuses the request: {finish['message']}")
        have, tokens = len(self.tokens), output["output_ids"]
        if len(tokens) > have:
            self.tokens += tokens[have:]
            if is_cut(sampling):
                self.logprobs += meta["output_token_sampling_logprobs"][have:]
            else:
                self.logprobs += [entry[0] for entry in meta["output_token_logprobs"][have:]]
            for span in meta["weight_versions"]:
                begin = max(span["start"], have)
                self.versions += [int(span["version"])] * (span["end"] - begin)
        if finish is not None:
            self.finish = FinishReason(finish["type"])


def sibling_id(request_id: str, index: int) -> str:
    """SGLang's name of one sibling. It aborts by prefix: none may be the beginning of another."""
    return f"{len(request_id)}:{request_id}#{index}."


def is_cut(sampling: SamplingParams) -> bool:
    """Whether tokens are drawn from a part of the distribution; log-probs are then of that part."""
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def generate_input(
    request: GenerateRequest, index: int, *, max_model_len: int, vocab_size: int, eos: int | None
) -> dict[str, Any]:
    """Keywords of SGLang's `GenerateReqInput` for sibling `index`.

    Raises:
        EngineError: the prompt leaves no room for a response.
    """
    sampling = request.sampling
    room = max_model_len - len(request.prompt_tokens)
    if room < 1:
        raise EngineError(
            f"request {request.id!r} has {len(request.prompt_tokens)} prompt tokens; the engine "
            f"takes fewer than {max_model_len}"
        )
    cut = is_cut(sampling)
    seed = secrets.randbits(62) if request.seed is None else request.seed + index
    return {
        "rid": sibling_id(request.id, index),
        "input_ids": list(request.prompt_tokens),
        "return_logprob": True,
        "return_sampling_mask": cut,  # brings the log-probs of the part that is drawn from
        "stream": True,
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else vocab_size if cut else -1,
            "max_new_tokens": min(sampling.max_new_tokens, room),
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": [] if eos is None or sampling.ignore_eos else [eos],
            "sampling_seed": seed,
            "stream_interval": STOP_INTERVAL if sampling.stop else STREAM_INTERVAL,
        },
    }
