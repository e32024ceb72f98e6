"""`Replica`: the methods of SGLang's engine that the worker calls, in SGLang's process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from roll.core.completion import Completion, FinishReason
from roll.core.errors import EngineError, IncompleteWeightsError, WeightSyncError
from roll.core.types import GenerateRequest, Heartbeat
from roll.strategy.interfaces import LoadReport
from roll.strategy.serving.progress import Progress
from roll.strategy.sglang.extension import PREFILLED, Push, run_scheduler
from roll.strategy.sglang.messages import StartMessage
from roll.strategy.sglang.pushes import push_weights
from roll.strategy.sglang.requests import Sibling, generate_input, sibling_id
from roll.strategy.sglang.stops import tokens_to_keep
from roll.weight_sync.channel import Channel


def build(arguments: Mapping[str, Any]) -> Any:
    """Build SGLang's engine, with this framework's code in its schedulers and no detokenizer;
    what it leaves in /dev/shm is removed at its end."""
    from sglang.srt.entrypoints.engine import Engine

    class TokenEngine(Engine):  # type: ignore[misc]
        """Engine with tokens as input and output, which needs no process that decodes text."""

        run_scheduler_process_func = staticmethod(run_scheduler)

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **options: Any) -> tuple[list[Any], list[str]]:
            return [], []

    engine = TokenEngine(**arguments)
    # SGLang leaves this file in /dev/shm. Python's resource tracker removes it when all of these
    # processes have ended, also if they are killed, as the worker always ends them.
    file = Path(engine.tokenizer_manager.load_snapshot_reader.path)
    resource_tracker.register(f"/{file.name}", "shared_memory")
    return engine


class Replica:
    """SGLang's engine, in the process of SGLang (`server.py`).

    All methods run on SGLang's event loop. `InferenceStrategy` documents them.

    Args:
        engine: result of `build`.
    """

    def __init__(self, engine: Any, order: StartMessage) -> None:
        self._manager = engine.tokenizer_manager
        self._order = order
        self._tp: int = order.arguments["tp_size"]
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            order.tokenizer, trust_remote_code=order.trust_remote_code
        )
        self._siblings: dict[str, list[Sibling]] = {}
        """Id of a request under way -> its siblings."""
        self._aborted: set[str] = set()
        self._progress = Progress()
        self._prefilled_tokens = 0
        self._version = 0
        self._broken: str | None = None
        """Why the weights cannot be used; None if they can."""
        self._open = asyncio.Event()
        """Cleared while weights are replaced, so that no request starts on a mixture of weights."""
        self._open.set()

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Generate all siblings; wait first while a push is under way. If one fails, abort all."""
        with self._under_way(request) as siblings:
            try:
                await asyncio.gather(*(self._write(request, i) for i in range(request.n)))
            except BaseException:
                self._abort(request.id)
                raise
            if request.id not in self._aborted and any(
                sibling.finish is FinishReason.ABORT for sibling in siblings
            ):
                self._require_whole_weights()
            return [sibling.after(0) for sibling in siblings]

    async def abort(self, request_id: str) -> None:
        if request_id in self._siblings:
            self._aborted.add(request_id)
            self._abort(request_id)

    async def heartbeat(self) -> Heartbeat:
        """Return what was written since the last heartbeat.

        During a push of weights the schedulers are not asked: a push has its own time limits.
        """
        if self._open.is_set():
            states = await self._manager.get_internal_state()
            self._prefilled_tokens = max(state[PREFILLED] for state in states)
        return self._progress.heartbeat(self._version, self._prefilled_tokens, self._read)

    async def load_weights(
        self, channel: Channel, version: int, *, receiver: int, verify: bool
    ) -> LoadReport:
        """Pause requests, load a push, resume; abort them if weights are left incomplete."""
        from sglang.srt.managers.io_struct import (
            ContinueGenerationReqInput,
            PauseGenerationReqInput,
        )

        self._open.clear()
        try:
            # "retract": running requests drop their KV cache and are prefilled again afterwards.
            await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))
            try:
                return await self._load(channel, version, receiver=receiver, verify=verify)
            except WeightSyncError:
                raise  # `_load` has recorded whether the weights are complete
            except Exception as error:
                # SGLang itself failed, so it is unknown which weights its ranks have loaded.
                self._broken = f"{type(error).__name__}: {error}"
                raise WeightSyncError(f"SGLang of {self._order.name}: {self._broken}") from error
            finally:
                if self._broken is not None:
                    for request_id in self._siblings:
                        self._abort(request_id)
                resume = ContinueGenerationReqInput(torch_empty_cache=not self._order.cpu)
                await self._manager.continue_generation(resume)
        finally:
            self._open.set()

    async def sleep(self, tags: list[str]) -> None:
        """Release the memory of `tags`; the host keeps a copy of the weights.

        Args:
            tags: names from `serving.sleep.ALL_TAGS` of memory that is not released: SGLang's
                allocator ends the process otherwise.

        Raises:
            EngineError: requests are under way; SGLang would end itself.
        """
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        if self._siblings:
            raise EngineError(
                f"SGLang of {self._order.name} cannot sleep while it writes "
                f"{sorted(self._siblings)[:3]}; finish or abort them first"
            )
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags))

    async def wake(self, tags: list[str]) -> None:
        """Allocate the memory of `tags` again; they are names from `serving.sleep.ALL_TAGS`."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))

    @contextmanager
    def _under_way(self, request: GenerateRequest) -> Iterator[list[Sibling]]:
        """Register a request as under way for the duration of the block; yield its siblings."""
        self._progress.begin(request.id, request.n)
        siblings = self._siblings[request.id] = [Sibling() for _ in range(request.n)]
        try:
            yield siblings
        finally:
            del self._siblings[request.id]
            self._aborted.discard(request.id)
            self._progress.end(request.id, [sibling.after(0) for sibling in siblings])

    async def _write(self, request: GenerateRequest, index: int) -> None:
        """Generate sibling `index`, unless the request is aborted before it can start: add its
        tokens as they arrive, and end it at a stop string.

        Raises:
            IncompleteWeightsError: the weights are incomplete when it could start.
        """
        # Looked at here, at the last moment: SGLang lets a request wait for the end of a push,
        # however that ends, and cannot abort it meanwhile.
        await self._open.wait()
        self._require_whole_weights()
        if request.id in self._aborted:
            return
        from sglang.srt.managers.io_struct import GenerateReqInput

        sibling = self._siblings[request.id][index]
        stops = request.sampling.stop
        sglang_request = GenerateReqInput(
            **generate_input(
                request,
                index,
                max_model_len=self._order.max_model_len,
                vocab_size=self._manager.model_config.vocab_size,
                eos=self._tokenizer.eos_token_id,
            )
        )
        async for output in self._manager.generate_request(sglang_request):
            if stops and sibling.finish is FinishReason.STOP:
                continue  # a stop string was found, and SGLang is ending the request
            seen = len(sibling.tokens)
            sibling.extend(output, request.sampling)
            if stops and len(sibling.tokens) > seen:
                keep = tokens_to_keep(self._tokenizer, sibling.tokens, seen, stops)
                if keep is not None:
                    sibling.stop_at(keep)
                    self._manager.abort_request(rid=sibling_id(request.id, index))

    def _abort(self, request_id: str) -> None:
        """Tell SGLang to end all siblings of a request that is under way, without waiting for that.

        In SGLang each sibling is a request of its own.
        """
        for index in range(len(self._siblings[request_id])):
            self._manager.abort_request(rid=sibling_id(request_id, index))

    def _read(self, request_id: str, starts: Sequence[int]) -> list[Completion]:
        """Return what each sibling of a request has written after its first `starts[i]` tokens."""
        siblings = self._siblings[request_id]
        return [sibling.after(start) for sibling, start in zip(siblings, starts, strict=True)]

    def _require_whole_weights(self) -> None:
        """Raise IncompleteWeightsError if a push broke off and none has succeeded since."""
        if self._broken is not None:
            raise IncompleteWeightsError(
                f"SGLang of {self._order.name} has incomplete weights; push all of them again "
                f"({self._broken})"
            )

    async def _load(
        self, channel: Channel, version: int, *, receiver: int, verify: bool
    ) -> LoadReport:
        """Let all schedulers receive a push; set `_broken` if it leaves the weights incomplete.

        Raises:
            WeightSyncError: the push was refused or broke off.
        """
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        order = self._order
        push = Push(asdict(channel), receiver, order.shapes, sorted(order.optional))
        answers = await push_weights(self._manager, push, self._tp)
        errors = [answer.error for answer in answers if answer.error is not None]
        if errors:
            if not all(answer.intact for answer in answers):
                self._broken = errors[0]
            raise WeightSyncError(f"SGLang of {order.name}: {errors[0]}")
        await self._manager.update_weight_version(
            UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        )
        flushed = await self._manager.flush_cache()
        if not flushed.success:
            self._broken = "the KV cache of old weights could not be dropped"
            raise WeightSyncError(f"SGLang of {order.name}: {self._broken}")
        self._broken, self._version = None, version
        first = answers[0]
        if verify and first.checksum is None:
            raise WeightSyncError("a checksum was asked for, but the sender made none")
        return LoadReport(
            version,
            first.num_tensors,
            first.num_bytes,
            first.checksum,
            max(answer.receive_s for answer in answers),
            max(answer.load_s for answer in answers),
        )
