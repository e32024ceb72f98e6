"""Log-probs of vLLM as plain numbers: what the sampler computed reaches each request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roll.strategy.vllm.outputs.plain_logprobs import PlainLogprobs, receive_plain_logprobs


class Spelling:
    """Tokenizer whose tokens are their numbers."""

    def decode(self, ids: int | list[int], **_: Any) -> str:
        return " ".join(map(str, ids if isinstance(ids, list) else [ids]))

    convert_ids_to_tokens = decode


@pytest.fixture(scope="module")
def vllm() -> None:
    """vLLM with both sides changed; other tests of this process may run with them, too."""
    receive_plain_logprobs()
    PlainLogprobs().roll_send_plain_logprobs()


def sampled(counts: list[int], width: int) -> Any:
    """What a step's sampler tells of requests that got so many tokens each."""
    from vllm.v1.outputs import LogprobsTensors

    rows = sum(counts)
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return LogprobsTensors(
        torch.randint(0, 1000, (rows, width), dtype=torch.int32),
        -torch.rand(rows, width) * 7,
        torch.randint(1, 50, (rows,)),
        None if set(counts) == {1} else starts,
    )


def sent(tensors: Any, counts: list[int]) -> list[Any]:
    """Outputs of the requests as the owner of the engine gets them."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    found = tensors.tolists()
    outputs = [
        EngineCoreOutput(str(i), [5] * count, found.slice_request(i, count))
        for i, count in enumerate(counts)
    ]
    packed = MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs))
    unpacked: Any = MsgpackDecoder(EngineCoreOutputs).decode([bytes(part) for part in packed])
    return list(unpacked.outputs)


def processor(*, flat: bool = True, tokenizer: Any = None, width: int = 1) -> Any:
    from vllm.logprobs import create_sample_logprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    kept = create_sample_logprobs(flat)
    return LogprobsProcessor(tokenizer, kept, None, 0.0, width - 1, None)


@pytest.mark.parametrize("counts", [[1] * 64, [2, 0, 1, 5]], ids=["one each", "speculation"])
def test_numbers_arrive_as_they_were_sampled(vllm: None, counts: list[int]) -> None:
    kept = [processor() for _ in counts]
    steps = [sampled(counts, 1) for _ in range(3)]
    for tensors in steps:
        for one, output in zip(kept, sent(tensors, counts), strict=True):
            one.update_from_output(output)
    for i, one in enumerate(kept):
        rows = slice(sum(counts[:i]), sum(counts[: i + 1]))
        logprobs = [value for each in steps for value in each.logprobs[rows, 0].tolist()]
        ids = [value for each in steps for value in each.logprob_token_ids[rows, 0].tolist()]
        ranks = [value for each in steps for value in each.selected_token_ranks[rows].tolist()]
        assert one.logprobs.logprobs == logprobs
        assert one.logprobs.token_ids == ids
        assert one.logprobs.ranks == ranks
        assert one.logprobs.decoded_tokens == [None] * len(ids)
        assert one.cumulative_logprob == sum(logprobs)
        assert len(one.logprobs) == len(ids)
        assert [list(place) for place in one.logprobs] == [[each] for each in ids]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("width", [1, 3])
def test_other_forms_of_vllm_are_as_before(vllm: None, flat: bool, width: int) -> None:
    """Tokens as texts, which servers for people ask for, and log-probs of further tokens."""
    one = processor(flat=flat, tokenizer=Spelling() if width == 1 else None, width=width)
    tensors = sampled([1], width)
    (output,) = sent(tensors, [1])
    one.update_from_output(output)
    (place,) = one.logprobs
    ids, values = tensors.logprob_token_ids[0].tolist(), tensors.logprobs[0].tolist()
    assert {token: entry.logprob for token, entry in place.items()} == dict(
        zip(ids, values, strict=True)
    )
    assert place[ids[0]].rank == tensors.selected_token_ranks[0]
    assert place[ids[0]].decoded_token == (str(ids[0]) if width == 1 else None)


def test_numbers_are_cut_to_the_tokens_that_are_kept(vllm: None) -> None:
    (output,) = sent(tensors := sampled([4], 1), [4])
    one = processor()
    output.new_logprobs = output.new_logprobs.slice_request(0, 2)
    one.update_from_output(output)
    assert one.logprobs.logprobs == tensors.logprobs[:2, 0].tolist()
