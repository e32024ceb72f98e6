"""One suite for every inference engine: real engines, a tiny model, Hugging Face as the oracle."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import operator
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.core.completion import Completion, FinishReason
from roll.core.errors import EngineDiedError, EngineError, WeightSyncError
from roll.strategy.available import status
from roll.strategy.vllm.engine import VllmEngine
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.transfer import send
from roll.weight_sync.transport_choice import new_channel
from tests.contract.engine_rig import (
    PROMPT,
    Rig,
    assert_agrees,
    assert_agrees_by_version,
    is_gone,
    outer_and_inner,
    request,
    shake,
    start,
    weights_of,
)
from tests.tiny import char_tokenizer, save_tiny_model
from tests.turns import in_groups

WITHOUT_SGLANG = pytest.mark.skipif(not status("sglang").ok, reason=status("sglang").advice)
"""Its release pins another torch than ours; only without a GPU both fit into one environment."""
ENGINES = [
    *in_groups(["hf"]),
    *in_groups(["vllm"], pytest.mark.slow),
    *in_groups(["sglang"], pytest.mark.slow, WITHOUT_SGLANG),
]


@pytest.fixture(scope="module", params=ENGINES)
def rig(
    request: pytest.FixtureRequest,
    loop: asyncio.AbstractEventLoop,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rig]:
    path = save_tiny_model(tmp_path_factory.mktemp("model"))
    rig = start(request.param, path, loop)
    yield rig
    rig.run(rig.engine.close())


def test_greedy_equals_hugging_face_generate(rig: Rig) -> None:
    rig.push_oracle()
    (completion,) = rig.generate(temperature=0.0)
    expected = rig.oracle.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False)
    assert completion.tokens.tolist() == expected[0, len(PROMPT) :].tolist()
    assert_agrees(completion, rig.oracle)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_match_a_rescore(rig: Rig, temperature: float) -> None:
    rig.push_oracle()
    for completion in rig.generate(n=4, temperature=temperature):
        assert_agrees(completion, rig.oracle, temperature)


def test_siblings_differ_and_repeat_with_their_seed(rig: Rig) -> None:
    first = rig.generate(n=4, seed=3)
    assert len({tuple(completion.tokens) for completion in first}) == 4
    again = rig.generate(n=4, seed=3)
    assert [c.tokens for c in again] == [c.tokens for c in first]
    assert [c.tokens for c in rig.generate(n=4, seed=103)] != [c.tokens for c in first]
    alone = rig.generate(n=1, seed=5)
    assert alone[0].tokens == first[2].tokens


def test_many_requests_at_once_are_answered_each_by_its_own_seed(rig: Rig) -> None:
    async def all_at_once() -> list[list[Completion]]:
        return await asyncio.gather(
            *(rig.engine.generate(request(n=2, seed=10 * i, tokens=6)) for i in range(8))
        )

    for index, completions in enumerate(rig.run(all_at_once())):
        for completion in completions:
            assert_agrees(completion, rig.oracle)
        alone = rig.generate(n=2, seed=10 * index, tokens=6)
        assert [c.tokens for c in alone] == [c.tokens for c in completions]


def test_length_stop_token_and_stop_string_end_a_response(rig: Rig) -> None:
    (limited,) = rig.generate(tokens=5, ignore_eos=True)
    assert (limited.finish, len(limited.tokens)) == (FinishReason.LENGTH, 5)
    (full,) = rig.generate(tokens=40, ignore_eos=True, seed=11)
    text = char_tokenizer().decode(full.tokens[:20].tolist(), skip_special_tokens=True)
    stop = text[8:10]
    (stopped,) = rig.generate(tokens=40, ignore_eos=True, seed=11, stop=(stop,))
    assert stopped.finish is FinishReason.STOP
    assert stopped.tokens == full.tokens[: len(stopped.tokens)]
    decoded = char_tokenizer().decode(stopped.tokens.tolist(), skip_special_tokens=True)
    assert decoded.find(stop) == len(decoded) - len(stop)
    ended = rig.generate(n=32, tokens=200)
    stops = [c for c in ended if c.finish is FinishReason.STOP]
    assert stops
    assert all(c.tokens[-1] == 1 and 1 not in c.tokens[:-1] for c in stops)


def test_top_k_draws_from_the_likeliest_and_reports_the_cut_distribution(rig: Rig) -> None:
    (completion,) = rig.generate(top_k=1, tokens=8)
    assert all(abs(logprob) < 1e-6 for logprob in completion.logprobs)
    rig.push_oracle()
    assert completion.tokens == rig.generate(temperature=0.0, tokens=8)[0].tokens


def test_new_weights_take_over_and_carry_their_version(rig: Rig) -> None:
    (before,) = rig.generate(temperature=0.0)
    assert set(before.versions) == {rig.version}
    shake(rig.oracle, seed=rig.version)
    sent, loaded = rig.push_oracle()
    assert loaded.version == rig.version
    assert sent.checksum is not None
    assert (loaded.num_tensors, loaded.num_bytes, loaded.checksum) == (
        sent.num_tensors,
        sent.num_bytes,
        sent.checksum,
    )
    (after,) = rig.generate(temperature=0.0)
    assert after.tokens != before.tokens or after.logprobs != before.logprobs
    assert set(after.versions) == {rig.version}
    assert_agrees(after, rig.oracle)
    expected = rig.oracle.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False)
    assert after.tokens.tolist() == expected[0, len(PROMPT) :].tolist()


def test_frozen_weights_travel_once_and_are_kept(rig: Rig) -> None:
    rig.push_oracle()
    frozen = {
        name: tensor.clone()
        for name, tensor in weights_of(rig.oracle)
        if "embed_tokens" in name or "layers.0.self_attn" in name
    }
    shake(rig.oracle, seed=77)
    with torch.no_grad():
        for name, tensor in weights_of(rig.oracle):
            if name in frozen:
                tensor.copy_(frozen[name])
    sent, loaded = rig.push(weights_of(rig.oracle), unchanged=frozen.keys())
    assert loaded.checksum == sent.checksum
    assert loaded.num_tensors == len(weights_of(rig.oracle)) - len(frozen)
    assert_agrees(rig.generate()[0], rig.oracle)


def test_an_abort_returns_the_tokens_so_far_at_once(rig: Rig) -> None:
    running = request(n=2, tokens=240, ignore_eos=True)
    future = rig.submit(rig.engine.generate(running))
    time.sleep(0.15)
    begin = time.monotonic()
    rig.run(rig.engine.abort(running.id))
    completions = future.result(timeout=60)
    assert time.monotonic() - begin < 2
    for completion in completions:
        assert completion.finish is FinishReason.ABORT
        assert len(completion) < 240
    rig.run(rig.engine.abort("never heard of"))
    assert rig.generate(tokens=3, ignore_eos=True)[0].finish is FinishReason.LENGTH
    if isinstance(rig.engine, VllmEngine):
        assert not rig.engine._engine.output_processor.parent_requests, "or they pile up"


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_a_push_that_does_not_fit_is_refused_and_the_old_weights_stay(rig: Rig, fault: str) -> None:
    rig.push_oracle()
    (before,) = rig.generate(temperature=0.0)
    tensors = [(name, tensor + 1) for name, tensor in weights_of(rig.oracle)]
    if fault == "missing":
        del tensors[3]
    elif fault == "unknown":
        tensors.append(("model.layers.9.mlp.up_proj.weight", torch.ones(2)))
    else:
        tensors[0] = (tensors[0][0], torch.ones(3, 3))
    with pytest.raises(WeightSyncError, match=r"missing|unknown|shape"):
        rig.push(tensors)
    (after,) = rig.generate(temperature=0.0)
    assert (after.tokens, after.versions) == (before.tokens, before.versions)
    # The second time the prompt may come from the prefix cache, in other sums of the same numbers.
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)


def test_a_push_that_breaks_off_blocks_generation_until_a_whole_one_came(rig: Rig) -> None:
    tensors = weights_of(rig.oracle)
    running = rig.submit(rig.engine.generate(request(tokens=240, ignore_eos=True)))
    rig.wait_until_written(1)

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from tensors[:8]
        raise RuntimeError("the trainer fell over")

    channel = new_channel("shared_memory", num_receivers=1, bucket_bytes=4096, timeout_s=60)
    with ThreadPoolExecutor(1) as pool:
        loading = rig.submit(rig.engine.load_weights(channel, 99, receiver=0, verify=False))
        sending = pool.submit(send, channel, broken(), Manifest.of(tensors), verify=False)
        with pytest.raises(WeightSyncError, match="fell over"):
            loading.result(timeout=600)
        with pytest.raises(RuntimeError, match="fell over"):
            sending.result(timeout=600)
    with pytest.raises(EngineError, match="incomplete weights"):
        running.result(timeout=60)
    with pytest.raises(EngineError, match="incomplete weights"):
        rig.generate()
    rig.push_oracle()
    assert_agrees(rig.generate()[0], rig.oracle)


def test_a_response_that_spans_three_versions_agrees_with_each_of_the_three_models(
    rig: Rig,
) -> None:
    rig.push_oracle()
    models = {rig.version: copy.deepcopy(rig.oracle)}
    future = rig.submit(rig.engine.generate(request(n=3, tokens=500, ignore_eos=True)))
    for seed in (1000, 1001):
        rig.wait_until_written(30)
        shake(rig.oracle, seed)
        rig.push_oracle()
        models[rig.version] = copy.deepcopy(rig.oracle)
    for completion in future.result(timeout=600):
        assert (completion.finish, len(completion.tokens)) == (FinishReason.LENGTH, 500)
        assert_agrees_by_version(completion, models)


def ask(rig: Rig, path: str, **body: Any) -> dict[str, Any]:
    asked = urllib.request.Request(
        f"http://127.0.0.1:{rig.port}/v1/{path}",
        json.dumps({"model": "policy", **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        choice: dict[str, Any] = json.load(answer)["choices"][0]
    return choice


def test_an_endpoint_answers_as_the_engine_does_also_over_a_push(rig: Rig) -> None:
    if rig.kind != "vllm":  # has none
        return
    rig.push_oracle()
    tokenizer = char_tokenizer()
    found = ask(rig, "completions", prompt=list(PROMPT), temperature=0, max_tokens=24)
    (expected,) = rig.generate(temperature=0.0)
    assert found["text"] == tokenizer.decode(expected.tokens.tolist(), skip_special_tokens=True)
    message = [{"role": "user", "content": "3 1 2"}]
    prompt = tuple(tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"])
    found = ask(rig, "chat/completions", messages=message, temperature=0, max_tokens=24)
    (expected,) = rig.generate(prompt=prompt, temperature=0.0)
    assert found["message"]["content"] == tokenizer.decode(
        expected.tokens, skip_special_tokens=True
    )
    with ThreadPoolExecutor(1) as pool:
        outside = pool.submit(
            ask,
            rig,
            "completions",
            prompt=list(PROMPT),
            max_tokens=240,
            ignore_eos=True,
            return_token_ids=True,
        )
        shake(rig.oracle, seed=1002)
        rig.push_oracle()
        assert len(outside.result(timeout=600)["token_ids"]) == 240


def test_a_refused_push_leaves_a_running_request_as_it_is(rig: Rig) -> None:
    rig.push_oracle()
    asked = request(n=2, tokens=240, ignore_eos=True)
    undisturbed = rig.run(rig.engine.generate(asked))
    future = rig.submit(rig.engine.generate(replace(asked, id="again")))
    rig.wait_until_written(20)
    with pytest.raises(WeightSyncError, match="missing"):
        rig.push(weights_of(rig.oracle)[1:])
    assert [c.tokens for c in future.result(timeout=600)] == [c.tokens for c in undisturbed]


def test_a_short_request_ends_before_a_long_one_that_came_first(rig: Rig) -> None:
    long = rig.submit(rig.engine.generate(request(tokens=240, ignore_eos=True)))
    rig.wait_until_written(1)
    assert len(rig.generate(tokens=3, ignore_eos=True)[0].tokens) == 3
    assert not long.done()
    assert len(long.result(timeout=600)[0].tokens) == 240


def test_heartbeats_give_every_token_once_and_add_up_to_the_completions(rig: Rig) -> None:
    rig.push_oracle()
    before = rig.run(rig.engine.heartbeat())
    assert (before.version, before.progress) == (rig.version, {})
    asked = request(n=4, tokens=200)  # some siblings stop early
    future = rig.submit(rig.engine.generate(asked))
    seen: list[list[Completion]] = [[] for _ in range(4)]
    beats = 0
    while not future.done():
        beat = rig.run(rig.engine.heartbeat())
        for index, piece in enumerate(beat.progress.get(asked.id, ())):
            assert piece.start == sum(len(one.tokens) for one in seen[index])
            seen[index].append(piece.written)
        beats += 1
    assert beats > 3
    completions = future.result()
    for pieces, whole in zip(seen, completions, strict=True):
        heard = functools.reduce(operator.add, pieces)
        assert len(heard) > 0
        assert replace(heard, finish=whole.finish) == whole.part(0, len(heard))
        ended = [piece.finish for piece in pieces if piece.finish is not FinishReason.ABORT]
        assert set(ended) <= {whole.finish}
    after = rig.run(rig.engine.heartbeat())
    assert after.progress == {}
    written = sum(len(completion.tokens) for completion in completions)
    assert after.written_tokens - before.written_tokens == written


def test_heartbeats_tell_what_was_read_and_what_was_read_again_after_new_weights(rig: Rig) -> None:
    rig.push_oracle()
    before = rig.run(rig.engine.heartbeat()).prefilled_tokens
    prompt = tuple(2 + (7 * i) % 29 for i in range(100))
    asked = request(prompt=prompt, n=2, tokens=400, ignore_eos=True)
    future = rig.submit(rig.engine.generate(asked))
    begun = rig.wait_until_written(40).prefilled_tokens
    # A token that another one follows at once may be left out; siblings may share their prompt.
    assert 98 <= begun - before <= 200
    assert rig.wait_until_written(40).prefilled_tokens == begun
    rig.push_oracle()
    after = rig.wait_until_written(10).prefilled_tokens
    assert 98 + 80 - 2 <= after - begun < 2 * 500
    future.result(timeout=600)


def test_a_killed_core_ends_every_call_with_the_death_and_close_leaves_no_process(
    rig: Rig,
) -> None:
    if rig.kind == "hf":  # has no process of its own
        return
    core, worker = outer_and_inner(rig.kind)
    generating = rig.submit(rig.engine.generate(request(tokens=240, ignore_eos=True)))
    rig.wait_until_written(1)
    worker.suspend()
    beating = rig.submit(rig.engine.heartbeat())
    with pytest.raises(TimeoutError):
        beating.result(timeout=1)
    core.kill()
    # What one of them takes with it may be noticed before itself.
    died = rf"died: .*({core.pid}|{worker.pid})"
    for call in (generating, beating):
        with pytest.raises(EngineDiedError, match=died):
            call.result(timeout=10)
    with pytest.raises(EngineDiedError, match=died):
        rig.run(rig.engine.heartbeat())
    with pytest.raises(EngineDiedError, match=died):
        rig.generate()
    rig.run(rig.engine.close())
    assert is_gone(core)
    assert is_gone(worker)
