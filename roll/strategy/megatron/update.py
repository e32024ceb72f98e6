"""The part of a Megatron-Core update after the backward pass: optimizer and schedule."""

from __future__ import annotations

from torch import Tensor

from mcore_adapter.modeling.mtp import mtp_tensors
from mcore_adapter.modeling.optimizer import adam, step
from mcore_adapter.optimizer_state import load_masters, states_of
from roll.config.sections.model import ModelConfig
from roll.config.sections.optimizers.kinds import AdamWConfig
from roll.strategy.hf_folder import folder_of
from roll.strategy.megatron.model import MegatronModel
from roll.strategy.training.schedule import Schedule


class Update:
    """AdamW on float32 master weights, and the learning rate schedule.

    The master weights are loaded from the checkpoint, not converted from the model's weights, which
    are rounded to the dtype of forward passes.

    Args:
        total_steps: number of optimizer steps of the whole run; required if the learning rate
            decays, else ValueError.
        detached: the layers that predict further tokens are trained beside the policy, which learns
            as it does without them.
    """

    def __init__(
        self,
        model: MegatronModel,
        model_config: ModelConfig,
        config: AdamWConfig,
        total_steps: int | None,
        *,
        detached: bool = False,
    ) -> None:
        self._chunks = model.chunks
        self.schedule = Schedule(config, total_steps)
        self.optimizer = adam(
            model.chunks,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
        )
        folder = folder_of(model_config)
        load_masters(folder, model.chunks, self.optimizer, model.table, model.sizes)
        self._apart = self._tensors_apart(model) if detached else None

    def apply(self) -> tuple[float, float, bool]:
        """Clip the gradients, take a step and clear the gradients. Collective.

        The update is skipped, and weights and optimizer state stay unchanged, if the gradient norm
        is zero or not finite. The schedule advances in any case.

        Returns:
            Gradient norm before clipping, learning rate, and False if the update was skipped.
        """
        lr = self.schedule.advance()
        done = step(self.optimizer, self._chunks, lr=lr, apart=self._apart)
        return done.grad_norm, lr, not done.skipped

    def _tensors_apart(self, model: MegatronModel) -> list[Tensor] | None:
        """Return what the optimizer updates of the layers that predict further tokens; None if
        nothing else is trained, so that there is nothing to keep them apart from."""
        if model.frozen.issuperset(meta.name for meta in model.manifest.tensors):
            return None
        states = states_of(model.chunks, self.optimizer)
        return [states[each].main for each in mtp_tensors(model.chunks) if each in states]
