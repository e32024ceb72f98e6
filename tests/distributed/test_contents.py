"""Tokens that stay on the node of the engine that wrote them."""

from __future__ import annotations

import asyncio
import os
import signal

from roll.config.sections.roles import Role
from roll.core.completion import Completion, Written
from roll.core.types import Prompt, Sample
from roll.distributed.cluster import Placement
from roll.distributed.on_ray.bundle_host import INLINE_BYTES
from roll.distributed.on_ray.resources import ResourceManager
from roll.distributed.remote_contents import are_here, contents_here, fetch_samples, node_of
from tests.distributed.small_workers import Echo

WRITES = Placement(Role.ACTOR_INFER, pool="one", replaceable=True)
READS = Placement(Role.REWARD, pool="other", workers=1)
PROMPT = Prompt("p", (1, 2), "text", "answer", "tag")
LONG = INLINE_BYTES // 16
"""Number of tokens of half a request whose tokens stay."""


def samples(completions: list[Completion]) -> list[Sample]:
    return [Sample(f"s/{i}", "s", PROMPT, one) for i, one in enumerate(completions)]


def test_long_completions_stay_where_they_are_even_if_their_writer_dies(
    manager: ResourceManager,
) -> None:
    writer = manager.start(Echo, WRITES)
    reader = manager.start(Echo, READS)

    def write(*lengths: int) -> list[Completion]:
        return asyncio.run(writer.ask(0, Echo.write, lengths))

    few, many = write(3, 5), write(LONG, 1, -7, LONG)
    assert all(isinstance(one.content, Written) for one in few)
    assert [one.content.tokens.tolist() for one in few if isinstance(one.content, Written)] == [
        [0, 1, 2],
        [0, 1, 2, 3, 4],
    ]
    (alone,) = write(100)
    assert not isinstance(alone.content, Written)
    assert contents_here([alone.content])[0].tokens.tolist() == list(range(100))
    assert [isinstance(one.content, Written) for one in many] == [False, False, True, False]
    assert [len(one) for one in many] == [LONG, 1, 7, LONG]
    assert len({node_of(one.content) for one in many}) == 2
    assert not are_here(samples(many))

    os.kill(writer.call(Echo.pid), signal.SIGKILL)
    told = [
        (LONG, LONG - 1, f"{LONG} tokens"),
        (1, 0, "1 tokens"),
        (7, 6, "-7 tokens"),
        (LONG, LONG - 1, f"{LONG} tokens"),
    ]
    assert asyncio.run(reader.ask(0, Echo.read, samples(many))) == told
    here = fetch_samples(samples(many))
    assert are_here(here)
    assert [(len(s.completion), s.completion.tokens[-1], s.response_text) for s in here] == told
    assert many[0].tokens == here[0].completion.tokens
