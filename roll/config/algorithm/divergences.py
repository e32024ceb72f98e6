"""How far a student's distribution of the next token is from its teacher's: a tagged union.

p is the teacher's distribution, q the student's.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roll.config.base import Config


class ForwardKlConfig(Config):
    """KL(p || q) (Hinton et al., arXiv 1503.02531): the student covers all that the teacher might
    say."""

    kind: Literal["forward"] = "forward"


class ReverseKlConfig(Config):
    """KL(q || p) (MiniLLM, arXiv 2306.08543): the student says nothing that the teacher would not.

    For students that are too small to say all of it, and for samples of their own.
    """

    kind: Literal["reverse"] = "reverse"


class JensenShannonConfig(Config):
    """beta * KL(p || m) + (1 - beta) * KL(q || m), m = beta * p + (1 - beta) * q (GKD, arXiv
    2306.13649)."""

    kind: Literal["jensen_shannon"] = "jensen_shannon"
    beta: float = Field(default=0.5, gt=0, lt=1)
    """Towards 0 it is beta times the forward divergence, towards 1 as much of the reverse one."""


class SkewedForwardConfig(Config):
    """KL(p || alpha * p + (1 - alpha) * q) (DistiLLM, arXiv 2402.03898), whose gradient stays
    bounded where the student gives a token no chance."""

    kind: Literal["skewed_forward"] = "skewed_forward"
    alpha: float = Field(default=0.1, gt=0, lt=1)
    """Share of the mixture that is not the other's."""


class SkewedReverseConfig(Config):
    """KL(q || alpha * q + (1 - alpha) * p) (DistiLLM, arXiv 2402.03898)."""

    kind: Literal["skewed_reverse"] = "skewed_reverse"
    alpha: float = Field(default=0.1, gt=0, lt=1)
    """Share of the mixture that is not the other's."""


class AdaptiveKlConfig(Config):
    """w * KL(p || q) + (1 - w) * KL(q || p), where w is the share of |p - q| that lies on the
    teacher's likeliest tokens (AKL, arXiv 2404.02657); no gradient flows through w."""

    kind: Literal["adaptive"] = "adaptive"
    head_mass: float = Field(default=0.5, gt=0, lt=1)
    """The likeliest tokens are the fewest that have this much of p."""


DivergenceConfig = Annotated[
    ForwardKlConfig
    | ReverseKlConfig
    | JensenShannonConfig
    | SkewedForwardConfig
    | SkewedReverseConfig
    | AdaptiveKlConfig,
    Field(discriminator="kind"),
]


class DistillTargetConfig(Config):
    """What a teacher tells its student of each token, and how the two are compared."""

    divergence: DivergenceConfig = ForwardKlConfig()
    """Of the two distributions."""
    top_k: int | None = Field(default=None, ge=1)
    """The teacher's likeliest tokens, each with its probability, and all others together as one;
    left out: the whole distribution, told as the hidden state that it is made of."""
    student_temperature: float = Field(default=1.0, gt=0)
    """Divides the student's logits, in the divergence alone."""
    teacher_temperature: float = Field(default=1.0, gt=0)
    """Divides the teacher's logits."""
