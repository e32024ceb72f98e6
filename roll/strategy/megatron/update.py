"""Everything after the backward pass: Megatron-Core's optimizer, and the rates of a run."""

from __future__ import annotations

from mcore_adapter.modeling.optimizer import adam, step
from mcore_adapter.optimizer_state import load_masters
from roll.config.sections.model import ModelConfig
from roll.config.sections.training import OptimizerConfig
from roll.strategy.hf_folder import folder_of
from roll.strategy.megatron.model import MegatronModel
from roll.strategy.training.schedule import Schedule


class Update:
    """AdamW over float32 masters, which are not rounded to the dtype that the model computes in."""

    def __init__(
        self,
        model: MegatronModel,
        model_config: ModelConfig,
        config: OptimizerConfig,
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
        """Clip and step; returns (grad norm, learning rate, applied). Collective.

        A gradient that is zero or not finite leaves weights and optimizer state as they are. The
        schedule moves on all the same.
        """
        lr = self.schedule.advance()
        done = step(self.optimizer, self._chunks, lr=lr)
        return done.grad_norm, lr, not done.skipped
