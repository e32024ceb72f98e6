"""Outputs that wait in vLLM's core: every token arrives, in order, with its version, in time."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.strategy.vllm.outputs import gathered
from roll.strategy.vllm.outputs.gathered import MOST_STEPS, GatheredOutputs, joined

WHOLE, STREAMED, STOPPED, POOLED = "whole", "streamed", "with a stop string", "pooled"


class Asked:
    """The part of vLLM's `Request` that says how it is answered."""

    def __init__(self, kind: str) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self.sampling_params = None
        if kind != POOLED:
            self.sampling_params = SamplingParams(
                detokenize=kind == STOPPED,
                output_kind=RequestOutputKind.DELTA
                if kind == STREAMED
                else RequestOutputKind.FINAL_ONLY,
            )


def step(number: int, ids: dict[str, int], ended: set[str], version: int, plain: bool) -> Any:
    """Outputs of a step: for each id so many tokens, whose numbers tell step and place."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.outputs import LogprobsLists

    outputs = []
    for name, count in ids.items():
        tokens = [number * 10 + place for place in range(count)]
        columns: list[Any] = [tokens, [-float(token) for token in tokens], [1] * count]
        if not plain:
            columns = [np.array([[x] for x in columns[0]]), np.array([[x] for x in columns[1]])]
            columns.append(np.array([1] * count))
        end = FinishReason.LENGTH if name in ended else None
        outputs.append(EngineCoreOutput(name, tokens, LogprobsLists(*columns), finish_reason=end))
    return EngineCoreOutputs(outputs=outputs, weight_version=str(version))


def words(message: Any) -> list[tuple[str, int, float, str]]:
    """Name, token, log-prob and version of each token in a message."""
    if not hasattr(message, "outputs"):
        return []
    found = []
    for one in message.outputs:
        numbers = np.array(one.new_logprobs.logprobs).reshape(-1)
        for token, number in zip(one.new_token_ids, numbers, strict=True):
            found.append((one.request_id, token, float(number), message.weight_version))
    return found


def by_request(messages: list[Any]) -> dict[str, list[tuple[str, int, float, str]]]:
    found = defaultdict(list)
    for message in messages:
        for word in words(message):
            found[word[0]].append(word)
    return found


@given(st.data())
def test_what_waited_arrives_whole_in_order_and_before_what_comes_next(data: Any) -> None:
    kinds = data.draw(
        st.dictionaries(
            st.sampled_from("abcde"), st.sampled_from([WHOLE, WHOLE, WHOLE, STREAMED, STOPPED])
        )
    )
    requests: dict[str, Any] = {name: Asked(kind) for name, kind in kinds.items()}
    plain = data.draw(st.booleans())
    sent: list[Any] = []
    gathered = GatheredOutputs(sent.append, requests)
    told: list[Any] = []
    version, since = 0, 0
    for number in range(data.draw(st.integers(0, 50))):
        event = data.draw(st.sampled_from(["step"] * 8 + ["answer", "version", "abort"]))
        if event == "answer":
            message: Any = (0, f"answer {number}")
            told.append(message[1])
            gathered.put((0, Answer(message[1])))
            assert by_request([m for _, m in sent]) == by_request(told), "an answer overtook tokens"
            since = 0
            continue
        if event == "version":
            version += 1
            continue
        if event == "abort" and requests:
            del requests[data.draw(st.sampled_from(sorted(requests)))]
            continue
        if not requests:
            continue
        ended = set(data.draw(st.lists(st.sampled_from(sorted(requests)), max_size=1)))
        counts = {name: data.draw(st.integers(1, 3)) for name in sorted(requests)}
        told.append(step(number, counts, ended, version, plain))
        gathered.put((0, step(number, counts, ended, version, plain)))
        since += 1
        for name in ended:
            assert by_request([m for _, m in sent])[name] == by_request(told)[name], "end is late"
            del requests[name]
        if {kinds[name] for name in counts} - {WHOLE} - {kinds[name] for name in ended}:
            assert by_request([m for _, m in sent]) == by_request(told), "a reader waits"
        if by_request([m for _, m in sent]) == by_request(told):
            since = 0
        assert since < MOST_STEPS
    gathered.put(b"the end")
    assert sent[-1] == b"the end"
    assert by_request([m for _, m in sent[:-1]]) == by_request(told)
    assert len(sent) - 1 <= len(told)


class Answer:
    """The answer to a call, as far as a message shows it."""

    outputs: tuple[Any, ...] = ()
    scheduler_stats = None
    finished_requests = None
    weight_version = None

    def __init__(self, utility_output: str) -> None:
        self.utility_output = utility_output


def test_a_message_has_the_tokens_of_all_steps_that_nobody_reads_yet() -> None:
    sent: list[Any] = []
    gathered = GatheredOutputs(sent.append, {"a": Asked(WHOLE), "b": Asked(WHOLE)})
    for number in range(3 * MOST_STEPS):
        gathered.put((0, step(number, {"a": 1, "b": 1}, set(), 0, plain=True)))
    assert [len(message.outputs) for _, message in sent] == [2, 2, 2]
    assert [len(one.new_token_ids) for _, m in sent for one in m.outputs] == [MOST_STEPS] * 6


@pytest.mark.parametrize("kind", [STREAMED, STOPPED, POOLED])
def test_a_request_that_somebody_reads_gets_each_token_at_once(kind: str) -> None:
    sent: list[Any] = []
    gathered = GatheredOutputs(sent.append, {"a": Asked(WHOLE), "b": Asked(kind)})
    for number in range(5):
        gathered.put((0, step(number, {"a": 1, "b": 1}, set(), 0, plain=True)))
        assert len(sent) == number + 1


@pytest.mark.parametrize("name", ["routed_experts", "new_prompt_logprobs_tensors", "events"])
def test_an_output_with_more_than_tokens_does_not_wait(name: str) -> None:
    sent: list[Any] = []
    gathered = GatheredOutputs(sent.append, {"a": Asked(WHOLE)})
    for number in range(3):
        outputs = step(number, {"a": 1}, set(), 0, plain=True)
        setattr(outputs.outputs[0], name, np.arange(number + 2))
        gathered.put((0, outputs))
    assert [getattr(m.outputs[0], name).tolist() for _, m in sent] == [
        [0, 1],
        [0, 1, 2],
        [*range(4)],
    ]


def test_joined_outputs_have_what_the_first_says_of_the_prompt_and_the_last_of_the_end() -> None:
    from vllm.v1.engine import FinishReason
    from vllm.v1.metrics.stats import PrefillStats

    steps = [
        step(number, {"a": 1}, {"a"} if number == 2 else set(), 0, True) for number in range(3)
    ]
    stats = steps[0].outputs[0].prefill_stats = PrefillStats()
    (one,) = joined(steps).outputs
    assert one.prefill_stats is stats
    assert (one.new_token_ids, one.finish_reason) == ([0, 10, 20], FinishReason.LENGTH)


def test_outputs_of_other_clients_and_versions_are_not_mixed() -> None:
    sent: list[Any] = []
    gathered = GatheredOutputs(sent.append, {"a": Asked(WHOLE)})
    for client, version in ((0, 0), (0, 0), (1, 0), (1, 0), (1, 1)):
        gathered.put((client, step(0, {"a": 1}, set(), version, plain=True)))
    gathered.put(b"the end")
    seen = [(client, m.weight_version, len(m.outputs[0].new_token_ids)) for client, m in sent[:-1]]
    assert seen == [(0, "0", 2), (1, "0", 2), (1, "1", 1)]


def test_only_cores_of_marked_engines_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import core

    of_vllm = core.EngineCoreProc.run_busy_loop
    monkeypatch.setattr(core.EngineCoreProc, "run_busy_loop", of_vllm)  # put back at the end
    for value in (None, "0"):
        monkeypatch.delenv(gathered.GATHERS, raising=False)
        if value is not None:
            monkeypatch.setenv(gathered.GATHERS, value)
        gathered.gather_outputs()
        assert core.EngineCoreProc.run_busy_loop is of_vllm
    monkeypatch.setenv(gathered.GATHERS, "1")
    gathered.gather_outputs()
    assert core.EngineCoreProc.run_busy_loop is not of_vllm
