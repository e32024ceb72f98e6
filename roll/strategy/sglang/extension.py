"""What runs inside SGLang's scheduler processes: loads pushed weights, and small hooks.

SGLang calls `load_pushed_weights` through its own plug-in point (`custom_weight_loader`). It hands
no result back, and an exception would end the scheduler: so each rank leaves its answer in a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from roll.core.errors import WeightSyncError
from roll.platform.rendezvous import serve_on_named_address
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
"""Key in a scheduler's internal state: tokens that prefill batches have computed so far."""
_prefilled_tokens = 0
"""Of this process's scheduler."""
_held: WeakKeyDictionary[Any, frozenset[str]] = WeakKeyDictionary()
"""Names of the tensors that earlier pushes brought into a model."""


@dataclass(frozen=True, slots=True)
class Push:
    """What a scheduler is told about a push; travels as JSON in place of a tensor's name."""

    channel: dict[str, Any]
    """`Channel` as a dict."""
    receiver: int
    """Index of the replica's rank 0 among the receivers."""
    shapes: Mapping[str, Sequence[int]]
    """Of every tensor of the checkpoint."""
    optional: list[str]
    """Names that may stay away."""

    def to_json(self, folder: str) -> str:
        """With the folder where rank i writes `i.json`, an `Answer`."""
        return json.dumps({"push": asdict(self), "folder": folder})


@dataclass(frozen=True, slots=True)
class Answer:
    """What one rank says about a push."""

    num_tensors: int = 0
    num_bytes: int = 0
    checksum: str | None = None
    receive_s: float = 0.0
    load_s: float = 0.0
    error: str | None = None
    intact: bool = True
    """The weights in use are the old ones or the new ones, not a mixture."""


def load_pushed_weights(model: Any, named: list[tuple[str, Tensor]]) -> None:
    """Replace all weights of `model` by a push; every rank calls it at the same time.

    Args:
        named: one pair, whose name is what `Push.to_json` gives.
    """
    from sglang.srt.runtime_context import get_parallel

    order = json.loads(named[0][0])
    rank: int = get_parallel().tp_rank
    answer = _load(model, Push(**order["push"]), rank)
    (Path(order["folder"]) / f"{rank}.json").write_text(json.dumps(asdict(answer)))


def _load(model: Any, push: Push, rank: int) -> Answer:
    def check(manifest: Manifest) -> None:
        shapes = {name: tuple(shape) for name, shape in push.shapes.items()}
        check_shapes(manifest, shapes, optional=frozenset(push.optional), held=held)

    held = _held.get(model, frozenset())
    intact = True
    try:
        with receive(Channel(**push.channel), push.receiver + rank, check=check) as incoming:
            intact = False
            model.load_weights(incoming.tensors())
            manifest = incoming.manifest
            answer = Answer(
                len(manifest.tensors),
                manifest.num_bytes,
                incoming.checksum,
                incoming.receive_s,
                incoming.load_s,
            )
        _held[model] = held | {meta.name for meta in manifest.tensors}
        return answer
    except WeightSyncError as error:
        if not intact:
            _held[model] = frozenset()
        return Answer(error=str(error), intact=intact)


def run_scheduler(*arguments: Any, **options: Any) -> None:
    """SGLang's scheduler process, with our hooks; the target of the process it starts."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_SPANS_TARGET, _add_spans, HookType.AFTER)
    HookRegistry.register(_SEEDS_TARGET, _add_seeds, HookType.AFTER)
    HookRegistry.register(_BATCH_TARGET, _count_prefilled, HookType.BEFORE)
    HookRegistry.register(_STATE_TARGET, _add_prefilled, HookType.AFTER)
    serve_on_named_address()  # all ranks of a replica are on one machine
    run_scheduler_process(*arguments, **options)


def _add_spans(result: None, accumulator: Any, *, req: Any) -> None:
    """Let every piece of output say which weights wrote which token; SGLang does so at the end.

    Without it, the tokens of a request that lives through a push could not be told apart before
    the request has finished.
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
    """Add up what prefill batches compute. SGLang's own counter adds the size of the last one again
    at each step that follows it."""
    global _prefilled_tokens
    if batch.forward_mode.is_extend_without_speculative():
        _prefilled_tokens += batch.extend_num_tokens


def _add_prefilled(answer: Any, controller: Any, request: Any) -> None:
    """Let a scheduler's state say how many tokens it has prefilled."""
    answer.internal_state[PREFILLED] = _prefilled_tokens


def _add_seeds(info: Any, cls: type, batch: Any, vocab_size: int) -> None:
    """Draw each request's tokens from its own seed; SGLang does so in its deterministic mode only.

    That mode also swaps matrix products for slower ones, and exists on GPUs alone.
    """
    import torch

    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    if info.sampling_seed is None and all(seed is not None for seed in seeds):
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(
            info.temperatures.device, non_blocking=True
        )
