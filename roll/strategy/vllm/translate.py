"""Translation of requests into vLLM's terms, and of its outputs into completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roll.core.completion import Completion, FinishReason, VersionRuns
from roll.core.errors import EngineError
from roll.core.types import GenerateRequest

NOTHING_YET = Completion.of((), (), (), FinishReason.ABORT)


def sampling_params(request: GenerateRequest) -> Any:
    """Make vLLM's `SamplingParams`: one final output with all siblings, flat log-prob lists."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    sampling = request.sampling
    schema = sampling.json_schema
    return SamplingParams(
        n=request.n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        max_tokens=sampling.max_new_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        seed=request.seed,
        logprobs=0,  # only those of the sampled token
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def finished(output: Any, start: int = 0) -> Completion:
    """Return a final `CompletionOutput` as a completion, without its first `start` tokens.

    Raises:
        EngineError: vLLM gave the request up.
    """
    spans = [(int(span.version), span.start) for span in output.weight_versions or ()]
    reason = output.finish_reason or "abort"
    if reason not in list(FinishReason):
        raise EngineError(
            f"vLLM ended a request with {reason!r} after {len(output.token_ids)} tokens (see its "
            "log); with a JSON schema, the model may have no token that the grammar allows"
        )
    return _completion(output.token_ids, output.logprobs, spans, reason, start)


def unfinished(processor: Any, request_id: str, starts: Sequence[int]) -> list[Completion]:
    """Return what each sibling `i` of a running request wrote after its first `starts[i]` tokens.

    The tokens are read from the states that vLLM's `OutputProcessor` keeps in this process anyway.
    Streaming through vLLM's public interface would give the same tokens, but with one message for
    each piece, and without weight versions until the request ends.
    """
    pieces = [NOTHING_YET] * len(starts)
    for internal_id in processor.external_req_ids.get(request_id, ()):
        state = processor.request_states[internal_id]
        index = state.request_index
        pieces[index] = _completion(
            state.detokenizer.output_token_ids,
            state.logprobs_processor.logprobs,
            [(int(version), begin) for version, begin in state.weight_version_starts],
            "abort",
            starts[index],
        )
        if state.parent_req is not None:
            for done in state.parent_req.output_aggregator:
                if done is not None:
                    pieces[done.index] = finished(done, starts[done.index])
    return pieces


def _completion(
    tokens: Sequence[int],
    logprobs: Any,
    spans: Sequence[tuple[int, int]],
    finish: str,
    start: int,
) -> Completion:
    """Make a completion of the tokens from number `start` on.

    Args:
        tokens: all tokens of the response.
        logprobs: vLLM's `FlatLogprobs`, one entry for each token.
        spans: (version of the weights, number of the first token written with it), in order.
        finish: value of a `FinishReason`.
        start: number of leading tokens to leave out.
    """
    return Completion.of(
        tokens[start:],
        logprobs.logprobs[start:],
        VersionRuns.of_starts(spans, len(tokens), begin=start),
        FinishReason(finish),
    )
