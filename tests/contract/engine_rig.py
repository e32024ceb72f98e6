"""An engine on an event loop, a tiny model in it, and Hugging Face as its oracle."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from roll.config.sections.engines import EndpointConfig, HfEngineConfig, SglangConfig, VllmConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.roles import Role
from roll.core.completion import Completion
from roll.core.pictures import Pictures
from roll.core.types import GenerateRequest, Heartbeat, SamplingParams, WorkerSpec
from roll.platform.machine import free_port
from roll.strategy.backend_setup import EngineSetup
from roll.strategy.hf.engine import HfEngine
from roll.strategy.interfaces import InferenceStrategy, LoadReport
from roll.strategy.sglang.engine import SglangEngine
from roll.strategy.vllm.engine import VllmEngine
from roll.weight_sync.channel import TransportKind
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.transfer import SendReport, send
from roll.weight_sync.transport_choice import new_channel
from tests.contract.forked_cores import fork_next_core
from tests.vision_models import SeenRow, oracle_logprobs

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
SEEN_WITHIN = 1e-5
"""Largest difference of log-probs after pictures, in float32."""
_ids = itertools.count()


@dataclass
class Rig:
    """An engine on an event loop in a thread, and the model it should agree with."""

    kind: str
    engine: InferenceStrategy
    port: int
    """Of its endpoint."""
    loop: asyncio.AbstractEventLoop
    oracle: PreTrainedModel
    version: int = 0

    def submit(self, work: Coroutine[object, object, R]) -> Future[R]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[object, object, R]) -> R:
        return self.submit(work).result(timeout=600)

    def generate(self, **changes: Any) -> list[Completion]:
        return self.run(self.engine.generate(request(**changes)))

    def push(
        self,
        tensors: Sequence[tuple[str, Tensor]],
        *,
        receivers: int = 1,
        alpha: float | None = None,
        unchanged: Set[str] = frozenset(),
        transport: TransportKind = "shared_memory",
    ) -> tuple[SendReport, LoadReport]:
        """All weights but the `unchanged`; with `alpha`, an adapter."""
        tensors = [(name, tensor) for name, tensor in tensors if name not in unchanged]
        manifest = replace(Manifest.of(tensors), unchanged=frozenset(unchanged))
        channel = new_channel(transport, num_receivers=receivers, timeout_s=30)
        how: dict[str, Any] = {"receiver": 0, "verify": True}
        load: Callable[..., Coroutine[Any, Any, LoadReport]] = self.engine.load_weights
        if alpha is not None:
            assert isinstance(self.engine, VllmEngine)
            load, how["alpha"] = self.engine.load_adapter, alpha
        with ThreadPoolExecutor(1) as pool:
            loading = self.submit(load(channel, self.version + 1, **how))
            sending = pool.submit(send, channel, iter(tensors), manifest, verify=True)
            report = loading.result(timeout=600)
            self.version += 1
            return sending.result(timeout=600), report

    def push_oracle(self) -> tuple[SendReport, LoadReport]:
        return self.push(weights_of(self.oracle))

    def wait_until_written(self, tokens: int, timeout_s: float = 120) -> Heartbeat:
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
    pictures: Pictures | None = None,
    **sampling: Any,
) -> GenerateRequest:
    params = SamplingParams(temperature=temperature, max_new_tokens=tokens, **sampling)
    return GenerateRequest(f"request-{next(_ids)}", prompt, params, n, seed, pictures)


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
    model: PreTrainedModel, prompt: tuple[int, ...], tokens: Sequence[int], temperature: float = 1
) -> Tensor:
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
    logprobs = (logits / temperature).log_softmax(-1)
    chosen: Tensor = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return chosen


def outer_and_inner(kind: str) -> tuple[psutil.Process, psutil.Process]:
    """The engine's process that we talk to, and the one that runs the model: it or one below."""
    outer, inner = {
        "vllm": ("VLLM::EngineCore", "VLLM::Worker"),
        "sglang": ("roll.strategy.sglang.server", "sglang::scheduler"),
    }[kind]
    # Where nobody waits for orphans, zombies of other tests may be left.
    living = [one for one in psutil.Process().children(recursive=True) if not is_gone(one)]
    found = {
        mark: child
        for child in living
        for mark in (outer, inner)
        if mark in f"{child.name()} {' '.join(child.cmdline())}"
    }
    return found[outer], found.get(inner, found[outer])


def is_gone(process: psutil.Process) -> bool:
    """It has ended; whoever inherited it may not have looked yet."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def assert_agrees(completion: Completion, oracle: PreTrainedModel, temperature: float = 1) -> None:
    expected = rescore(oracle, PROMPT, completion.tokens, temperature)
    found = torch.tensor(completion.logprobs, dtype=torch.float64)
    assert (found - expected).abs().max() < 1e-4


def assert_sees(
    completion: Completion, row: SeenRow, oracle: PreTrainedModel, temperature: float = 1
) -> None:
    """The log-probs are those of the model's own pass over the pictures of the row."""
    expected = oracle_logprobs(oracle, row, completion.tokens.tolist(), temperature)
    found = torch.tensor(completion.logprobs, dtype=torch.float64)
    assert (found - expected).abs().max() < SEEN_WITHIN


def assert_agrees_by_version(completion: Completion, models: Mapping[int, PreTrainedModel]) -> None:
    """Each token with the model of its version, which has read all tokens before it."""
    assert set(completion.versions) == set(models)
    assert list(completion.versions) == sorted(completion.versions)
    scores = {v: rescore(model, PROMPT, completion.tokens) for v, model in models.items()}
    expected = torch.stack([scores[v][i] for i, v in enumerate(completion.versions)])
    found = torch.tensor(completion.logprobs, dtype=torch.float64)
    assert torch.isfinite(found).all()
    assert (found - expected).abs().max() < 1e-4


def start(
    kind: str,
    path: Path,
    loop: asyncio.AbstractEventLoop,
    *,
    dtype: str = "float32",
    overrides: dict[str, Any] | None = None,
    oracle: Path | None = None,
    platform: str = "cpu",
    **options: Any,
) -> Rig:
    """Start an engine with the model of a folder; its oracle is that of another folder, if one is
    named."""
    model = ModelConfig(path=str(path), overrides=dict(overrides or {}))
    spec = replace(SPEC, platform=platform)
    setup = EngineSetup(spec=spec, model=model, dtype=dtype, max_model_len=512)
    engine: InferenceStrategy
    port = free_port()
    if kind == "hf":
        engine = HfEngine(HfEngineConfig(), setup)
    elif kind == "sglang":
        engine = SglangEngine(SglangConfig(**options), setup)
    else:
        settings = {"endpoint": EndpointConfig(port=port)} | options
        engine = VllmEngine(VllmConfig(**settings), setup)
        if platform == "cpu":
            fork_next_core()
    sees = "vision_config" in AutoConfig.from_pretrained(path).sub_configs
    factory = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    rig = Rig(kind, engine, port, loop, factory.from_pretrained(oracle or path))
    rig.run(engine.start())
    return rig
