"""One suite for every inference engine: real engines, a tiny model, Hugging Face as the oracle."""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from roll.config.model import ModelConfig
from roll.config.roles import Role
from roll.config.strategy import HfEngineConfig, VllmConfig
from roll.core.errors import EngineDiedError, EngineError, WeightSyncError
from roll.core.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Heartbeat,
    SamplingParams,
    WorkerSpec,
)
from roll.strategy.api import InferenceStrategy, LoadReport
from roll.strategy.hf.engine import HfEngine
from roll.strategy.vllm.engine import VllmEngine
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.plan import new_channel
from roll.weight_sync.transfer import SendReport, send
from tests.tiny import char_tokenizer, save_tiny_model

R = TypeVar("R")
PROMPT = (5, 17, 9, 30, 22, 8)
SPEC = WorkerSpec(
    role=Role.ACTOR_INFER,
    rank=0,
    world_size=1,
    devices=(0,),
    cores=tuple(sorted(os.sched_getaffinity(0))),
    node=0,
    rendezvous="127.0.0.1:0",
    seed=0,
    platform="cpu",
)
_ids = itertools.count()


@dataclass
class Rig:
    """An engine on an event loop in a thread, and the model it should agree with."""

    kind: str
    engine: InferenceStrategy
    loop: asyncio.AbstractEventLoop
    oracle: PreTrainedModel
    version: int = 0

    def submit(self, work: Coroutine[object, object, R]) -> Future[R]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[object, object, R]) -> R:
        return self.submit(work).result(timeout=240)

    def generate(self, **changes: Any) -> list[Completion]:
        return self.run(self.engine.generate(request(**changes)))

    def push(
        self, tensors: Sequence[tuple[str, Tensor]], *, receivers: int = 1
    ) -> tuple[SendReport, LoadReport]:
        channel = new_channel("shared_memory", num_receivers=receivers, timeout_s=30)
        with ThreadPoolExecutor(1) as pool:
            loading = self.submit(
                self.engine.load_weights(channel, self.version + 1, receiver=0, verify=True)
            )
            sending = pool.submit(send, channel, iter(tensors), Manifest.of(tensors), verify=True)
            report = loading.result(timeout=60)
            self.version += 1
            return sending.result(timeout=60), report

    def push_oracle(self) -> tuple[SendReport, LoadReport]:
        return self.push(weights_of(self.oracle))

    def wait_until_written(self, tokens: int, timeout_s: float = 30) -> Heartbeat:
        """Let the requests under way write so many tokens more."""
        deadline = time.monotonic() + timeout_s
        first = self.run(self.engine.heartbeat()).written_tokens
        while time.monotonic() < deadline:
            beat = self.run(self.engine.heartbeat())
            if beat.written_tokens >= first + tokens:
                return beat
        raise AssertionError(f"{tokens} tokens were not written within {timeout_s} s")


def request(
    *,
    prompt: tuple[int, ...] = PROMPT,
    n: int = 1,
    seed: int | None = 7,
    tokens: int = 24,
    temperature: float = 1.0,
    **sampling: Any,
) -> GenerateRequest:
    params = SamplingParams(temperature=temperature, max_new_tokens=tokens, **sampling)
    return GenerateRequest(f"request-{next(_ids)}", prompt, params, n, seed)


def weights_of(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """As `save_pretrained` names them: the tied head left out."""
    tied = model.config.tie_word_embeddings
    return [(n, t) for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")]


def shake(model: PreTrainedModel, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=g) * 0.05)


@torch.no_grad()
def rescore(
    model: PreTrainedModel, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float = 1
) -> Tensor:
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
    logprobs = (logits / temperature).log_softmax(-1)
    chosen: Tensor = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return chosen


def vllm_children() -> list[psutil.Process]:
    children = [
        child
        for child in psutil.Process().children(recursive=True)
        if "VLLM" in " ".join(child.cmdline()) or "VLLM" in child.name()
    ]
    assert len(children) >= 2
    return children


def assert_agrees(completion: Completion, oracle: PreTrainedModel, temperature: float = 1) -> None:
    expected = rescore(oracle, PROMPT, completion.tokens, temperature)
    found = torch.tensor(completion.logprobs, dtype=torch.float64)
    assert (found - expected).abs().max() < 1e-4


def start(kind: str, path: Path, loop: asyncio.AbstractEventLoop, **options: Any) -> Rig:
    model = ModelConfig(path=str(path))
    engine: InferenceStrategy
    if kind == "hf":
        engine = HfEngine(
            HfEngineConfig(), spec=SPEC, model=model, dtype="float32", max_model_len=256
        )
    else:
        engine = VllmEngine(
            VllmConfig(**options),
            spec=SPEC,
            model=model,
            dtype="float32",
            max_model_len=256,
        )
    rig = Rig(kind, engine, loop, AutoModelForCausalLM.from_pretrained(path))
    rig.run(engine.start())
    return rig


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module", params=["hf", "vllm"])
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
    assert completion.tokens == tuple(expected[0, len(PROMPT) :].tolist())
    assert_agrees(completion, rig.oracle)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_match_a_rescore(rig: Rig, temperature: float) -> None:
    rig.push_oracle()
    for completion in rig.generate(n=4, temperature=temperature):
        assert len(completion.logprobs) == len(completion.tokens) == len(completion.versions)
        assert_agrees(completion, rig.oracle, temperature)


def test_siblings_differ_and_repeat_with_their_seed(rig: Rig) -> None:
    first = rig.generate(n=4, seed=3)
    assert len({completion.tokens for completion in first}) == 4
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
    text = char_tokenizer().decode(full.tokens[:20], skip_special_tokens=True)
    stop = text[8:10]
    (stopped,) = rig.generate(tokens=40, ignore_eos=True, seed=11, stop=(stop,))
    assert stopped.finish is FinishReason.STOP
    assert stopped.tokens == full.tokens[: len(stopped.tokens)]
    decoded = char_tokenizer().decode(stopped.tokens, skip_special_tokens=True)
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
    assert after.tokens == tuple(expected[0, len(PROMPT) :].tolist())


def test_an_abort_returns_the_tokens_so_far_at_once(rig: Rig) -> None:
    running = request(n=2, tokens=240, ignore_eos=True)
    future = rig.submit(rig.engine.generate(running))
    time.sleep(0.15)
    begin = time.monotonic()
    rig.run(rig.engine.abort(running.id))
    completions = future.result(timeout=20)
    assert time.monotonic() - begin < 2
    for completion in completions:
        assert completion.finish is FinishReason.ABORT
        assert len(completion.tokens) < 240
        assert len(completion.logprobs) == len(completion.versions) == len(completion.tokens)
    rig.run(rig.engine.abort("never heard of"))
    assert rig.generate(tokens=3, ignore_eos=True)[0].finish is FinishReason.LENGTH


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_a_push_that_does_not_fit_is_refused_and_the_old_weights_stay(rig: Rig, fault: str) -> None:
    rig.push_oracle()
    before = rig.generate(temperature=0.0)
    tensors = [(name, tensor + 1) for name, tensor in weights_of(rig.oracle)]
    if fault == "missing":
        del tensors[3]
    elif fault == "unknown":
        tensors.append(("model.layers.9.mlp.up_proj.weight", torch.ones(2)))
    else:
        tensors[0] = (tensors[0][0], torch.ones(3, 3))
    with pytest.raises(WeightSyncError, match=r"missing|unknown|shape"):
        rig.push(tensors)
    assert rig.generate(temperature=0.0) == before


def test_a_push_that_breaks_off_blocks_generation_until_a_whole_one_came(rig: Rig) -> None:
    tensors = weights_of(rig.oracle)
    running = rig.submit(rig.engine.generate(request(tokens=240, ignore_eos=True)))
    rig.wait_until_written(1)

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from tensors[:8]
        raise RuntimeError("the trainer fell over")

    channel = new_channel("shared_memory", num_receivers=1, bucket_bytes=4096, timeout_s=20)
    with ThreadPoolExecutor(1) as pool:
        loading = rig.submit(rig.engine.load_weights(channel, 99, receiver=0, verify=False))
        sending = pool.submit(send, channel, broken(), Manifest.of(tensors), verify=False)
        with pytest.raises(WeightSyncError, match="fell over"):
            loading.result(timeout=60)
        with pytest.raises(RuntimeError, match="fell over"):
            sending.result(timeout=60)
    with pytest.raises(EngineError, match="incomplete weights"):
        running.result(timeout=20)
    with pytest.raises(EngineError, match="incomplete weights"):
        rig.generate()
    rig.push_oracle()
    assert_agrees(rig.generate()[0], rig.oracle)


def test_a_response_that_spans_three_versions_agrees_with_each_of_the_three_models(
    rig: Rig,
) -> None:
    rig.push_oracle()
    models = {rig.version: copy.deepcopy(rig.oracle)}
    future = rig.submit(rig.engine.generate(request(n=3, tokens=240, ignore_eos=True)))
    for seed in (1000, 1001):
        rig.wait_until_written(30)
        shake(rig.oracle, seed)
        rig.push_oracle()
        models[rig.version] = copy.deepcopy(rig.oracle)
    for completion in future.result(timeout=60):
        assert (completion.finish, len(completion.tokens)) == (FinishReason.LENGTH, 240)
        assert set(completion.versions) == set(models)
        assert list(completion.versions) == sorted(completion.versions)
        scores = {v: rescore(model, PROMPT, completion.tokens) for v, model in models.items()}
        expected = torch.stack([scores[v][i] for i, v in enumerate(completion.versions)])
        found = torch.tensor(completion.logprobs, dtype=torch.float64)
        assert (found - expected).abs().max() < 1e-4


def test_a_refused_push_leaves_a_running_request_as_it_is(rig: Rig) -> None:
    rig.push_oracle()
    asked = request(n=2, tokens=240, ignore_eos=True)
    undisturbed = rig.run(rig.engine.generate(asked))
    future = rig.submit(rig.engine.generate(replace(asked, id="again")))
    rig.wait_until_written(20)
    with pytest.raises(WeightSyncError, match="missing"):
        rig.push(weights_of(rig.oracle)[1:])
    rig.version -= 1
    assert [c.tokens for c in future.result(timeout=60)] == [c.tokens for c in undisturbed]


def test_a_short_request_ends_before_a_long_one_that_came_first(rig: Rig) -> None:
    long = rig.submit(rig.engine.generate(request(tokens=240, ignore_eos=True)))
    rig.wait_until_written(1)
    assert len(rig.generate(tokens=3, ignore_eos=True)[0].tokens) == 3
    assert not long.done()
    assert len(long.result(timeout=60)[0].tokens) == 240


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
            seen[index].append(piece)
        beats += 1
    assert beats > 3
    completions = future.result()
    for pieces, whole in zip(seen, completions, strict=True):
        tokens = tuple(itertools.chain(*(piece.tokens for piece in pieces)))
        assert len(tokens) > 0
        assert tokens == whole.tokens[: len(tokens)]
        logprobs = tuple(itertools.chain(*(piece.logprobs for piece in pieces)))
        assert logprobs == whole.logprobs[: len(tokens)]
        versions = tuple(itertools.chain(*(piece.versions for piece in pieces)))
        assert versions == whole.versions[: len(tokens)]
        ended = [piece.finish for piece in pieces if piece.finish is not FinishReason.ABORT]
        assert set(ended) <= {whole.finish}
    after = rig.run(rig.engine.heartbeat())
    assert after.progress == {}
    written = sum(len(completion.tokens) for completion in completions)
    assert after.written_tokens - before.written_tokens == written


def test_a_killed_core_ends_every_call_with_the_death_and_close_leaves_no_process(
    rig: Rig,
) -> None:
    if rig.kind == "hf":  # has no process of its own
        return
    children = vllm_children()
    core = next(child for child in children if "EngineCore" in child.name())
    worker = next(child for child in children if child is not core)
    generating = rig.submit(rig.engine.generate(request(tokens=240, ignore_eos=True)))
    rig.wait_until_written(1)
    worker.suspend()
    beating = rig.submit(rig.engine.heartbeat())
    with pytest.raises(TimeoutError):
        beating.result(timeout=1)
    core.kill()
    for call in (generating, beating):
        with pytest.raises(EngineDiedError, match=rf"died: .*{core.pid}"):
            call.result(timeout=10)
    with pytest.raises(EngineDiedError, match=str(core.pid)):
        rig.run(rig.engine.heartbeat())
    with pytest.raises(EngineDiedError, match=str(core.pid)):
        rig.generate()
    rig.run(rig.engine.close())
    assert not any(child.is_running() for child in children)


@pytest.mark.slow
def test_two_tensor_parallel_ranks_agree_with_hugging_face_before_and_after_a_push(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    rig = start("vllm", save_tiny_model(tmp_path, tied=False), loop, tp=2)
    try:
        assert_agrees(rig.generate(n=2)[0], rig.oracle)
        shake(rig.oracle, seed=1)
        sent, loaded = rig.push(weights_of(rig.oracle), receivers=2)
        assert loaded.checksum == sent.checksum
        assert_agrees(rig.generate(n=2)[0], rig.oracle)
    finally:
        rig.run(rig.engine.close())
