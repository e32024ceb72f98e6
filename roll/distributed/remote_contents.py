"""Tokens of completions that stay in Ray's object store; the driver knows only their address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import ray

from roll.core.completion import Completion, Content, FinishReason, Written
from roll.core.pickling import Columns, pickle_by_fields
from roll.core.types import Sample
from roll.distributed.dispatch import BROADCAST, Apart
from roll.distributed.remote_values import RemoteValue, fetch

FETCH_TIMEOUT_S = 600.0
"""Time limit of one fetch, in seconds. The tokens are stored before their address is known, so the
limit covers only the transfer."""


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class _Place:
    """Index of the tokens of a completion in the list that stays in the object store."""

    number: int

    def get(self) -> NoReturn:
        raise RuntimeError("the tokens of this completion were divided from it and not joined")


def _divide(completions: list[Completion]) -> tuple[list[Completion], list[Written] | None]:
    """Return the finished completions without their tokens, and the list of these tokens (None if
    there are none). Unfinished completions keep theirs: another replica will continue them, from
    the tokens that the driver sends it."""
    divided: list[Completion] = []
    contents: list[Written] = []
    for one in completions:
        if one.finish is FinishReason.ABORT:
            divided.append(one)
        else:
            divided.append(replace(one, content=_Place(len(contents))))
            contents.append(one.content.get())
    return Columns(divided), contents or None


def _join(completions: list[Completion], address: Callable[[int], Content]) -> list[Completion]:
    """Return the completions with addresses in place of the tokens that were divided from them."""
    return [
        replace(one, content=address(one.content.number))
        if isinstance(one.content, _Place)
        else one
        for one in completions
    ]


CONTENTS_APART = replace(BROADCAST, apart=Apart(_divide, _join))
"""Rule for methods that return completions: the tokens stay in the object store of the worker's
node, from which Ray deletes them when no address of them is left."""


def contents_here(contents: Sequence[Content]) -> list[Written]:
    """Return the tokens of completions. Blocks while they are transferred.

    Raises:
        WaitTimeoutError: the tokens did not arrive in time.
        WorkerError: tokens are lost with their node.
    """
    far = [content for content in contents if isinstance(content, RemoteValue)]
    found = iter(fetch(far, timeout_s=FETCH_TIMEOUT_S, what="the tokens of completions"))
    return [
        next(found) if isinstance(content, RemoteValue) else content.get() for content in contents
    ]


def fetch_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with their tokens and texts here; see `contents_here`."""
    contents = contents_here([sample.completion.content for sample in samples])
    return [
        replace(sample, completion=replace(sample.completion, content=content))
        for sample, content in zip(samples, contents, strict=True)
    ]


def are_here(samples: Sequence[Sample]) -> bool:
    """Return whether no sample has its tokens elsewhere."""
    return not any(isinstance(sample.completion.content, RemoteValue) for sample in samples)


def node_of(content: Content) -> str | None:
    """Return Ray's id of the node with these tokens; None if they are in this process, or if the
    node is not known."""
    return (content.node or None) if isinstance(content, RemoteValue) else None


def living_nodes() -> list[str]:
    """Return Ray's ids of all nodes that live."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]
