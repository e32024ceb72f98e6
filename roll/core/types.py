"""Nouns that several layers speak of: ranks, prompts, requests, completions, samples.

Plain data, picklable, and free of torch, so that light processes can hold them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from roll.config.sections.roles import Role


class FinishReason(StrEnum):
    """Why an engine stopped writing."""

    STOP = "stop"
    """An end-of-sequence token or a stop string."""
    LENGTH = "length"
    """The token limit; the sample is truncated."""
    ABORT = "abort"
    """The request was cancelled; the tokens so far are kept."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where one worker stands in its cluster."""

    rank: int
    dp_rank: int
    dp_size: int
    is_dp_leader: bool
    """True for the one rank of each data-parallel group whose result counts."""


def worker_name(role: Role, label: str = "") -> str:
    """What a role's workers are called, without their rank: `actor_train`, `reward:math`."""
    return f"{role.value}:{label}" if label else role.value


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All that a worker is told about its place; nothing is read from the environment."""

    role: Role
    rank: int
    world_size: int
    devices: tuple[int, ...]
    """Devices on this worker's node: GPU numbers, or slots of cores where there are no GPUs."""
    cores: tuple[int, ...]
    """CPU cores this worker may use, on its node."""
    node: int
    rendezvous: str
    """`host:port` of rank 0, for the process group."""
    seed: int
    platform: str
    """`cpu` or `cuda`."""
    host: str = "127.0.0.1"
    """Name or number under which other nodes reach this one."""
    label: str = ""
    """Tells clusters of one role apart."""

    @property
    def name(self) -> str:
        return f"{worker_name(self.role, self.label)}[{self.rank}]"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, ready for the engine.

    Example: Prompt(id="gsm8k:17", tokens=(5, 9, 3), text="Sort 3 1 2:", answer="1 2 3", tag="x")
    """

    id: str
    """`<source>:<row>`, stable across runs."""
    tokens: tuple[int, ...]
    text: str
    """What the tokens say: the rendered chat template."""
    answer: str
    tag: str
    """Routes the sample to its rewards."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the row, for reward functions."""

    @property
    def source(self) -> str:
        """Name of the data source it is from."""
        return self.id.rpartition(":")[0]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an engine samples; the same names as in the config."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """`n` continuations of one prompt, wanted from one replica.

    The i-th continuation is seeded with `seed + i`, so a request can be repeated exactly.
    """

    id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One continuation, token by token."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log, of the distribution that was sampled from; one per token."""
    versions: tuple[int, ...]
    """Version of the weights that produced each token."""
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of one continuation, and where it begins.

    Example: Piece(start=7, written=Completion(tokens=(5, 9), ...)) holds tokens 7 and 8.
    """

    start: int
    """Tokens of the continuation before it. A heartbeat can be lost on its way; whoever puts pieces
    together sees by this number that one is missing."""
    written: Completion
    """Finish ABORT while the continuation goes on."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a living engine says of itself.

    Example: Heartbeat(version=3, written_tokens=5120, prefilled_tokens=900,
        progress={"3/a:1": (Piece(...),)})
    """

    version: int
    """Of the weights in use."""
    written_tokens: int
    """Since the engine started, over all requests."""
    prefilled_tokens: int
    """Tokens of prompts that the model has read since the engine started, and of what was read
    again because its KV cache was dropped; what a prefix cache held is left out."""
    progress: Mapping[str, tuple[Piece, ...]]
    """Running request -> of each sibling the tokens written since the last heartbeat."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished attempt at a prompt; what a reward function sees.

    Example: Sample(id="3/gsm8k:17/0", group="3/gsm8k:17", prompt=..., completion=...,
        response_text="1 2 3")
    """

    id: str
    """`<group>/<sibling>`, unique in a run."""
    group: str
    """Shared by the siblings of one prompt in one step."""
    prompt: Prompt
    completion: Completion
    response_text: str
    """The completion decoded, special tokens left out but for the marks of thoughts."""

    @property
    def answer(self) -> str:
        """The ground truth of the prompt."""
        return self.prompt.answer

    @property
    def tag(self) -> str:
        return self.prompt.tag

    @property
    def extra(self) -> Mapping[str, Any]:
        """Further columns of the prompt's row."""
        return self.prompt.extra

    @property
    def num_response_tokens(self) -> int:
        return len(self.completion.tokens)

    @property
    def truncated(self) -> bool:
        return self.completion.finish is FinishReason.LENGTH
