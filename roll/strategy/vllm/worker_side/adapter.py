"""LoRA adapters inside vLLM's worker processes, received from a push and not from a file.

The engine has exactly one adapter. It exists from the start, without effect until the first push.
So every request names the same adapter, and no request must be changed when a push replaces it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from roll.core.errors import WeightSyncError, failure
from roll.strategy.serving.report import numbers_of
from roll.strategy.vllm.worker_side.names import renaming
from roll.weight_sync.channel import Channel
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.transfer import receive

ADAPTER_ID = 1
_PARTS = (".lora_A.weight", ".lora_B.weight")


def lora_request() -> Any:
    """Make vLLM's request for the engine's only adapter; its path is never read."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER_ID, "in-memory")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as it was pushed."""

    tensors: dict[str, Tensor]
    """Tensor's PEFT name -> tensor, on the CPU."""
    rank: int
    alpha: float


class AdapterLoader:
    """Part of `RollWorker` that loads adapters; the worker provides `rank` and `model_runner`."""

    rank: int
    model_runner: Any
    _roll_adapter: Adapter | None = None
    """The adapter of the newest push; None before the first push."""

    def roll_restore_adapter(self, max_rank: int) -> None:
        """Install the newest adapter again: vLLM drops it when it reloads the model.

        Before the first push, install vLLM's warm-up adapter, which is all zeros and changes
        nothing.
        """
        if self._roll_adapter is None:
            self.model_runner.lora_manager.add_dummy_lora(lora_request(), max_rank)
        else:
            self._roll_install(self._roll_adapter)

    def roll_load_adapter(
        self, channel: dict[str, Any], first_index: int, max_rank: int, alpha: float
    ) -> dict[str, Any]:
        """Replace the adapter by that of a push.

        Args:
            channel: `Channel` as a dict.
            first_index: receiver index of rank 0 of this replica.
            max_rank: largest adapter rank that the engine accepts.
            alpha: scale; the adapter adds alpha / rank * B A to each weight.

        Returns:
            The numbers of a `LoadReport`; or, after a failure, `error` (text) and `intact` (whether
            the old adapter is still in use).
        """
        rank = 0

        def check(manifest: Manifest) -> None:
            nonlocal rank
            rank = adapter_rank(manifest, max_rank)
            _check_modules(manifest, self.model_runner.lora_manager._adapter_manager)

        installed = False
        try:
            with receive(Channel(**channel), first_index + self.rank, check=check) as incoming:
                # Cloned, because the transfer may overwrite the memory with later tensors.
                tensors = {name: tensor.cpu().clone() for name, tensor in incoming.tensors()}
                self._roll_adapter = Adapter(tensors, rank, alpha)
                installed = True
                self._roll_install(self._roll_adapter)
            return numbers_of(incoming)
        except Exception as error:  # noqa: BLE001 - reported as a result
            return {"error": failure(error), "intact": not installed}

    def _roll_install(self, adapter: Adapter) -> None:
        """Install an adapter as vLLM's `add_lora` does, but from tensors instead of files."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager = self.model_runner.lora_manager._adapter_manager
        lora = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            # Cloned, because vLLM scales B in place.
            {name: tensor.clone() for name, tensor in adapter.tensors.items()},
            PEFTHelper(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=[]),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=renaming(manager.model),
        )
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(lora)
        manager.activate_adapter(ADAPTER_ID)


def adapter_rank(manifest: Manifest, max_rank: int) -> int:
    """Return the rank `r` of a pushed adapter.

    Its tensors must be pairs of `<module>.lora_A.weight` `[r, in]` and `<module>.lora_B.weight`
    `[out, r]`.

    Raises:
        WeightSyncError: a tensor has another name, a half of a pair is missing, ranks differ, or
            the rank is above `max_rank`.
    """
    shapes = {meta.name: meta.shape for meta in manifest.tensors}
    ranks: dict[int, str] = {}
    for name, shape in shapes.items():
        part = next((part for part in _PARTS if name.endswith(part)), None)
        if part is None or len(shape) != 2:
            raise WeightSyncError(
                f"{name!r} {list(shape)} is no part of a LoRA adapter; expected matrices named "
                "`<module>.lora_A.weight` and `<module>.lora_B.weight`"
            )
        other = name.removesuffix(part) + _PARTS[1 - _PARTS.index(part)]
        if other not in shapes:
            raise WeightSyncError(f"{name!r} came without {other!r}")
        ranks[shape[_PARTS.index(part)]] = name
    if len(ranks) != 1:
        found = ", ".join(f"{rank} ({name})" for rank, name in ranks.items()) or "no tensor"
        raise WeightSyncError(f"all parts of a LoRA adapter need one rank; found {found}")
    rank = next(iter(ranks))
    if rank > max_rank:
        raise WeightSyncError(
            f"the adapter has rank {rank}, the engine takes up to {max_rank}; raise "
            "actor_infer.strategy.max_lora_rank"
        )
    return rank


def _check_modules(manifest: Manifest, manager: Any) -> None:
    """Refuse tensors of modules that vLLM's model does not have: vLLM would silently skip them.

    Raises:
        WeightSyncError: a module is unknown.
    """
    from vllm.lora.utils import parse_fine_tuned_lora_name

    known = set(manager.modules)
    for packed, parts in manager.packed_modules.items():
        known |= {packed, *parts}
    mapper = renaming(manager.model)
    modules = {parse_fine_tuned_lora_name(meta.name, mapper)[0] for meta in manifest.tensors}
    if unknown := sorted(modules - known):
        raise WeightSyncError(
            f"the engine's model has no module {unknown[0]!r} that takes an adapter "
            f"({len(unknown)} of {len(modules)} are unknown); name others in model.lora.targets, "
            "or set model.lora.serve: merged"
        )
