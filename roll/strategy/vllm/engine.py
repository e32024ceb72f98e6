"""`VllmEngine`: one replica of vLLM's asynchronous engine, owned by this process.

vLLM runs its scheduler and its model in processes of their own. On CPUs that is also the fastest
arrangement: only there are the model's threads bound to cores before they start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import psutil  # type: ignore[import-untyped]

from roll.config.model import ModelConfig
from roll.config.strategy import VllmConfig
from roll.core.errors import EngineError, WeightSyncError
from roll.core.types import Completion, FinishReason, GenerateRequest, WorkerSpec
from roll.strategy.api import LoadReport
from roll.strategy.available import check_engine
from roll.strategy.checkpoint import Checkpoint, read_checkpoint
from roll.strategy.vllm.compat import cpu_arguments, engine_environment
from roll.strategy.vllm.processes import is_dead, new_children
from roll.weight_sync.channel import Channel

_SHUTDOWN_S = 5.0
_ALL_TAGS = frozenset({"weights", "kv_cache"})
"""What vLLM calls the two kinds of memory that sleep gives back."""


class VllmEngine:
    """Implements `InferenceStrategy`.

    Args:
        dtype: of weights and activations, `float32` or `bfloat16`.
        max_model_len: longest prompt plus response, in tokens; `config.max_model_len` goes first.
    """

    def __init__(
        self,
        config: VllmConfig,
        *,
        spec: WorkerSpec,
        model: ModelConfig,
        dtype: str,
        max_model_len: int,
    ) -> None:
        self._config = config
        self._spec = spec
        self._model = model
        self._dtype = dtype
        self._max_model_len = config.max_model_len or max_model_len
        self._engine: Any = None
        self._checkpoint: Checkpoint | None = None
        self._processes: dict[psutil.Process, str] = {}
        """What vLLM started, with its name: a process that is gone cannot be asked."""
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self._open = asyncio.Event()
        """Cleared while weights are replaced: requests wait, so none starts on a mixture."""
        self._broken: str | None = None
        self._asleep: frozenset[str] = frozenset()
        """Those of `_ALL_TAGS` whose memory is given back."""

    async def start(self) -> None:
        """Load the model; returns when the engine can serve.

        Raises:
            EngineMissingError: not installed or not in the supported range; says what to install.
            EngineError: vLLM could not start.
        """
        check_engine("vllm")
        self._checkpoint = read_checkpoint(self._model)
        before = set(psutil.Process().children(recursive=True))
        try:
            self._engine = await asyncio.to_thread(self._build)
            await self._engine.collective_rpc("roll_die_with", args=(os.getpid(),))
            await self._engine.update_weight_version("0")
        except Exception as error:
            self._processes = new_children(before)
            await self.close()
            raise EngineError(f"vLLM of {self._spec.name} could not start: {error}") from error
        self._processes = new_children(before)
        self._open.set()

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """`request.n` completions, in sibling order. After `abort` they end with ABORT.

        Raises:
            EngineError: the engine died, or refused the request.
        """
        self._running.add(request.id)
        try:
            await self._open.wait()
            if self._broken is not None:
                raise EngineError(
                    f"vLLM of {self._spec.name} has incomplete weights; push all of them again "
                    f"({self._broken})"
                )
            if request.id in self._aborted:
                return [Completion((), (), (), FinishReason.ABORT)] * request.n
            return await self._generate(request)
        finally:
            self._running.discard(request.id)
            self._aborted.discard(request.id)

    async def abort(self, request_id: str) -> None:
        """End a running request; unknown ids are fine."""
        if request_id not in self._running:
            return
        self._aborted.add(request_id)
        with self._deaths():
            await self._engine.abort(request_id)

    async def load_weights(self, channel: Channel, version: int, *, verify: bool) -> LoadReport:
        """Replace all weights by those that arrive on `channel`; later tokens carry `version`.

        Running requests pause, and go on with the new weights: their KV cache is computed anew.

        Raises:
            WeightSyncError: the push does not fit, and the old weights stay in use; or it broke
                off, and the engine generates no more until a push has succeeded.
        """
        self._open.clear()
        try:
            with self._deaths():
                return await self._load(channel, version, verify=verify)
        finally:
            self._open.set()

    async def sleep(self) -> None:
        """Free device memory between rollouts; a no-op on CPUs."""
        if self._spec.platform == "cuda" and self._asleep != _ALL_TAGS:
            await self._engine.sleep(level=1)
            self._asleep = _ALL_TAGS

    async def wake(self, *, weights_only: bool = False) -> None:
        """Take the memory back; `weights_only` leaves the KV cache, most of it, where it is."""
        tags = self._asleep & {"weights"} if weights_only else self._asleep
        if tags:
            await self._engine.wake_up(tags=sorted(tags))
            self._asleep -= tags

    async def close(self) -> None:
        """Stop the engine and every process it started."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.shutdown, _SHUTDOWN_S)
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._processes:
            await asyncio.to_thread(psutil.wait_procs, list(self._processes), _SHUTDOWN_S)
        self._processes = {}

    def _build(self) -> Any:
        """AsyncLLM; blocks for seconds."""
        cpu = self._spec.platform == "cpu"
        if cpu:
            # It counts in whole GiB and overrules the size given below.
            os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        os.environ.update(
            engine_environment(self._spec.platform, self._spec.cores, self._config.tp, os.environ)
        )
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments(cpu=cpu)))

    def _arguments(self, *, cpu: bool) -> dict[str, Any]:
        config = self._config
        arguments: dict[str, Any] = {
            "model": self._model.path,
            "tokenizer": self._model.tokenizer,
            "trust_remote_code": self._model.trust_remote_code,
            "dtype": self._dtype,
            "max_model_len": self._max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "tensor_parallel_size": config.tp,
            "enable_prefix_caching": config.prefix_caching,
            "enforce_eager": config.enforce_eager,
            "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
            "worker_extension_cls": "roll.strategy.vllm.extension.WeightLoader",
            "disable_log_stats": True,
            "seed": self._spec.seed,
        }
        if cpu:
            return arguments | cpu_arguments(config.kv_cache_gb, self._max_model_len)
        arguments["enable_sleep_mode"] = True
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        if config.kv_cache_gb is not None:
            arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gb * (1 << 30))
        return arguments

    async def _generate(self, request: GenerateRequest) -> list[Completion]:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        sampling = request.sampling
        params = SamplingParams(
            n=request.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            stop=list(sampling.stop),
            ignore_eos=sampling.ignore_eos,
            seed=request.seed,
            logprobs=0,  # the sampled token's only
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = tokens_input(list(request.prompt_tokens))
        last: Any = None
        with self._deaths():
            async for output in self._engine.generate(prompt, params, request.id):
                last = output
        if last is None:
            raise EngineError(f"vLLM of {self._spec.name} gave no output for {request.id!r}")
        outputs = sorted(last.outputs, key=lambda output: int(output.index))
        return [_completion(output) for output in outputs]

    async def _load(self, channel: Channel, version: int, *, verify: bool) -> LoadReport:
        assert self._checkpoint is not None
        pause = bool(self._running)
        if pause:
            await self._engine.pause_generation(mode="keep", clear_cache=False)
        try:
            answers = await self._engine.collective_rpc(
                "roll_load_weights",
                args=(
                    asdict(channel),
                    self._spec.rank * self._config.tp,
                    {name: list(shape) for name, shape in self._checkpoint.shapes.items()},
                    sorted(self._checkpoint.optional),
                ),
            )
            report = self._judge(answers, version)
            await self._engine.update_weight_version(str(version))
            await self._engine.reset_prefix_cache(reset_running_requests=pause)
        finally:
            if pause:
                await self._engine.resume_generation()
        if verify and report.checksum is None:
            raise WeightSyncError("a checksum was asked for, but the sender made none")
        return report

    def _judge(self, answers: list[dict[str, Any]], version: int) -> LoadReport:
        """One report out of the ranks' answers."""
        errors = [answer for answer in answers if "error" in answer]
        if errors:
            if not all(answer.get("intact", False) for answer in answers):
                self._broken = errors[0]["error"]
            raise WeightSyncError(f"vLLM of {self._spec.name}: {errors[0]['error']}")
        self._broken = None
        first = answers[0]
        return LoadReport(version, first["num_tensors"], first["num_bytes"], first["checksum"])

    @contextlib.contextmanager
    def _deaths(self) -> Iterator[None]:
        """Turns vLLM's errors into ours, naming the process that is gone."""
        from vllm.exceptions import VLLMServerError, VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            dead = ", ".join(name for process, name in self._processes.items() if is_dead(process))
            raise EngineError(
                f"vLLM of {self._spec.name} died: {dead or 'its core raised'}; its own log has "
                "the reason"
            ) from error
        except (VLLMServerError, VLLMValidationError, ValueError) as error:
            raise EngineError(f"vLLM of {self._spec.name}: {error}") from error


def _completion(output: Any) -> Completion:
    versions = [-1] * len(output.token_ids)
    for span in output.weight_versions or ():
        versions[span.start : span.end] = [int(span.version)] * (span.end - span.start)
    finish = FinishReason(output.finish_reason or "abort")
    return Completion(
        tokens=tuple(output.token_ids),
        logprobs=tuple(
            entry[token].logprob
            for token, entry in zip(output.token_ids, output.logprobs or (), strict=True)
        ),
        versions=tuple(versions),
        finish=finish,
    )
