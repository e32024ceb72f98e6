"""The kinds of optimizers, one class each; a role selects its own by `kind`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from roll.config.base import Config
from roll.config.sections.optimizers.base import OptimizerBase

USUAL = "adamw"
"""Kind that is meant where none is named."""
Share = Annotated[float, Field(ge=0, lt=1)]


class AdamWConfig(OptimizerBase):
    """AdamW (arXiv 1711.05101); this kind is taken where none is named."""

    kind: Literal["adamw"] = "adamw"
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay; applied to matrices only, never to norms and biases."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay rates of the running means of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0)
    """Number added to the root of the mean square before the division."""


class AdamW8bitConfig(OptimizerBase):
    """AdamW whose running means have 8 bits (arXiv 2110.02861), torchao's. Parameters of fewer than
    4096 elements, or whose number of elements is no multiple of 256, keep them in float32."""

    kind: Literal["adamw_8bit"] = "adamw_8bit"
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay; applied to matrices only, never to norms and biases."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay rates of the running means of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0)
    """Number added to the root of the mean square before the division."""


class AdafactorConfig(OptimizerBase):
    """Adafactor (arXiv 1804.04235), PyTorch's: of the squares of a matrix's gradients it keeps the
    means of rows and columns only, and no mean of the gradients themselves."""

    kind: Literal["adafactor"] = "adafactor"
    lr: float = Field(gt=0)
    """Peak learning rate, relative to the root mean square of each parameter. In step t it is at
    most 1 / sqrt(t). The paper has 0.01."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay; applied to matrices only, never to norms and biases."""
    beta2_decay: float = Field(default=-0.8, le=0)
    """Exponent of the step number t: the means of squares decay by 1 - t ** `beta2_decay`."""
    clip_threshold: float = Field(default=1.0, ge=1)
    """Largest root mean square of the update of a parameter, before the learning rate; larger
    updates are scaled down to it."""
    min_scale: float = Field(default=1e-3, ge=0)
    """Value below which the root mean square of a parameter counts as this value, so that
    parameters of zero learn."""


class OthersConfig(Config):
    """AdamW of the parameters that Muon does not train. Schedule and clipping are the same for
    both."""

    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate. null: that of the matrices."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay; applied to matrices only, never to norms and biases."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay rates of the running means of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0)
    """Number added to the root of the mean square before the division."""


class MuonConfig(OptimizerBase):
    """Muon (kellerjordan.github.io/posts/muon, arXiv 2502.16982), PyTorch's, for the matrices
    inside the layers: it makes the singular values of the running mean of a matrix's gradients
    nearly equal. Embeddings, heads, norms, biases and all else outside of the layers take AdamW."""

    kind: Literal["muon"] = "muon"
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of the matrices."""
    momentum: Share = 0.95
    """Decay rates of the running means of the gradients, one for all matrices."""
    nesterov: bool = True
    """Use the mean as it will be after the next equal gradient (Nesterov's momentum)."""
    ns_steps: int = Field(default=5, ge=1, lt=100)
    """Number of iterations of Newton and Schulz, in bfloat16, that equalise the singular values."""
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of the update of a matrix with m rows and n columns. `match_rms_adamw`: 0.2 times the
    root of the larger of the two, so that a learning rate of AdamW can be kept (arXiv 2502.16982).
    `original`: the root of m / n, at least 1."""
    others: OthersConfig = OthersConfig()
    """AdamW of all parameters that are no matrices inside the layers."""

    @model_validator(mode="after")
    def _check_rates(self) -> Self:
        """Refuse `scale: original` with one learning rate for both optimizers."""
        if self.scale == "original" and self.others.lr is None:
            raise ValueError(
                "others.lr: must be set with scale: original, whose learning rates (about 0.02) "
                "are far too large for AdamW"
            )
        return self


class SgdConfig(OptimizerBase):
    """Stochastic gradient descent, PyTorch's."""

    kind: Literal["sgd"] = "sgd"
    lr: float = Field(gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Factor of the weights that is added to their gradients after clipping; for matrices only,
    never for norms and biases."""
    momentum: Share = 0.0
    """Factor by which the running sum of gradients decays in each step; 0: there is none."""


OPTIMIZERS = (AdamWConfig, AdamW8bitConfig, AdafactorConfig, MuonConfig, SgdConfig)


def _kind_of(value: Any) -> str:
    """Return the kind that the settings of an optimizer, a mapping or an object, mean."""
    if isinstance(value, dict):
        return str(value.get("kind", USUAL))
    return str(getattr(value, "kind", USUAL))


OptimizerConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")]
    | Annotated[AdamW8bitConfig, Tag("adamw_8bit")]
    | Annotated[AdafactorConfig, Tag("adafactor")]
    | Annotated[MuonConfig, Tag("muon")]
    | Annotated[SgdConfig, Tag("sgd")],
    Discriminator(_kind_of),
]
"""Settings of an optimizer; without a `kind`, of AdamW."""
