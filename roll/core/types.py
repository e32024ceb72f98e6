"""Data types that several layers use: ranks, prompts, requests, heartbeats, samples.

The types are plain, can be pickled, and do not need torch, so that small processes can use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.config.sections.roles import Role
from roll.core.completion import Completion, FinishReason
from roll.core.pickling import pickle_by_fields
from roll.core.pictures import Pictures


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Position of one worker in its cluster. `dp` stands for data-parallel."""

    rank: int
    dp_rank: int
    dp_size: int
    is_dp_leader: bool
    """True for one rank of each set of ranks that share a `dp_rank`. Of that set, only the result
    of this rank is used."""
    has_head: bool = True
    """False on pipeline stages before the last one, which make no logits."""


def worker_name(role: Role, label: str = "") -> str:
    """Return the name of a role's workers without a rank: `actor_train`, `reward:math`."""
    return f"{role.value}:{label}" if label else role.value


def part_name(role: Role, label: str, rank: int, part: int) -> str:
    """Return the name of a worker, or of a following part of one (`part` above 0)."""
    name = f"{worker_name(role, label)}[{rank}]"
    return f"{name}.{part}" if part else name


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """The part on one node of a worker that lies on several nodes, such as an engine whose
    processes are more than a node has devices. Each part is a process of its own."""

    node: int
    host: str
    """Host name or IP address at which other nodes reach this one."""
    devices: tuple[int, ...]
    """Numbers of the part's devices on its node."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything that a worker needs to know about its place in the run. Workers do not read this
    from environment variables."""

    role: Role
    rank: int
    world_size: int
    devices: tuple[int, ...]
    """Numbers of the worker's devices on its node: GPUs, or slots of CPU cores without GPUs."""
    cores: tuple[int, ...]
    """Numbers of the CPU cores on its node that the worker may use."""
    node: int
    rendezvous: str
    """Address `host:port` of rank 0, at which the ranks form their process group. Of a worker that
    lies on several nodes: of its first part, at which its parts meet."""
    seed: int
    platform: str
    """`cpu` or `cuda`."""
    host: str = "127.0.0.1"
    """Host name or IP address at which other nodes reach this worker's node."""
    label: str = ""
    """Label that distinguishes clusters of the same role; see `Placement.label`."""
    parts: tuple[WorkerPart, ...] = ()
    """All parts of a worker that lies on several nodes; empty for any other. `devices`, `cores`,
    `node` and `host` are those of the part that this process is."""
    part: int = 0
    """Number of this part. Part 0 leads: the driver calls it, and the others follow."""

    @property
    def name(self) -> str:
        """Name of the worker with its rank: `actor_train[0]`, `reward:math[1]`. A following part
        has its number, too: `actor_infer[0].1`."""
        return part_name(self.role, self.label, self.rank, self.part)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in a message of the assistant."""

    name: str
    arguments: Mapping[str, Any] | str
    """An object, or its JSON text."""
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation: the role of the speaker, and the text."""

    role: str
    content: str
    """Text of the message, without its pictures."""
    name: str = ""
    """Of a message with the role `tool`: name of the tool."""
    call_id: str = ""
    """Of a message with the role `tool`: id of the call that it answers."""
    calls: tuple[ToolCall, ...] = ()
    """Of a message of the assistant: calls of tools behind the text."""
    parts: tuple[Any, ...] = ()
    """Of a message with pictures: its texts and its pictures (`roll.data.pictures.picture`), in
    order."""


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, tokenized for the engine.

    Example: Prompt(id="gsm8k:17", tokens=(5, 9, 3), text="Sort 3 1 2:", answer="1 2 3", tag="x")
    """

    id: str
    """`<source>:<row>`; the same in every run."""
    tokens: Sequence[int]
    """Token ids that the policy reads."""
    text: str
    """Text of `tokens`: the rendered chat template. It has one placeholder for each picture, where
    the tokens have one for each merged patch."""
    answer: str
    """Ground truth, from the column `answer` of the row; empty without one."""
    tag: str
    """Tag that decides which rewards score the samples of this prompt."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the data row, for reward functions."""
    pictures: Pictures | None = None
    """Pictures in the prompt; None without any."""

    @property
    def source(self) -> str:
        """Name of the data source of this prompt."""
        return self.id.rpartition(":")[0]


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters with which an engine samples; the names are those of the config."""

    temperature: float
    """Sampling temperature; 0 is greedy."""
    max_new_tokens: int
    """Number of tokens after which a continuation is cut off."""
    top_p: float = 1.0
    """Probability mass of the tokens to sample from."""
    top_k: int = -1
    """Number of likeliest tokens to sample from; -1 means all."""
    min_p: float = 0.0
    """Share of the likeliest token's probability that a token needs to be sampled from."""
    repetition_penalty: float = 1.0
    """Divisor of positive logits of tokens that prompt or continuation have; factor of others."""
    presence_penalty: float = 0.0
    """Number subtracted from the logits of tokens that the continuation has."""
    frequency_penalty: float = 0.0
    """Number subtracted from the logit of a token for each time that the continuation has it."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Numbers added to the logits of tokens, by their ids."""
    stop: tuple[str, ...] = ()
    """Strings that end a continuation."""
    stop_in_text: bool = True
    """Leave the stop string that ended a response in its text."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids of tokens that end a continuation, beside the end-of-sequence token."""
    ignore_eos: bool = False
    """Ignore the end-of-sequence token."""
    json_schema: str | None = None
    """JSON schema, as JSON text, whose grammar all tokens follow; for judges. None: no grammar."""

    def text_of(self, written: Completion, decode: Callable[[Sequence[int]], str]) -> str:
        """Return the text of a whole response as rewards read it: all of it, or if `stop_in_text`
        is false what comes before the stop string that its last token completed."""
        text = decode(written.tokens)
        if self.stop_in_text or written.finish is not FinishReason.STOP:
            return text
        before = decode(written.tokens[:-1])
        ends = [text.index(stop) for stop in self.stop if stop in text and stop not in before]
        return text[: min(ends, default=len(text))]


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request to one replica for `n` continuations of one prompt.

    The i-th continuation is sampled with the seed `seed + i`, so a request can be repeated exactly.
    """

    id: str
    prompt_tokens: Sequence[int]
    sampling: SamplingParams
    n: int = 1
    seed: int | None = None
    pictures: Pictures | None = None
    """Pictures in the prompt; None without any."""


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one continuation, and the position of the first of them.

    Example: Piece(start=7, written=Completion(...)), whose completion has two tokens, holds the
    tokens at positions 7 and 8.
    """

    start: int
    """Number of tokens of the continuation before this piece. If a heartbeat is lost, this number
    shows that a piece is missing."""
    written: Completion
    """Tokens of this piece. `finish` is ABORT as long as the continuation is not finished."""


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Answer of an engine to the question whether it is alive, with its progress.

    Example: Heartbeat(version=3, written_tokens=5120, prefilled_tokens=900,
        progress={"3/a:1": (Piece(...),)})
    """

    version: int
    """Version of the weights in use."""
    written_tokens: int
    """Number of tokens generated since the engine started, over all requests."""
    prefilled_tokens: int
    """Number of tokens processed by prefill since the engine started: tokens of prompts, and tokens
    that were computed again because their KV cache was dropped. Tokens found in a prefix cache do
    not count."""
    progress: Mapping[str, tuple[Piece, ...]]
    """Id of each running request -> one piece per sibling, with the tokens generated since the last
    heartbeat."""


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the policy in an episode.

    Example: Turn(begin=3, end=5, reward=0.5, state="0,1") has the fourth and the fifth token.
    """

    begin: int
    """Place of its first token: of a sample among the tokens after the prompt of its row, in a
    `RolloutBatch` among all tokens of the row."""
    end: int
    """Place after its last token."""
    reward: float = 0.0
    """Reward that the environment gave for it."""
    state: str = ""
    """Name of the state of the environment in which it began; empty if that has none."""
    row: int = 0
    """Row of the sample that holds it: 0 is the sample itself, i its branch with the number i -
    1."""


@pickle_by_fields
@dataclass(frozen=True, slots=True, init=False)
class Sample:
    """A finished response to a prompt, as reward functions get it.

    Example: Sample(id="3/gsm8k:17/0", group="3/gsm8k:17", prompt=..., completion=...,
        response_text="1 2 3")
    """

    id: str
    """`<group>/<sibling>`; unique in a run."""
    group: str
    """Id of the group; the siblings of one prompt in one step have the same."""
    prompt: Prompt
    """Prompt that was answered, with its row."""
    completion: Completion
    """Tokens of the response."""

    def __init__(
        self,
        id: str,
        group: str,
        prompt: Prompt,
        completion: Completion,
        response_text: str | None = None,
    ) -> None:
        """Make a sample; `response_text` is needed if the completion has no text yet."""
        if response_text is not None:
            completion = completion.with_text(response_text)
        for name, value in zip(self.__slots__, (id, group, prompt, completion), strict=True):
            object.__setattr__(self, name, value)

    @property
    def response_text(self) -> str:
        """Decoded completion without special tokens, except those that mark the begin and end of
        thoughts (such as `<think>`), and without its stop string if `stop_in_text` is false.
        ValueError if it was not decoded."""
        text = self.completion.text
        if text is None:
            raise ValueError(f"the completion of sample {self.id} was not decoded")
        return text

    @property
    def answer(self) -> str:
        """Ground truth of the prompt."""
        return self.prompt.answer

    @property
    def tag(self) -> str:
        """Tag of the prompt, which decides which rewards score the sample."""
        return self.prompt.tag

    @property
    def extra(self) -> Mapping[str, Any]:
        """Further columns of the prompt's row."""
        return self.prompt.extra

    @property
    def num_response_tokens(self) -> int:
        """Number of tokens after the prompt, those of an environment included."""
        return len(self.completion)

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the policy wrote."""
        return self.completion.versions.sampled

    @property
    def truncated(self) -> bool:
        """True if the response ended at the length limit."""
        return self.completion.finish is FinishReason.LENGTH
