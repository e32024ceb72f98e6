"""Episodes over a real engine whose words a test chooses, and their log-probs recomputed."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from roll.config.sections.engines import HfEngineConfig, VllmConfig
from roll.config.sections.environment import EnvironmentConfig
from roll.config.sections.model import ModelConfig
from roll.core.batches import RolloutBatch
from roll.core.completion import NOBODY, Completion, FinishReason
from roll.core.types import GenerateRequest, Heartbeat, Message, Prompt, SamplingParams
from roll.data.chat.turns import Turns
from roll.envs.agents.host import AgentHost
from roll.envs.host import EnvHost
from roll.rewards.thinking import decode_with_marks, marks_to_show
from roll.rollout.assemble import assemble
from roll.rollout.dense import dense
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.replica import Replica
from roll.rollout.rows import with_rows_of_branches
from roll.rollout.types import Group, GroupTask, ScoredSample
from roll.strategy.backend_setup import EngineSetup
from roll.strategy.hf.decoding import Decoding
from roll.strategy.hf.engine import HfEngine
from roll.strategy.hf.grammar import Matcher
from roll.strategy.hf.passes import Weights
from roll.strategy.vllm.engine import VllmEngine
from tests.contract.engine_rig import SPEC, Rig, shake, weights_of
from tests.contract.forked_cores import fork_next_core
from tests.episodes import OneHost, Writer, episodes
from tests.unit.data.test_chat_templates import byte_tokenizer
from tests.unit.episodes.test_contexts import Told, check_rows, encoded

WITHIN = 1e-5
"""Largest difference of log-probs, in float32."""
VOCABULARY = 512
"""More than any tokenizer of the tests has: bytes, and the marks of a template."""
LENGTH = 16_384
FREE = -1
"""Token that the policy chooses itself."""


@dataclass(frozen=True)
class Turn:
    """A turn of the policy, and what happens then."""

    pieces: tuple[str | int, ...] = (12,)
    """Texts that it writes, and numbers of tokens that it chooses itself."""
    ends: bool = True
    """Whether it writes the mark of the end, or is cut."""
    push: bool = False
    """Whether new weights arrive before it."""
    push_behind: int | None = None
    """Number of its tokens behind which new weights arrive; None for no such push."""
    said: str = "a wall"
    """Answer of a scripted environment."""
    role: str = "user"
    new_context: bool = False

    def tokens(self, turns: Turns, end: int) -> list[int]:
        """Tokens of the turn, with `FREE` for those that the policy chooses."""
        tokens = []
        for piece in self.pieces:
            if isinstance(piece, int):
                tokens += [FREE] * piece
            else:
                tokens += encoded(turns, piece)
        return tokens + [end] * self.ends


@dataclass
class Script:
    """Environment that says what the turns say."""

    turns: Sequence[Turn]
    number: int = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return "begin", {}

    def step(self, action: str) -> Any:
        turn = self.turns[self.number]
        self.number += 1
        over = self.number == len(self.turns)
        said = Message(turn.role, turn.said)
        return said, 0.5, over, False, {"new_context": turn.new_context}

    def close(self) -> None: ...


class ToldDecoding(Decoding):
    """A request whose tokens are chosen elsewhere; their log-probs are those of the model."""

    told: Sequence[int] = ()
    push_behind: int | None = None

    @property
    def place(self) -> int:
        return len(self.siblings[0].tokens)

    def _choose(self, logprobs_NV: Tensor) -> Tensor:
        tokens_N = super()._choose(logprobs_NV)
        if self.place < len(self.told) and self.told[self.place] != FREE:
            tokens_N = torch.full_like(tokens_N, self.told[self.place])
        return tokens_N


class ToldEngine(HfEngine):
    """The `hf` engine, which a test tells what to write in each request."""

    told: tuple[Sequence[int], int | None] = (), None
    """Tokens of the next request, and the number of them behind which it waits for new weights."""
    ends: frozenset[int] = frozenset()

    def __init__(self, config: HfEngineConfig, setup: EngineSetup) -> None:
        super().__init__(config, setup)
        self.waits = threading.Event()
        """Set while a request waits for new weights."""
        self.before: Weights | None = None
        """Those that it has."""

    def _begun(self, request: GenerateRequest, limit: int, matchers: list[Matcher]) -> Decoding:
        told, push_behind = self.told
        limit = min(limit, len(told))
        decoding = ToldDecoding(request, self._tokenizer, limit=limit, eos=self.ends)
        decoding.told, decoding.push_behind = told, push_behind
        return decoding

    def _step(self, decoding: Decoding) -> None:
        assert isinstance(decoding, ToldDecoding)
        if decoding.place == decoding.push_behind:
            if not self.waits.is_set():
                self.before = self._weights
                self.waits.set()
            if self._weights is self.before and not decoding.over.done():
                time.sleep(0.001)
                self._thread.submit(self._step, decoding)
                return
            self.waits.clear()
            decoding.push_behind = None
        super()._step(decoding)


def save_byte_model(folder: Path) -> Path:
    """A tiny random model with room for the tokens of every template."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.2,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    byte_tokenizer("qwen3").save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class PlayedRows:
    """What a trainer gets of an episode, and the version of the weights that wrote each token."""

    batch: RolloutBatch
    versions_BT: Tensor

    @classmethod
    def of(cls, one: ScoredSample) -> PlayedRows:
        batch = dense(with_rows_of_branches(assemble([Group(TASK.prompt, (one,), 0)]), 1))
        versions_BT = torch.full(batch.tokens.shape, NOBODY)
        for row, made in enumerate(one.rows):
            start, versions = len(made.prompt.tokens), torch.tensor(list(made.completion.versions))
            versions_BT[row, start : start + len(versions)] = versions
        return cls(batch, versions_BT)

    def check(self, logprobs: Callable[[int, RolloutBatch], Tensor]) -> None:
        """What the engine reported of each token is what `logprobs` gives for its version."""
        assert self.batch.rollout_logprobs is not None
        assert self.batch.loss_mask.any()
        for version in self.versions:
            written_BT = self.versions_BT == version
            found, expected = self.batch.rollout_logprobs, logprobs(version, self.batch)
            assert (found.double() - expected.double())[written_BT].abs().max() < WITHIN

    @property
    def versions(self) -> list[int]:
        """Versions that wrote something."""
        return sorted(set(self.versions_BT.flatten().tolist()) - {NOBODY})


@dataclass
class EpisodeRig:
    """An engine, and the two models whose weights it has in turns."""

    rig: Rig
    models: tuple[PreTrainedModel, PreTrainedModel]
    folders: tuple[Path, Path]
    """Of these models."""
    sampling: SamplingParams
    played: list[PlayedRows] = field(default_factory=list)
    """What trainers got of all episodes so far."""
    asked: list[GenerateRequest] = field(default_factory=list)
    written: list[Completion] = field(default_factory=list)
    script: Sequence[Turn] = ()
    turns: Turns | None = None
    end: int = FREE

    def model(self, version: int) -> PreTrainedModel:
        return self.models[version % 2]

    def push(self) -> None:
        self.rig.push(weights_of(self.model(self.rig.version + 1)))

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Let the engine write a turn; new weights arrive when the turn says so. Turns behind the
        script are short, too: nothing of a random model would end them."""
        assert self.turns is not None
        number = int(request.id.rpartition(".")[2])
        turn = self.script[number] if number < len(self.script) else Turn()
        if isinstance(self.rig.engine, ToldEngine):
            self.rig.engine.told = turn.tokens(self.turns, self.end), turn.push_behind
        if turn.push:
            await asyncio.to_thread(self.push)
        writing = self.rig.submit(self.rig.engine.generate(request))
        if turn.push_behind is not None:
            await asyncio.to_thread(self._push_within, writing)
        (one,) = await asyncio.wrap_future(writing)
        marks = marks_to_show(special_tokens(self.turns))
        text = decode_with_marks(one.tokens.tolist(), marks, self._plain)
        self.asked.append(request)
        self.written.append(one)
        return [one.with_text(text)]

    def _plain(self, tokens: Sequence[int]) -> str:
        assert self.turns is not None
        return str(self.turns.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _push_within(self, writing: Future[list[Completion]]) -> None:
        """Push new weights when the request under way waits for them; of an engine that is not
        told what to write, at once."""
        engine, ends_s = self.rig.engine, time.monotonic() + 60
        if isinstance(engine, ToldEngine):
            while not engine.waits.wait(0.002) and not writing.done():
                assert time.monotonic() < ends_s
        self.push()

    async def abort(self, request_id: str) -> None:
        self.rig.run(self.rig.engine.abort(request_id))

    async def heartbeat(self) -> Heartbeat:
        return await asyncio.wrap_future(self.rig.submit(self.rig.engine.heartbeat()))

    def play(
        self,
        turns: Turns,
        end: int,
        host: Callable[[], EnvHost | AgentHost],
        script: Sequence[Turn],
        task: GroupTask | None = None,
        **options: Any,
    ) -> list[ScoredSample]:
        """The samples of an episode in which the policy writes these turns, checked.

        Args:
            host: function that makes the host of the environment, on the loop of the episode.
        """
        self.turns, self.script, self.end = turns, script, end
        self.asked, self.written = [], []
        if isinstance(self.rig.engine, ToldEngine):
            self.rig.engine.ends = frozenset({end})

        async def run() -> Group:
            made = host()
            try:
                return await episodes(
                    Writer(lambda request: ([], FinishReason.STOP)),
                    OneHost(made),
                    **{
                        "fleet": Fleet([Replica(0, self, 64)]),
                        "sampling": self.sampling,
                        "max_tokens": LENGTH - 64,
                        **options,
                    },
                ).run(task or TASK)
            finally:
                await made.shut()

        samples = list(asyncio.run(run()).samples)
        self.check(samples, end)
        return samples

    def check(self, samples: list[ScoredSample], end: int) -> None:
        """Masks cover what the policy wrote, and nothing else; log-probs and versions are those
        that the engine reported; log-probs are those of a forward pass with these weights."""
        assert self.turns is not None
        assert all(one.has_reward for one in samples)
        told = Told(self.turns, end)
        told.contexts = [tuple(request.prompt_tokens) for request in self.asked]
        told.written = [one.tokens.tolist() for one in self.written]
        check_rows(samples, told)
        for one in samples:
            rows = PlayedRows.of(one)
            self.played.append(rows)
            assert torch.equal(rows.batch.loss_mask, rows.versions_BT != NOBODY)
            rows.check(self._logprobs)
        reported = sorted(
            (tuple(one.tokens), tuple(one.logprobs), tuple(one.versions)) for one in self.written
        )
        kept = sorted(
            (
                tuple(row.tokens[turn.begin : turn.end]),
                tuple(row.logprobs[turn.begin : turn.end]),
                tuple(row.versions)[turn.begin : turn.end],
            )
            for one in samples
            for turn in one.turns
            for row in [one.rows[turn.row].completion]
        )
        assert kept == reported

    @torch.no_grad()
    def _logprobs(self, version: int, batch: RolloutBatch) -> Tensor:
        """Log-probs `[B, T]` behind the tokens before, row by row; 0 for the first one."""
        logprobs_BT = torch.zeros(batch.tokens.shape, dtype=torch.float64)
        for row, length in enumerate(batch.lengths.tolist()):
            tokens_T = batch.tokens[row, :length]
            logits = self.model(version)(tokens_T[None]).logits[0, :-1].double()
            found = logits.log_softmax(-1).gather(1, tokens_T[1:, None])
            logprobs_BT[row, 1:length] = found[:, 0]
        return logprobs_BT

    @property
    def versions(self) -> list[set[int]]:
        """Versions of the weights that wrote each turn."""
        return [set(one.versions) for one in self.written]


TASK = GroupTask(Prompt("p:0", (), "What is 17 + 4?", "21", "p"), step=0)


def special_tokens(turns: Turns) -> dict[str, int]:
    """Token id of each special token."""
    tokenizer: Any = turns.tokenizer
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    return dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


def config_of(**settings: Any) -> EnvironmentConfig:
    return EnvironmentConfig.model_validate(
        {"tags": ("p",), "cut_turn": "go_on", "max_turns": 99, "env": "x", **settings}
    )


@contextmanager
def episode_rig(kind: str, folder: Path, loop: asyncio.AbstractEventLoop) -> Iterator[EpisodeRig]:
    """A started engine of this kind, with the first of two models."""
    folders = folder / "first", folder / "second"
    path = save_byte_model(folders[0])
    spec_of_model = ModelConfig(path=str(path))
    length = LENGTH if kind == "hf" else 2048
    setup = EngineSetup(spec=SPEC, model=spec_of_model, dtype="float32", max_model_len=length)
    engine: Any
    if kind == "hf":
        engine = ToldEngine(HfEngineConfig(), setup)
    else:
        engine = VllmEngine(VllmConfig(endpoint=None), setup)
        fork_next_core()
    first = Qwen3ForCausalLM.from_pretrained(path)
    second = copy.deepcopy(first)
    shake(second, seed=1)
    second.save_pretrained(folders[1])
    rig = Rig(kind, engine, 0, loop, first)
    rig.run(engine.start())
    sampling = SamplingParams(temperature=1.0, max_new_tokens=1000 if kind == "hf" else 24)
    yield EpisodeRig(rig, (first, second), folders, sampling)
    rig.run(engine.close())
