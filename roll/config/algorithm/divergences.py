"""Divergences between the next-token distributions of teacher and student: a tagged union.

p is the teacher's distribution, q the student's.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roll.config.base import Config


class ForwardKlConfig(Config):
    """Forward KL divergence, KL(p || q) (Hinton et al., arXiv 1503.02531): the student learns to
    cover everything that the teacher might say."""

    kind: Literal["forward"] = "forward"


class ReverseKlConfig(Config):
    """Reverse KL divergence, KL(q || p) (MiniLLM, arXiv 2306.08543): the student learns to say
    nothing that the teacher would not say.

    For students that are too small to cover everything, and for training on the student's own
    samples.
    """

    kind: Literal["reverse"] = "reverse"


class JensenShannonConfig(Config):
    """Generalised Jensen-Shannon divergence, beta * KL(p || m) + (1 - beta) * KL(q || m) with m =
    beta * p + (1 - beta) * q (GKD, arXiv 2306.13649)."""

    kind: Literal["jensen_shannon"] = "jensen_shannon"
    beta: float = Field(default=0.5, gt=0, lt=1)
    """Share of the teacher's distribution in m. Near 0 the divergence is close to beta * KL(p ||
    q), near 1 to (1 - beta) * KL(q || p)."""


class SkewedForwardConfig(Config):
    """Skewed forward KL divergence, KL(p || alpha * p + (1 - alpha) * q) (DistiLLM, arXiv
    2402.03898). Its gradient stays bounded where the student gives a token a probability near 0."""

    kind: Literal["skewed_forward"] = "skewed_forward"
    alpha: float = Field(default=0.1, gt=0, lt=1)
    """Share of the teacher's distribution in the mixture."""


class SkewedReverseConfig(Config):
    """Skewed reverse KL divergence, KL(q || alpha * q + (1 - alpha) * p) (DistiLLM, arXiv
    2402.03898)."""

    kind: Literal["skewed_reverse"] = "skewed_reverse"
    alpha: float = Field(default=0.1, gt=0, lt=1)
    """Share of the student's distribution in the mixture."""


class AdaptiveKlConfig(Config):
    """Weighted sum of forward and reverse KL divergence, w * KL(p || q) + (1 - w) * KL(q || p),
    where w is the share of |p - q| that lies on the teacher's likeliest tokens (AKL, arXiv
    2404.02657). No gradient flows through w."""

    kind: Literal["adaptive"] = "adaptive"
    head_mass: float = Field(default=0.5, gt=0, lt=1)
    """Probability mass, under p, of the tokens that count as the teacher's likeliest: the smallest
    set of tokens that has at least this mass."""


class UldConfig(Config):
    """Distance between the sorted distributions, the sum of |p_i - q_i|, where p_i is the i-th
    largest probability of the teacher, q_i that of the student, and 0 behind the last one
    (universal logit distillation, ULD, arXiv 2402.12030): the Wasserstein distance if every token
    is equally far from every other one. With `top_k`, of the K largest probabilities of each, and
    the rest. It has no unit, and is at most 2.

    For teachers with other tokens than the student: it compares no token with another one. Such a
    teacher reads the text of a row in its own tokens, and teaches those tokens of the student that
    begin where one of its own does: there both have read the same text. Its chat template must
    render the same text as the student's. The paper adds the loss of the text itself: `coef: 1.5`
    and `sft_coef: 1`.
    """

    kind: Literal["uld"] = "uld"


DivergenceConfig = Annotated[
    ForwardKlConfig
    | ReverseKlConfig
    | JensenShannonConfig
    | SkewedForwardConfig
    | SkewedReverseConfig
    | AdaptiveKlConfig
    | UldConfig,
    Field(discriminator="kind"),
]


class DistillTargetConfig(Config):
    """Settings of a divergence from a teacher: the part of the distribution that the teacher sends,
    and the comparison."""

    divergence: DivergenceConfig = ForwardKlConfig()
    """Divergence between the teacher's distribution and the student's. All but `uld` need a teacher
    with the tokens of the student."""
    top_k: int | None = Field(default=None, ge=1)
    """Number of the teacher's likeliest tokens that are compared one by one; all other tokens
    together count as one. If left out: the whole distribution, which the teacher sends as the
    hidden state that the logits are computed from."""
    student_temperature: float = Field(default=1.0, gt=0)
    """Divisor of the student's logits; used only in the divergence."""
    teacher_temperature: float = Field(default=1.0, gt=0)
    """Divisor of the teacher's logits."""

    @property
    def any_tokens(self) -> bool:
        """True if teachers may have other tokens than the student."""
        return isinstance(self.divergence, UldConfig)


class DistillLossConfig(DistillTargetConfig):
    """Loss of distillation: coef * divergence from the teacher + sft_coef * -log p of the text
    itself."""

    coef: float = Field(default=1.0, gt=0)
    """Factor of the divergence, which is in nats."""
    sft_coef: float = Field(default=0.0, ge=0)
    """Factor of -log p."""
