"""Translation of requests into SGLang's terms, and of its outputs into completions."""

from __future__ import annotations

import secrets
from array import array
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from roll.config.sections.sampling import refused_by_sglang
from roll.core.completion import (
    LOGPROB_TYPE,
    TOKEN_TYPE,
    Completion,
    FinishReason,
    VersionRuns,
)
from roll.core.errors import EngineError
from roll.core.types import GenerateRequest, SamplingParams

STREAM_INTERVAL = 32
"""Number of tokens that SGLang sends at once: the most that a dying replica loses per sibling."""
STOP_INTERVAL = 4
"""Number of tokens sent at once in requests with stop strings.

So many tokens may be generated in vain after a stop string."""


@dataclass(slots=True)
class Sibling:
    """Continuation of a prompt, filled while its tokens arrive."""

    tokens: array[int] = field(default_factory=lambda: array(TOKEN_TYPE))
    logprobs: array[float] = field(default_factory=lambda: array(LOGPROB_TYPE))
    versions: VersionRuns = field(default_factory=VersionRuns)
    finish: FinishReason = FinishReason.ABORT

    def after(self, start: int) -> Completion:
        """Return the tokens from number `start` on, as a completion."""
        return Completion.of(
            self.tokens[start:],
            self.logprobs[start:],
            self.versions.part(start, len(self.tokens)),
            self.finish,
        )

    def stop_at(self, length: int) -> None:
        """End the continuation with STOP after its first `length` tokens; drop the later ones."""
        del self.tokens[length:], self.logprobs[length:]
        self.versions = self.versions.part(0, length)
        self.finish = FinishReason.STOP

    def extend(self, output: dict[str, Any], sampling: SamplingParams) -> None:
        """Add the tokens that an output of SGLang has beyond those received before.

        Raises:
            EngineError: the output says that SGLang refuses the request.
        """
        meta = output["meta_info"]
        finish = meta["finish_reason"]
        if finish is not None and finish.get("status_code") == HTTPStatus.BAD_REQUEST:
            raise EngineError(f"SGLang refuses the request: {finish['message']}")
        have, tokens = len(self.tokens), output["output_ids"]
        if len(tokens) > have:
            self.tokens.extend(tokens[have:])
            if is_partitioned(sampling):
                self.logprobs.extend(meta["output_token_sampling_logprobs"][have:])
            else:
                self.logprobs.extend(entry[0] for entry in meta["output_token_logprobs"][have:])
            spans = [(int(span["version"]), span["start"]) for span in meta["weight_versions"]]
            self.versions += VersionRuns.of_starts(spans, len(tokens), begin=have)
        if finish is not None:
            self.finish = FinishReason(finish["type"])


def sibling_id(request_id: str, index: int) -> str:
    """Return SGLang's id of a sibling; none is a prefix of another, as SGLang aborts by prefix."""
    return f"{len(request_id)}:{request_id}#{index}."


def is_partitioned(sampling: SamplingParams) -> bool:
    """Return whether top-k or top-p cuts the distribution; log-probs are then after the cut."""
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def generate_input(
    request: GenerateRequest, index: int, *, max_model_len: int, vocab_size: int, eos: int | None
) -> dict[str, Any]:
    """Return the keyword arguments of SGLang's `GenerateReqInput` for sibling `index`.

    Args:
        max_model_len: largest length of prompt plus response, in tokens.
        vocab_size: number of tokens of the model, in place of top-k if only top-p cuts.
        eos: token that ends a response; None: no token does.

    Raises:
        EngineError: the prompt leaves no room for a response, or SGLang cannot do what is asked.
    """
    sampling = request.sampling
    if sampling.json_schema is not None:
        raise EngineError(
            f"request {request.id!r} has a grammar, which SGLang does not follow here"
        )
    room = max_model_len - len(request.prompt_tokens)
    if room < 1:
        raise EngineError(
            f"request {request.id!r} has {len(request.prompt_tokens)} prompt tokens; the engine "
            f"takes fewer than {max_model_len}"
        )
    for name, why in refused_by_sglang(sampling):
        raise EngineError(f"request {request.id!r} has {name}: with SGLang, {why}")
    stops = {*sampling.stop_token_ids} if eos is None else {eos, *sampling.stop_token_ids}
    cut = is_partitioned(sampling)
    seed = secrets.randbits(62) if request.seed is None else request.seed + index
    return {
        "rid": sibling_id(request.id, index),
        "input_ids": list(request.prompt_tokens),
        "return_logprob": True,
        "return_sampling_mask": cut,  # adds log-probs of the distribution after the cut
        "stream": True,
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else vocab_size if cut else -1,
            "max_new_tokens": min(sampling.max_new_tokens, room),
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": [] if sampling.ignore_eos else sorted(stops),
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
            "sampling_seed": seed,
            "stream_interval": STOP_INTERVAL if sampling.stop else STREAM_INTERVAL,
        },
    }
