"""A run whose models are scripted: its driver, workers and calls are those of a real run.

`ScriptedLauncher` starts subclasses of the workers with a model. They replace only what computes:
the engine of a replica, and the strategy of a rank. So requests, rewards, scoring, updates and
pushes take the way that they take in every run, and cost what they cost there.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, NoReturn

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.simulation.lengths import LogNormal
from roll.algorithms.build import build_loss
from roll.algorithms.loss_interface import PolicyTerms, TermsLoss
from roll.config.algorithm import AlgorithmConfig
from roll.config.sections.model import ModelConfig
from roll.core.batches import TokenBatch
from roll.core.completion import LOGPROB_TYPE, TOKEN_TYPE, Completion, FinishReason, VersionRuns
from roll.core.metrics import Mean, Metrics, Sum
from roll.core.teacher_outputs import OutputHead
from roll.core.types import GenerateRequest, Heartbeat, RankInfo, Sample, WorkerSpec
from roll.distributed.cluster import Cluster, Launcher, P, Placement, W
from roll.distributed.dispatch import BROADCAST, dispatch
from roll.distributed.worker import Worker
from roll.strategy.interfaces import B, LoadReport, Saving
from roll.weight_sync.channel import Channel
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.transfer import SendReport
from roll.workers.actor import ActorWorker
from roll.workers.infer import InferWorker
from roll.workers.model import ScoreWorker, TrainWorker
from roll.workers.reference import ReferenceWorker
from roll.workers.work import WorkMeter

FIRST_TOKEN, VOCABULARY = 257, 32_768
"""Completions have the tokens from FIRST_TOKEN on; those below are the single bytes, of which
prompts consist, and the token that ends a sequence."""
PLACEHOLDER = "<|image_pad|>"
"""Token of a picture, behind all others."""
SEEING_TEMPLATE = (
    "{% for part in messages[0].content %}"
    "{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
)
SIZES = {"shortest_edge": 28**2, "longest_edge": 28**2 * 16384}
"""Smallest and largest area of a picture, in pixels."""


@dataclass(frozen=True)
class Script:
    """What the scripted workers do."""

    lengths: LogNormal
    longest: int
    """Longer completions are cut to this number of tokens."""
    tp: int = 1
    """Number of ranks that share their rows, as tensor parallel ranks do."""


def scripted_length(seed: int, script: Script) -> int:
    """Return the number of tokens of the completion with this seed, at least 1."""
    return max(1, min(script.longest, round(script.lengths.draw(seed))))


def scripted_completion(seed: int, version: int, script: Script) -> Completion:
    """Return a completion of random tokens, all of one version; equal seeds give equal tokens."""
    length = scripted_length(seed, script)
    rng = np.random.default_rng(seed)
    tokens, logprobs = rng.integers(FIRST_TOKEN, VOCABULARY, length), -rng.random(length)
    return Completion.of(
        tokens=array(TOKEN_TYPE, tokens.astype(np.int32).tobytes()),
        logprobs=array(LOGPROB_TYPE, logprobs.astype(np.float32).tobytes()),
        versions=VersionRuns(((version, length),)),
        finish=FinishReason.LENGTH if length == script.longest else FinishReason.STOP,
    )


def odd_length(sample: Sample) -> float:
    """Return 1 if the text of the response has an odd number of characters, else 0: a reward that
    differs between siblings."""
    return float(len(sample.response_text) % 2)


class ScriptedEngine:
    """An engine that answers every request at once."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.version = 0
        self.written = 0
        self.prefilled = 0

    async def start(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        assert request.seed is not None, "the driver gives every request a seed"
        if request.pictures is not None:
            await asyncio.to_thread(request.pictures.patches.get)
        seeds = range(request.seed, request.seed + request.n)
        found = [scripted_completion(seed, self.version, self.script) for seed in seeds]
        self.written += sum(len(completion.tokens) for completion in found)
        self.prefilled += len(request.prompt_tokens)
        return found

    async def abort(self, request_id: str) -> None: ...

    async def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.version, self.written, self.prefilled, {})

    async def load_weights(
        self, channel: Channel, version: int, *, receiver: int, verify: bool
    ) -> LoadReport:
        self.version = version
        return LoadReport(version, 0, 0, None)

    async def sleep(self, *, drop_weights: bool = False) -> None: ...

    async def wake(self, *, weights_only: bool = False) -> None: ...

    async def close(self) -> None: ...


class ScriptedStrategy:
    """A strategy whose scores are zeros, and whose update reads its rows once."""

    def __init__(self, spec: WorkerSpec, script: Script) -> None:
        rank, tp = spec.rank, script.tp
        self.rank_info = RankInfo(rank, rank // tp, spec.world_size // tp, rank % tp == 0)

    def score(
        self, batch: TokenBatch, *, entropy: bool = False, squares: bool = False
    ) -> PolicyTerms:
        _read_patches(batch)
        return PolicyTerms(torch.zeros(batch.tokens.shape))

    def score_base(self, batch: TokenBatch) -> PolicyTerms:
        return self.score(batch)

    def train(self, batch: B, loss: TermsLoss[PolicyTerms, B]) -> Metrics:
        _read_patches(batch)
        trained = int(batch.loss_mask.sum())
        return Metrics({"loss/total": Mean(0.0), "perf/trained_tokens": Sum(trained)})

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def close(self) -> None: ...

    def begin_save(self, path: Path, *, copied: bool, optimizer: bool) -> Saving:
        return Saving(lambda: None, lambda: None)

    def save(self, path: Path, *, optimizer: bool = True) -> None: ...

    def load(self, path: Path) -> None: ...

    def save_hf(self, path: Path, *, merged: bool = False) -> None: ...

    def output_head(self) -> OutputHead:
        self._has_no_weights()

    def weight_manifest(self, *, adapter: bool = False) -> Manifest:
        return Manifest(())

    def frozen_weights(self) -> frozenset[str]:
        return frozenset()

    def export_parts(self, *, adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def _has_no_weights(self) -> NoReturn:
        raise NotImplementedError("a scripted model has no weights")


def _read_patches(batch: TokenBatch) -> None:
    """Fetch the patches of the rows, each once, as a model does."""
    for pictures in {id(own): own for own in batch.pictures or () if own is not None}.values():
        assert len(pictures.patches.get()) == pictures.num_patches()


class ScriptedInfer(InferWorker):
    """A replica with a scripted engine."""

    def __init__(
        self, spec: WorkerSpec, script: Script, role: object, model: ModelConfig, *_: Any
    ) -> None:
        Worker.__init__(self, spec)
        self.engine = ScriptedEngine(script)
        self.lora = None
        self.model = model


class ScriptedActor(ActorWorker):
    """A rank of the policy with a scripted strategy, which pushes no weights."""

    def __init__(
        self,
        spec: WorkerSpec,
        script: Script,
        role: object,
        model: ModelConfig,
        algorithm: AlgorithmConfig,
        *_: Any,
    ) -> None:
        meter = WorkMeter(model, trains=True)
        TrainWorker.__init__(self, spec, ScriptedStrategy(spec, script), meter)
        self.loss = build_loss(algorithm)

    @dispatch(BROADCAST)
    def push_weights(self, channel: Channel, everything: bool, verify: bool) -> SendReport:
        return SendReport(0, 0, None)


class ScriptedReference(ReferenceWorker):
    """A rank of the reference with a scripted strategy."""

    def __init__(
        self, spec: WorkerSpec, script: Script, role: object, model: ModelConfig, *_: Any
    ) -> None:
        meter = WorkMeter(model, trains=False)
        ScoreWorker.__init__(self, spec, ScriptedStrategy(spec, script), meter)


STAND_INS: Mapping[Any, Callable[..., Worker]] = {
    InferWorker: ScriptedInfer,
    ActorWorker: ScriptedActor,
    ReferenceWorker: ScriptedReference,
}


@dataclass(frozen=True)
class ScriptedLauncher:
    """A launcher that starts scripted workers in place of those with a model."""

    launcher: Launcher
    script: Script

    def start(
        self,
        worker_cls: Callable[Concatenate[WorkerSpec, P], W],
        placement: Placement,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Cluster[W]:
        """See `Launcher.start`."""
        stand_in: Any = STAND_INS.get(worker_cls)
        if stand_in is None:
            return self.launcher.start(worker_cls, placement, *args, **kwargs)
        cluster: Cluster[W] = self.launcher.start(stand_in, placement, self.script, *args, **kwargs)
        return cluster


def make_tokenizer(folder: Path, *, sees: bool = False) -> None:
    """Write a byte-level tokenizer with VOCABULARY tokens; those of completions are texts of two to
    eight letters, about as long as in trained tokenizers. If the model `sees`, write the config and
    the image processor of a Qwen2-VL, too."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    seen = {*words, "<end>"}
    words.append("<end>")
    while len(words) < VOCABULARY:
        word = "".join(rng.choice(letters, rng.integers(2, 9)))
        if word not in seen:
            seen.add(word)
            words.append(word)
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<end>"
    )
    if sees:
        tokenizer.add_special_tokens({"additional_special_tokens": [PLACEHOLDER]})
        tokenizer.chat_template = SEEING_TEMPLATE
        placeholder = tokenizer.convert_tokens_to_ids(PLACEHOLDER)
        AutoConfig.for_model("qwen2_vl", image_token_id=placeholder).save_pretrained(folder)
        Qwen2VLImageProcessorPil(size=SIZES).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_prompts(path: Path, count: int, tokens: int, *, picture: int = 0) -> None:
    """Write `count` different prompts of `tokens` tokens each, and before them a picture of noise
    with this number of pixels of a side, if it is above 0."""
    rows: list[dict[str, Any]] = [
        {"prompt": f"{i:08d}".ljust(tokens, "."), "answer": str(i)} for i in range(count)
    ]
    for i, row in enumerate(rows if picture else ()):
        row["images"] = f"{i}.jpg"
        pixels = np.random.default_rng(i).integers(0, 256, (picture, picture, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path.parent / row["images"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_config(
    folder: Path,
    *,
    samples: int,
    siblings: int,
    prompt_tokens: int,
    longest: int,
    replicas: int,
    ranks: int,
    steps: int,
    picture: int = 0,
) -> dict[str, Any]:
    """Write the files of a run to `folder` and return the run file: GRPO with a reference, old
    log-probs and one update a step. Policy and reference have `ranks` workers each. Each prompt has
    a picture of `picture` x `picture` pixels, if that is above 0."""
    make_tokenizer(folder / "model", sees=picture > 0)
    make_prompts(folder / "prompts.jsonl", samples // siblings, prompt_tokens, picture=picture)
    columns = {"columns": {"images": "images"}} if picture else {}
    return {
        "pipeline": "rlvr",
        "output_dir": str(folder / "out"),
        "max_steps": steps,
        "model": {"path": str(folder / "model")},
        "pools": {"train": f"0-{ranks - 1}", "infer": f"{ranks}-{ranks + replicas - 1}"},
        "cluster": {"devices_per_node": ranks + replicas},  # more than there are cores
        "actor_train": {"pool": "train"},
        "actor_infer": {"pool": "infer", "strategy": {"kind": "hf", "max_num_seqs": 256}},
        "reference": {"pool": "train"},
        "data": {
            "sources": ({"path": str(folder / "prompts.jsonl"), **columns},),
            "prompts_per_step": samples // siblings,
            "samples_per_prompt": siblings,
            "max_prompt_tokens": prompt_tokens + (picture // 28 + 1) ** 2,
            "chat_template": picture > 0,
        },
        "sampling": {"max_new_tokens": longest},
        "rewards": {"odd": {"fn": "benchmarks.scripted_run:odd_length"}},
        "algorithm": {
            "loss": ({"kind": "ppo_clip"}, {"kind": "kl", "coef": 0.001}),
            "old_logprobs": "recompute",
        },
        "checkpoint": {"export_hf": False},
        "track": {"tensorboard": False, "rollouts_every": None, "verify_weights": "never"},
    }
