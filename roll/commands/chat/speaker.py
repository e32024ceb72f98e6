"""`Speaker`: one engine that answers one conversation, token by token."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from roll.config.evaluation import ServedConfig
from roll.config.sections.roles import Role
from roll.core.completion import Completion
from roll.core.errors import WaitTimeoutError
from roll.core.threads.loop_thread import LoopThread
from roll.core.types import GenerateRequest, SamplingParams
from roll.distributed.cluster import Cluster, Launcher, Placement
from roll.workers.infer import InferWorker

LOOK_EVERY_S = 0.05
"""Time between two questions to the engine for new tokens, in seconds."""
SLICE_S = 0.2
"""Longest wait without looking for Ctrl-C, in seconds."""
STOP_S = 30.0
"""Time in which an engine must end a request that is stopped, in seconds."""

OnTokens = Callable[[Sequence[int], Sequence[float]], None]
"""Function that gets new tokens and their log-probs."""


@dataclass
class Speaker:
    """An engine that answers one request after another."""

    infer: Cluster[InferWorker]
    loop: LoopThread
    timeout_s: float
    """Time without a new token after which an answer fails, in seconds."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def answer(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        seed: int,
        on_tokens: OnTokens,
    ) -> Completion:
        """Return the answer to a prompt; Ctrl-C ends it, and returns what is written until then.

        Args:
            prompt: tokens of the whole conversation.
            seed: seed of the answer.
            on_tokens: gets the tokens while they are written, in the order of the answer.

        Raises:
            EngineError: the engine refused the request.
            WaitTimeoutError: it wrote nothing for `timeout_s`.
        """
        request = GenerateRequest(f"chat/{next(self._numbers)}", prompt, sampling, seed=seed)
        stop = threading.Event()
        future = self.loop.submit(self._ask(request, on_tokens, stop))
        while True:
            try:
                return future.result(SLICE_S)
            except TimeoutError:
                if future.done():  # it may have ended behind the wait
                    return future.result()
            except KeyboardInterrupt:
                stop.set()

    async def _ask(
        self, request: GenerateRequest, on_tokens: OnTokens, stop: threading.Event
    ) -> Completion:
        """Generate, and look meanwhile for new tokens, and for the wish to stop."""
        now = asyncio.get_running_loop().time
        answer = asyncio.ensure_future(self.infer.ask(0, InferWorker.generate, request))
        told, last_s, aborted = 0, now(), False
        try:
            while not answer.done():
                if stop.is_set() and not aborted:
                    aborted = True
                    await self.infer.ask(0, InferWorker.abort, request.id)
                    last_s = now()
                beat = await self.infer.ask(0, InferWorker.heartbeat)
                for piece in beat.progress.get(request.id, ()):
                    if piece.start == told and len(piece.written):
                        on_tokens(piece.written.tokens, piece.written.logprobs)
                        told, last_s = told + len(piece.written), now()
                limit_s = STOP_S if aborted else self.timeout_s
                if now() - last_s > limit_s:
                    raise WaitTimeoutError(f"the engine wrote nothing for {limit_s:g} s")
                await asyncio.wait([answer], timeout=LOOK_EVERY_S)
            [completion] = await answer
        finally:
            answer.cancel()
        rest = completion.part(told)
        if len(rest):
            on_tokens(rest.tokens, rest.logprobs)
        return completion


@contextmanager
def speaking(
    config: ServedConfig, launcher: Launcher, loop: LoopThread, max_tokens: int
) -> Iterator[Speaker]:
    """Start one engine inside the block.

    Args:
        launcher: starts the engine.
        loop: event loop of the questions to it.
        max_tokens: largest number of tokens of a conversation.
    """
    role = config.actor_infer
    place = Placement(
        Role.ACTOR_INFER,
        pool=role.pool,
        per_worker=role.devices_per_worker,
        seed=config.seed,
        env=role.env,
    )
    infer = launcher.start(InferWorker, place, role, config.model, max_tokens)
    try:
        infer.submit(InferWorker.start).result(config.cluster.start_timeout_s)
        yield Speaker(infer, loop, config.request_timeout_s)
    finally:
        infer.close()
