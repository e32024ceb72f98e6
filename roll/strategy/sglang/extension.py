"""Code that runs inside SGLang's scheduler processes: a loader of pushed weights, and hooks.

SGLang calls `load_pushed_weights` as a plug-in (`custom_weight_loader`). It returns no results, and
an exception would end the scheduler. So each rank writes its answer to a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from roll.core.errors import failure
from roll.platform.rendezvous import serve_on_named_address
from roll.strategy.serving.report import numbers_of
from roll.weight_sync.channel import Channel
from roll.weight_sync.checks import check_shapes
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.transfer import receive

LOADER = "roll.strategy.sglang.extension.load_pushed_weights"
_SPANS_TARGET = (
    "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
)
_SEEDS_TARGET = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
_STATE_TARGET = (
    "sglang.srt.managers.scheduler_components.internal_state."
    "SchedulerInternalStateController.get_internal_state"
)
_BATCH_TARGET = "sglang.srt.managers.scheduler.Scheduler.run_batch"
PREFILLED = "roll_prefilled_tokens"
"""Key in a scheduler's internal state of the number of tokens prefilled so far."""
_prefilled_tokens = 0
"""Number of tokens that the scheduler in this process has prefilled."""
_held: WeakKeyDictionary[Any, frozenset[str]] = WeakKeyDictionary()
"""Model -> names of the tensors that it received in earlier pushes."""


@dataclass(frozen=True, slots=True)
class Push:
    """A push as it is described to a scheduler; sent as JSON in the place of a tensor's name."""

    channel: dict[str, Any]
    """`Channel` as a dict."""
    receiver: int
    """Receiver index of rank 0 of the replica."""
    shapes: Mapping[str, Sequence[int]]
    """Tensor's name -> shape, for every tensor of the checkpoint."""
    optional: list[str]
    """Names of tensors that the push may leave out."""

    def to_json(self, folder: str) -> str:
        """Encode the push and the folder into which rank i writes its `Answer`, as `i.json`."""
        return json.dumps({"push": asdict(self), "folder": folder})


@dataclass(frozen=True, slots=True)
class Answer:
    """A rank's report about a push, or its `error`."""

    num_tensors: int = 0
    num_bytes: int = 0
    checksum: str | None = None
    receive_s: float = 0.0
    load_s: float = 0.0
    error: str | None = None
    intact: bool = True
    """True if the weights in use are all old or all new, not a mixture."""


def load_pushed_weights(model: Any, named: list[tuple[str, Tensor]]) -> None:
    """Replace all weights of `model` by those of a push; all ranks call this at the same time.

    Args:
        named: one (name, tensor) pair, whose name is the JSON text of `Push.to_json`.
    """
    from sglang.srt.runtime_context import get_parallel

    order = json.loads(named[0][0])
    rank: int = get_parallel().tp_rank
    answer = _load(model, Push(**order["push"]), rank)
    (Path(order["folder"]) / f"{rank}.json").write_text(json.dumps(asdict(answer)))


def _load(model: Any, push: Push, rank: int) -> Answer:
    """Load a push into this rank's model; on failure say whether old weights are intact."""

    def check(manifest: Manifest) -> None:
        shapes = {name: tuple(shape) for name, shape in push.shapes.items()}
        check_shapes(manifest, shapes, optional=frozenset(push.optional), held=held)

    held = _held.get(model, frozenset())
    intact = True
    try:
        with receive(Channel(**push.channel), push.receiver + rank, check=check) as incoming:
            intact = False
            model.load_weights(incoming.tensors())
            answer = Answer(**numbers_of(incoming))
        _held[model] = held | {meta.name for meta in incoming.manifest.tensors}
        return answer
    except Exception as error:  # noqa: BLE001 - any other would end SGLang's scheduler
        if not intact:
            _held[model] = frozenset()
        return Answer(error=failure(error), intact=intact)


def run_scheduler(*arguments: Any, **options: Any) -> None:
    """Run SGLang's scheduler with the hooks of this module; target of its scheduler processes."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_SPANS_TARGET, _add_spans, HookType.AFTER)
    HookRegistry.register(_SEEDS_TARGET, _add_seeds, HookType.AFTER)
    HookRegistry.register(_BATCH_TARGET, _count_prefilled, HookType.BEFORE)
    HookRegistry.register(_STATE_TARGET, _add_prefilled, HookType.AFTER)
    serve_on_named_address()  # all ranks of a replica are on one machine
    run_scheduler_process(*arguments, **options)


def _add_spans(result: None, accumulator: Any, *, req: Any) -> None:
    """Add to every piece of output which version of the weights wrote which token.

    SGLang itself adds the versions only when a request ends. Until then, the tokens from before and
    after a push could not be told apart.
    """
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    spans = accumulator.weight_versions
    written = bool(accumulator.output_reqs) and accumulator.output_reqs[-1] is req
    if written and spans[-1] is None:
        spans[-1] = compute_weight_version_spans(
            req.weight_version_events,
            current_version=accumulator.current_weight_version,
            num_output_tokens=len(req.output_ids),
        )


def _count_prefilled(scheduler: Any, batch: Any, *rest: Any, **options: Any) -> None:
    """Add the size of a prefill batch to the number of prefilled tokens.

    SGLang's own counter adds the size of the last prefill batch again at each later step.
    """
    global _prefilled_tokens
    if batch.forward_mode.is_extend_without_speculative():
        _prefilled_tokens += batch.extend_num_tokens


def _add_prefilled(answer: Any, controller: Any, request: Any) -> None:
    """Add the number of prefilled tokens to a scheduler's internal state."""
    answer.internal_state[PREFILLED] = _prefilled_tokens


def _add_seeds(info: Any, cls: type, batch: Any, vocab_size: int) -> None:
    """Make SGLang sample each request's tokens with the request's own seed.

    SGLang itself does so only in its deterministic mode, which also uses slower matrix products and
    exists only on GPUs.
    """
    import torch

    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    if info.sampling_seed is None and all(seed is not None for seed in seeds):
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(
            info.temperatures.device, non_blocking=True
        )
