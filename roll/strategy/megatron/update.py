"""The part of a Megatron-Core update after the backward pass: optimizer and schedule."""

from __future__ import annotations

from mcore_adapter.modeling.optimizer import adam, step
from mcore_adapter.optimizer_state import load_masters
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
    """

    def __init__(
        self,
        model: MegatronModel,
        model_config: ModelConfig,
        config: AdamWConfig,
        total_steps: int | None,
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

    def apply(self) -> tuple[float, float, bool]:
        """Clip the gradients, take a step and clear the gradients. Collective.

        The update is skipped, and weights and optimizer state stay unchanged, if the gradient norm
        is zero or not finite. The schedule advances in any case.

        Returns:
            Gradient norm before clipping, learning rate, and False if the update was skipped.
        """
        lr = self.schedule.advance()
        done = step(self.optimizer, self._chunks, lr=lr)
        return done.grad_norm, lr, not done.skipped
