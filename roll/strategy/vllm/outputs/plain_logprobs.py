"""Log-probs of vLLM as plain numbers, on their way from the sampler to this process.

vLLM cuts three arrays out of those of a step for each token, and packs and unpacks them as arrays
of one number, which costs more than the token itself (benchmarks/plain_logprobs.py). Here a step's
arrays become lists of numbers once, in vLLM's workers. Lists are cut and packed in the same places
as arrays, in two fifths of the time. Both sides replace functions of vLLM, in processes of this
framework only, and once in a process.
"""

from __future__ import annotations

from functools import cache
from itertools import repeat
from typing import Any


class PlainLogprobs:
    """Part of `RollWorker` that sends log-probs as plain numbers."""

    def roll_send_plain_logprobs(self) -> None:
        """Let the samplers of this process return lists, where no more than the log-prob of the
        sampled token is asked for. The owner of the engine must call `receive_plain_logprobs`."""
        _send()


@cache
def _send() -> None:
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors

    of_vllm = LogprobsTensors.tolists

    def tolists(self: Any, *arguments: Any) -> Any:
        found = of_vllm(self, *arguments)
        if found.logprobs.ndim != 2 or found.logprobs.shape[1] != 1:
            return found
        return LogprobsLists(
            found.logprob_token_ids[:, 0].tolist(),
            found.logprobs[:, 0].tolist(),
            found.sampled_token_ranks.tolist(),
            found.cu_num_generated_tokens,
        )

    LogprobsTensors.tolists = tolists


@cache
def receive_plain_logprobs() -> None:
    """Let the engines of this process take log-probs as lists, too; call it before an engine."""
    import numpy as np
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackDecoder

    decode, update = MsgpackDecoder._decode_ndarray, LogprobsProcessor._update_sample_logprobs

    def decoded(self: Any, found: Any) -> Any:
        # An array comes as [dtype, shape, data], and its dtype is a text. msgspec takes nothing
        # but an array in its place.
        return decode(self, found) if found and isinstance(found[0], str) else np.array(found)

    def updated(self: Any, found: Any) -> None:
        ids, logprobs, ranks, _ = found
        if logprobs.ndim != 1:
            update(self, found)
        elif self.tokenizer is None and isinstance(self.logprobs, FlatLogprobs):
            numbers: list[float] = logprobs.tolist()
            for number in numbers:
                self.cumulative_logprob += number
            _append(self.logprobs, ids.tolist(), numbers, ranks.tolist())
        else:
            update(self, LogprobsLists(ids[:, None], logprobs[:, None], ranks))

    MsgpackDecoder._decode_ndarray = decoded
    LogprobsProcessor._update_sample_logprobs = updated


def _append(flat: Any, ids: list[int], logprobs: list[float], ranks: list[int]) -> None:
    """Append one number for each of some tokens to a `FlatLogprobs` of vLLM."""
    begin, count = len(flat.logprobs), len(logprobs)
    flat.start_indices.extend(range(begin, begin + count))
    flat.end_indices.extend(range(begin + 1, begin + 1 + count))
    flat.token_ids.extend(ids)
    flat.logprobs.extend(logprobs)
    flat.ranks.extend(ranks)
    flat.decoded_tokens.extend(repeat(None, count))
