"""`VllmEngine`: one replica of vLLM's asynchronous engine, owned by this process.

vLLM runs its scheduler and its model in other processes. On CPUs a model that needs one process
runs in the scheduler's process (see executor.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import Awaitable
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import psutil

from roll.config.sections.engines import VllmConfig
from roll.core.completion import Completion, FinishReason
from roll.core.errors import EngineDiedError, EngineError, WeightSyncError
from roll.core.types import GenerateRequest, Heartbeat
from roll.distributed.processes.child_forks import servers_in_use
from roll.models.load import load_config
from roll.models.overrides import replaced_values
from roll.strategy.available import check_engine
from roll.strategy.backend_setup import EngineSetup
from roll.strategy.hf_folder import Checkpoint, read_checkpoint
from roll.strategy.interfaces import LoadReport
from roll.strategy.serving.pictures import PictureReader
from roll.strategy.serving.processes import CAUSE_S, DeathWatch, new_children
from roll.strategy.serving.progress import Progress
from roll.strategy.serving.sleep import SleepState
from roll.strategy.vllm.arguments import engine_arguments
from roll.strategy.vllm.compat import (
    engine_environment,
    forget_aborted_groups,
    forked_core,
    keep_deaths_quiet,
    shut_down,
)
from roll.strategy.vllm.config_keys import missing_keys
from roll.strategy.vllm.cpu_limits import cache_bytes_per_token, check_compiler, check_model
from roll.strategy.vllm.endpoint import Endpoint
from roll.strategy.vllm.outputs.plain_logprobs import receive_plain_logprobs
from roll.strategy.vllm.pictures import engine_prompt
from roll.strategy.vllm.pushes import Pushes
from roll.strategy.vllm.supported_arguments import check_arguments
from roll.strategy.vllm.translate import (
    NOTHING_YET,
    finished,
    sampling_params,
    unfinished,
)
from roll.strategy.vllm.worker_side.adapter import lora_request
from roll.weight_sync.channel import Channel

R = TypeVar("R")
_SHUTDOWN_S = 5.0
_ANSWER_S = 2.0
"""Time limit of the core's answer between two steps, when requests are aborted, in seconds."""
_FIRST_DEATH_S = 3.0
"""Time that the driver has to tell callers of an engine on several nodes what died first, before
they are told what died here, in seconds."""


def prepared_arguments(config: VllmConfig, setup: EngineSetup) -> dict[str, Any]:
    """Set the environment variables that vLLM reads in this process and in those that it starts;
    return the keyword arguments of `AsyncEngineArgs`."""
    spec = setup.spec
    cpu = spec.platform == "cpu"
    if cpu:
        # The variable counts in whole GiB and would override the size given below.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    here = config.processes // max(1, len(spec.parts))
    host = spec.host if spec.parts else "127.0.0.1"
    eager = config.eager_on(spec.platform)
    os.environ.update(
        engine_environment(spec.platform, spec.cores, here, os.environ, host, eager=eager)
    )
    hf_config = load_config(setup.model)
    width = 4 if setup.dtype == "float32" else 2
    return engine_arguments(
        config,
        setup.model,
        dtype=setup.dtype,
        max_model_len=config.max_model_len or setup.max_model_len,
        spec=spec,
        cpu_token_bytes=cache_bytes_per_token(hf_config.to_dict(), width) if cpu else None,
        overrides=missing_keys(hf_config) | replaced_values(hf_config, setup.model.overrides),
    )


class VllmEngine:
    """Replica of vLLM's asynchronous engine; implements `InferenceStrategy`."""

    def __init__(self, config: VllmConfig, setup: EngineSetup) -> None:
        self._config = config
        self._setup = setup
        self._spec = setup.spec
        self._model = setup.model
        self._dtype = setup.dtype
        self._engine: Any = None
        self._checkpoint: Checkpoint | None = None
        self._processes: dict[psutil.Process, str] = {}
        """Processes that vLLM started -> their names, kept because a dead process has none."""
        self._name = f"vLLM of {setup.spec.name}"
        self._watch = DeathWatch(
            self._name, lambda: self._engine is not None and bool(self._engine.errored)
        )
        self._progress = Progress()
        self._prefilled_tokens = 0
        self._aborted: set[str] = set()
        self._pictures = PictureReader(setup.model)
        self._endpoint = None
        if config.endpoint is not None:
            self._endpoint = Endpoint(config.endpoint, replica=setup.spec.rank)
        self._sleep = SleepState(setup.spec.platform)
        outsiders = self._endpoint is not None
        self._pushes = Pushes(self._name, self._progress, self._sleep, outsiders=outsiders)

    async def start(self) -> None:
        """Load the model; return when the engine can serve.

        Raises:
            EngineMissingError: vLLM is missing or its version is not supported; the message says
                what to install.
            ConfigError: `engine_args` names an argument that vLLM does not know, the model needs
                other settings without a GPU, or this machine has nothing to compile layers with.
            EngineError: vLLM could not start.
        """
        check_engine("vllm")
        check_arguments(self._config.engine_args)
        if self._config.pp > 1 and self._spec.platform == "cpu":
            # The second stage needs buffers that only a warm-up makes, and vLLM skips it on CPUs.
            raise EngineError(
                f"{self._name}: vLLM runs no pipeline stages without a GPU; set "
                "actor_infer.strategy.pp to 1 and use tp"
            )
        if self._spec.platform == "cpu":
            check_model(self._config, load_config(self._model).to_dict(), self._dtype)
            check_compiler(self._config)
        self._checkpoint = read_checkpoint(self._model)
        before = set(psutil.Process().children(recursive=True))
        try:
            await asyncio.to_thread(self._build)
            self._processes = new_children(before) | {
                # vLLM learns from this process that its core has ended: without it, the core counts
                # as dead.
                psutil.Process(pid): f"process {pid} (which forks the processes of vLLM)"
                for pid in servers_in_use()
            }
            self._watch.begin(self._processes)
            here = self._config.processes // max(1, len(self._spec.parts))
            await self._ask(self._engine.collective_rpc("roll_die_with", args=(os.getpid(), here)))
            await self._ask(self._engine.collective_rpc("roll_count_prefill"))
            await self._ask(self._engine.collective_rpc("roll_send_plain_logprobs"))
            if self._spec.platform == "cpu":
                await self._ask(self._engine.collective_rpc("roll_use_norm_kernels"))
                await self._ask(self._engine.collective_rpc("roll_draw_seeds_in_blocks"))
            await self._ask(self._engine.update_weight_version(str(self._pushes.version)))
            if rank := self._config.max_lora_rank:
                await self._ask(self._engine.collective_rpc("roll_restore_adapter", args=(rank,)))
            if self._endpoint is not None:
                await self._endpoint.start(self._engine, self._model.path)
        except Exception as error:
            self._processes = new_children(before)
            await self.close()
            raise EngineError(f"{self._name} could not start: {error}") from error
        self._pushes.open()

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Return `request.n` completions in sibling order; after `abort` they finish with ABORT.

        Raises:
            EngineDiedError: one of the engine's processes died, or vLLM takes itself for dead.
            EngineError: the engine refused the request.
            IncompleteWeightsError: a push of weights broke off, earlier or while the request ran.
        """
        completions: list[Completion] = []
        self._progress.begin(request.id, request.n)
        try:
            request = await self._pictures.fetch(request)
            await self._ask(self._pushes.enter())
            if request.id in self._aborted:
                return [NOTHING_YET] * request.n
            completions = await self._ask(self._generate(request))
            if request.id not in self._aborted and _is_cut_short(completions):
                self._pushes.require_whole_weights()
            return completions
        finally:
            self._progress.end(request.id, completions)
            if request.id in self._aborted:
                self._aborted.remove(request.id)
                if self._engine is not None:
                    forget_aborted_groups(self._engine.output_processor)

    async def abort(self, request_id: str) -> None:
        """End a running request; ignore an unknown id."""
        if request_id in self._progress:
            self._aborted.add(request_id)
            if not self._pushes.under_way:  # then they have come already
                await self._fetch_waiting()
            await self._ask(self._engine.abort(request_id))

    async def heartbeat(self) -> Heartbeat:
        """Make a round trip to vLLM's workers; report the tokens written since the last heartbeat.

        Workers answer between two steps of the model. During a push of weights they are not asked:
        a push has its own time limits.
        """
        if not self._pushes.under_way:
            counts = await self._ask(self._engine.collective_rpc("roll_prefilled_tokens"))
            self._prefilled_tokens = max(counts)
        return self._progress.heartbeat(
            self._pushes.version,
            self._prefilled_tokens,
            partial(unfinished, self._engine.output_processor),
        )

    async def load_weights(
        self, channel: Channel, version: int, *, receiver: int, verify: bool
    ) -> LoadReport:
        """Replace all weights by those that arrive on `channel`; later tokens carry `version`.

        Running requests pause and then continue with the new weights; their KV cache is recomputed.

        Raises:
            WeightSyncError: the push does not fit, and the old weights stay in use; or the push
                broke off. After that running requests end with an IncompleteWeightsError, and the
                engine generates nothing until a push has succeeded.
        """
        assert self._checkpoint is not None
        shapes = {name: list(shape) for name, shape in self._checkpoint.shapes.items()}
        arguments = (asdict(channel), receiver, shapes, sorted(self._checkpoint.optional))
        return await self._ask(
            self._pushes.replace(
                self._engine, "roll_load_weights", arguments, version, part="weights", verify=verify
            )
        )

    async def load_adapter(
        self, channel: Channel, version: int, *, receiver: int, alpha: float, verify: bool
    ) -> LoadReport:
        """Replace the LoRA adapter that all requests use; later tokens carry `version`.

        Running requests pause and then continue with the new adapter; their KV cache is recomputed.

        Args:
            alpha: scale; the adapter adds alpha / rank * B A to each weight.

        Raises:
            WeightSyncError: the push does not fit or broke off, and the old adapter stays in use;
                or a rank failed after it had received the whole adapter. After that running
                requests end with an IncompleteWeightsError, and the engine generates nothing until
                a push of an adapter has succeeded.
        """
        rank = self._config.max_lora_rank
        if not rank:
            raise WeightSyncError(
                "this engine takes no adapters; set actor_infer.strategy.max_lora_rank"
            )
        arguments = (asdict(channel), receiver, rank, alpha)
        return await self._ask(
            self._pushes.replace(
                self._engine, "roll_load_adapter", arguments, version, part="adapter", verify=verify
            )
        )

    async def sleep(self, *, drop_weights: bool = False) -> None:
        """Free device memory between rollouts; on CPUs do nothing. Only with `drop_weights` does
        `sleep_level` 2 drop the weights."""
        level = self._config.sleep_level if drop_weights else 1
        # Requests from outside wait until the engine wakes up, as in a push.
        mode = "abort" if self._endpoint is None else "keep"
        slept = await self._sleep.sleep(
            lambda tags: self._ask(self._engine.sleep(level=level, mode=mode))
        )
        if slept and level > 1:
            self._pushes.breaks("weights", "sleep_level 2 has dropped them")

    async def wake(self, *, weights_only: bool = False) -> None:
        """Take the memory back; with `weights_only` without the KV cache, which is most of it."""
        await self._sleep.wake(
            lambda tags: self._ask(self._engine.wake_up(tags=tags)), weights_only=weights_only
        )

    async def close(self) -> None:
        """Stop the engine and its processes; calls that still wait get an EngineDiedError."""
        if self._endpoint is not None:
            await self._endpoint.close()
        self._watch.end()
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(shut_down, engine, _SHUTDOWN_S)
            # The engine is part of a reference cycle. If it is collected only when the interpreter
            # ends and its modules are gone, its destructor prints an error.
            del engine
            gc.collect()
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._processes:
            await asyncio.to_thread(psutil.wait_procs, list(self._processes), _SHUTDOWN_S)
        self._processes = {}

    def _build(self) -> None:
        """Make the engine and store it in `_engine`; this blocks for seconds.

        The engine is not returned: vLLM keeps an exception whose traceback keeps the future of this
        call alive, and with it any result.
        """
        arguments = prepared_arguments(self._config, self._setup)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        keep_deaths_quiet()
        receive_plain_logprobs()
        with forked_core():
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def _generate(self, request: GenerateRequest) -> list[Completion]:
        """Run a request in vLLM to its end; return its completions in the order of siblings."""
        pictures = self._pictures.divide(request.pictures)
        prompt = engine_prompt(self._engine.model_config, request.prompt_tokens, pictures)
        params = sampling_params(request)
        last: Any = None
        adapter = lora_request() if self._config.max_lora_rank else None
        async for output in self._engine.generate(prompt, params, request.id, lora_request=adapter):
            last = output
        if last is None:
            raise EngineError(f"{self._name} gave no output for {request.id!r}")
        outputs = sorted(last.outputs, key=lambda output: int(output.index))
        return [finished(output) for output in outputs]

    async def _fetch_waiting(self) -> None:
        """Have the core send the tokens that wait there for those of later steps, as it does before
        any answer (see outputs/gathered.py). They are not worth the wait for a long step."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ask(self._engine.get_weight_version()), _ANSWER_S)

    async def _ask(self, work: Awaitable[R]) -> R:
        """Wait for an answer of the engine.

        Raises:
            EngineDiedError: a process of the engine died, or vLLM takes itself for dead.
            EngineError: vLLM refused the call or failed in it.
        """
        from vllm.exceptions import VLLMServerError, VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await self._watch.until_dead(work)
        except EngineDiedError:
            await self._let_others_tell()
            raise
        except EngineDeadError as error:
            died = await self._watch.cause(timeout_s=CAUSE_S)
            await self._let_others_tell()
            raise died from error
        except (VLLMServerError, VLLMValidationError, ValueError) as error:
            raise EngineError(f"{self._name}: {error}") from error

    async def _let_others_tell(self) -> None:
        """Wait, in an engine on several nodes, before a death here is told: processes end when
        those of another node do, and the driver tells callers what died first."""
        if self._spec.parts:
            await asyncio.sleep(_FIRST_DEATH_S)


def _is_cut_short(completions: list[Completion]) -> bool:
    return any(completion.finish is FinishReason.ABORT for completion in completions)
