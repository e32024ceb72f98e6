"""What every rank of a backend is put through with inputs of layers in host memory, beside the same
with inputs that stay on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.config.sections.model import LoraConfig, ModelConfig
from roll.config.sections.optimizers.kinds import AdamWConfig
from roll.core.batches import RolloutBatch
from roll.core.types import WorkerSpec
from roll.models.vision.parts import language_model
from roll.strategy.training.group import GroupMembership
from tests.contract.backends import TRAIN_BACKENDS
from tests.contract.train_job import EntropyBonusLoss, exported, rows_of, train_batch
from tests.contract.vision_job import MIXED, vision_batch

LAYERS = 4
SEEING = "qwen3_vl"
LORA = LoraConfig(rank=3, alpha=7.0, dropout=0.1, targets=("q_proj", "down_proj"))
ADAM = AdamWConfig(lr=1e-3, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    backend: str
    """One of `TRAIN_BACKENDS`."""
    model: str = "dense"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `TrainBackend.build`."""
    model_options: Mapping[str, Any] = field(default_factory=dict)


class Watch(EntropyBonusLoss):
    """The loss, which is called between forward and backward pass, when it looks at which inputs of
    decoder layers are still in memory where the forward pass has computed them."""

    def __init__(self, root: nn.Module, layers: list[nn.Module]) -> None:
        super().__init__()
        self.alive: list[list[bool]] = []
        self._seen: list[StorageWeakRef] = []
        self._forward = False
        root.register_forward_pre_hook(self._begin)
        for layer in layers:
            layer.register_forward_pre_hook(self._look)

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        self.alive.append([not ref.expired() for ref in self._seen])
        self._forward = False  # the backward pass runs the layers once more
        return super().__call__(terms, batch)

    def _begin(self, root: nn.Module, inputs: Any) -> None:
        self._seen, self._forward = [], True

    def _look(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self._forward:
            self._seen.append(StorageWeakRef(inputs[0].untyped_storage()))


def job(spec: WorkerSpec, folder: Path, cases: Mapping[str, Case]) -> dict[str, Any]:
    """Results of each case, with inputs on the device and in host memory."""
    group = GroupMembership(spec)
    found = {
        name: [updated(spec, folder.parent, case, offload=offload) for offload in (False, True)]
        for name, case in cases.items()
    }
    group.leave()
    return found


def updated(spec: WorkerSpec, folder: Path, case: Case, *, offload: bool) -> dict[str, Any]:
    backend = next(each for each in TRAIN_BACKENDS if each.name == case.backend)
    strategy: Any = backend.build(
        spec,
        ModelConfig(path=str(folder / case.model), **case.model_options),
        optimizer=ADAM,
        activation_checkpointing=True,
        offload_activations=offload,
        **{"budget": 40, **case.options},
    )
    whole = strategy._model.model
    layers = list(language_model(whole).layers)
    assert len(layers) == LAYERS
    watch = Watch(strategy._model, layers)
    batch = vision_batch(SEEING, MIXED) if case.model == SEEING else train_batch()
    rows = rows_of(strategy, batch)
    metrics = []
    for _ in range(2):
        strategy.score(rows)
        metrics.append(strategy.train(rows, watch).values_by_name())
    result = {"metrics": metrics, "weights": exported(strategy), "alive": watch.alive}
    strategy.close()
    return result
