"""A student's distributions against its teacher's, in chunks of tokens.

Neither model's logits ever exist for more than `chunk_tokens` tokens, in the backward pass too,
where both are computed again. N counts the tokens that are asked for, M those of one teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from roll.algorithms.divergences import divergence
from roll.config.algorithm.divergences import DistillTargetConfig, DivergenceConfig
from roll.core.teacher_outputs import OutputHead, TeacherRow


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a student is compared with its teachers."""

    divergence: DivergenceConfig
    student_temperature: float
    teacher_temperature: float
    """Of whole distributions; a teacher that tells its likeliest tokens has divided already."""
    num_tokens: int
    """Of the tokenizer that both share. A model may have more logits, which mean nothing."""


def comparison(config: DistillTargetConfig, num_tokens: int) -> Comparison:
    return Comparison(
        config.divergence, config.student_temperature, config.teacher_temperature, num_tokens
    )


@dataclass(frozen=True, slots=True)
class TeacherOutputs:
    """What one teacher says of some of the tokens that are asked for."""

    index_M: Tensor
    """Int64; which of the N tokens."""
    outputs: tuple[Tensor, ...]
    """As that of `TeacherRow`."""
    head: OutputHead | None

    def among(self, chosen: Tensor) -> TeacherOutputs:
        """The same of fewer tokens.

        Args:
            chosen: int64, ascending; which of the N tokens there are.
        """
        there_M = torch.isin(self.index_M, chosen)
        outputs = tuple(each[there_M] for each in self.outputs)
        return TeacherOutputs(torch.searchsorted(chosen, self.index_M[there_M]), outputs, self.head)


def outputs_by_teacher(
    rows: Sequence[TeacherRow], needed_BT: Tensor, device: torch.device
) -> tuple[TeacherOutputs, ...]:
    """One per teacher, on `device`, of the tokens that are needed and that it spoke of.

    Args:
        rows: one per row.
        needed_BT: the tokens that are asked for; `logprobs.positions` counts them the same way.
    """
    found: dict[str, list[tuple[Tensor, TeacherRow, Tensor]]] = {}
    before = 0
    for row, needed_T in zip(rows, needed_BT, strict=True):
        at_n = needed_T[1:].nonzero().flatten() + 1
        there_m = torch.isin(at_n, row.positions_N)
        index_m = before + there_m.nonzero().flatten()
        slots_m = torch.searchsorted(row.positions_N, at_n[there_m])
        found.setdefault(row.teacher, []).append((index_m, row, slots_m))
        before += len(at_n)
    return tuple(
        TeacherOutputs(
            torch.cat([index_m for index_m, _, _ in parts]).to(device),
            tuple(
                torch.cat(column).to(device)
                for column in zip(
                    *([each[slots_m] for each in row.outputs] for _, row, slots_m in parts),
                    strict=True,
                )
            ),
            None if head is None else head.on(device),
        )
        for parts in found.values()
        for head in [parts[0][1].head]
    )


def divergences(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    teacher_outputs: Sequence[TeacherOutputs],
    compared: Comparison,
    *,
    divisor: float,
    chunk_tokens: int,
) -> Tensor:
    """Float32 `[N]`; zero where no teacher outputs anything.

    Args:
        hidden_ND: the student's states before the tokens that are asked for.
        weight_VD, bias_V: of its head, whose results `divisor` divides.
    """
    out_N = hidden_ND.new_zeros(len(hidden_ND), dtype=torch.float32)
    for teacher in teacher_outputs:
        found_M = _ChunkedDivergence.apply(  # type: ignore[no-untyped-call]
            hidden_ND[teacher.index_M],
            weight_VD,
            bias_V,
            teacher.outputs,
            teacher.head,
            compared,
            divisor,
            chunk_tokens,
        )
        out_N = out_N.index_put((teacher.index_M,), found_M)
    return out_N


def top_logprobs(logprobs_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids `[N, K]` of the likeliest tokens, and log-probs `[N, K + 1]` with that of all others."""
    ids_NK = logprobs_NV.topk(k, -1).indices
    return ids_NK, coarse(logprobs_NV, ids_NK)


def coarse(logprobs_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """Log-probs of `ids_NK`, and behind them that of all other tokens together, `[N, K + 1]`."""
    # Not 1 - sum: what is left is often smaller than the rounding of that sum.
    rest_N1 = logprobs_NV.scatter(-1, ids_NK, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs_NV.gather(-1, ids_NK), rest_N1], -1)


def _compare(
    logits_NV: Tensor, outputs: tuple[Tensor, ...], head: OutputHead | None, how: Comparison
) -> Tensor:
    """Divergence `[N]` of a chunk."""
    student_NV = logprobs_of(logits_NV, how.student_temperature, how.num_tokens)
    if head is None:
        ids_NK, teacher_NK = outputs
        return divergence(how.divergence, teacher_NK, coarse(student_NV, ids_NK))
    logits_NV = linear(outputs[0], head.weight_VD, head.bias_V)
    teacher_NV = logprobs_of(logits_NV, how.teacher_temperature * head.divisor, how.num_tokens)
    return divergence(how.divergence, teacher_NV, student_NV)


def logprobs_of(logits_NV: Tensor, divisor: float, num_tokens: int) -> Tensor:
    """Of the tokens that mean something, float32."""
    return (logits_NV[:, :num_tokens].float() / divisor).log_softmax(-1)


class _ChunkedDivergence(torch.autograd.Function):
    """Saves hidden states, the student's and what the teacher outputs, and nothing per token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        outputs: tuple[Tensor, ...],
        head: OutputHead | None,
        how: Comparison,
        divisor: float,
        chunk_tokens: int,
    ) -> Tensor:
        out_M = hidden_MD.new_empty(len(hidden_MD), dtype=torch.float32)
        for i in range(0, len(hidden_MD), chunk_tokens):
            part = slice(i, i + chunk_tokens)
            logits = linear(hidden_MD[part], weight_VD, bias_V).float() / divisor
            out_M[part] = _compare(logits, tuple(each[part] for each in outputs), head, how)
        ctx.save_for_backward(hidden_MD, weight_VD, bias_V)
        ctx.taught, ctx.chunk = (outputs, head, how), (divisor, chunk_tokens)
        return out_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_VD, bias_V = ctx.saved_tensors
        (outputs, head, how), (divisor, chunk_tokens) = ctx.taught, ctx.chunk
        grad_hidden_MD = torch.empty_like(hidden_MD)
        # Sums over many chunks lose bits in bfloat16, so they are kept in float32.
        # An adapter leaves the head frozen.
        learns = ctx.needs_input_grad[1]
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if learns else None
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for i in range(0, len(hidden_MD), chunk_tokens):
            part = slice(i, i + chunk_tokens)
            hidden = hidden_MD[part]
            logits = linear(hidden, weight_VD, bias_V).float().div_(divisor)
            with torch.enable_grad():
                logits.requires_grad_()
                found = _compare(logits, tuple(each[part] for each in outputs), head, how)
            (grad,) = torch.autograd.grad(found, logits, grad_M[part])
            grad = grad.div_(divisor).to(hidden.dtype)
            grad_hidden_MD[part] = grad @ weight_VD
            if grad_weight_VD is not None:
                grad_weight_VD += grad.T @ hidden
            if grad_bias_V is not None:
                grad_bias_V += grad.sum(0)
        bias = None if grad_bias_V is None else grad_bias_V.to(weight_VD.dtype)
        weight = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_MD, weight, bias, *[None] * 5
