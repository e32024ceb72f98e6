"""Divergence of a student's distributions from its teachers', computed in chunks of tokens.

The logits of both models never exist for more than `chunk_tokens` tokens. The backward pass
computes them again, with the same limit. Axis letters: N needed tokens, M needed tokens of one
teacher, D hidden size, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from roll.algorithms.divergences import divergence
from roll.algorithms.logprobs import slope_of_cap, soft_cap
from roll.config.algorithm.divergences import DistillTargetConfig, DivergenceConfig, UldConfig
from roll.core.teacher_outputs import OutputHead, TeacherRow


@dataclass(frozen=True, slots=True)
class Comparison:
    """Settings of the comparison between a student and its teachers."""

    divergence: DivergenceConfig
    student_temperature: float
    teacher_temperature: float
    """Divisor of the teacher's logits where the teacher sends hidden states. A teacher that sends
    log-probs of its likeliest tokens has applied the divisor already."""
    num_tokens: int
    """Number of tokens of the student's tokenizer, which its teachers share unless their heads say
    something else. Logits of a model beyond this number are meaningless."""


def comparison(config: DistillTargetConfig, num_tokens: int) -> Comparison:
    """Return the settings of the comparison that `config` describes. `num_tokens` is the size of
    the student's vocabulary, see `Comparison`."""
    return Comparison(
        config.divergence, config.student_temperature, config.teacher_temperature, num_tokens
    )


@dataclass(frozen=True, slots=True)
class TeacherOutputs:
    """Outputs of one teacher for some of the N needed tokens."""

    index_M: Tensor
    """Numbers of these tokens among the N needed tokens, int64, ascending."""
    outputs: tuple[Tensor, ...]
    """Hidden states `[M, D]`; or ids `[M, K]` and log-probs `[M, K + 1]`, see `TeacherRow`."""
    head: OutputHead | None

    def among(self, chosen: Tensor) -> TeacherOutputs:
        """Return the outputs for a subset of the N tokens, numbered within that subset.

        Args:
            chosen: numbers of the tokens of the subset among the N tokens, int64, ascending.
        """
        there_M = torch.isin(self.index_M, chosen)
        outputs = tuple(each[there_M] for each in self.outputs)
        return TeacherOutputs(torch.searchsorted(chosen, self.index_M[there_M]), outputs, self.head)


def outputs_by_teacher(
    rows: Sequence[TeacherRow],
    needed_BT: Tensor,
    device: torch.device,
    *,
    placed: Callable[[OutputHead], OutputHead] | None = None,
) -> tuple[TeacherOutputs, ...]:
    """Collect each teacher's outputs for the needed tokens, on `device`; one item per teacher.

    Tokens without outputs of a teacher are left out.

    Args:
        rows: outputs of the teacher of each row, in the order of the rows.
        needed_BT: bool, the needed tokens; `logprobs.positions` numbers them in the same way.
        placed: returns the part of a head that is used, on `device`; if left out, all of it.
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
            None if head is None else head.on(device) if placed is None else placed(head),
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
    cap: float | None = None,
) -> Tensor:
    """Compute the divergence of each needed token, float32 `[N]`; zero without teacher outputs.

    Args:
        hidden_ND: the student's hidden states before the needed tokens.
        weight_VD, bias_V: parameters of the student's head.
        teacher_outputs: one item per teacher; a token is in one of them at most.
        compared: divergence and temperatures.
        divisor: number by which the student's model divides its logits, before the temperature of
            `compared`.
        chunk_tokens: largest number of tokens whose logits exist at the same time.
        cap: bound of the student's logits, see `soft_cap`; None: there is none.
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
            (divisor, chunk_tokens, cap),
        )
        out_N = out_N.index_put((teacher.index_M,), found_M)
    return out_N


def top_logprobs(logprobs_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ids `[N, K]` of the `k` likeliest tokens, likeliest first, and log-probs `[N, K + 1]`.

    The last log-prob is that of all other tokens together.
    """
    ids_NK = logprobs_NV.topk(k, -1).indices
    return ids_NK, coarse(logprobs_NV, ids_NK)


def coarse(logprobs_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """Return the log-probs of `ids_NK`, then that of all other tokens together, `[N, K + 1]`."""
    # The rest is often smaller than the rounding of the sum, so 1 - sum would lose it.
    rest_N1 = logprobs_NV.scatter(-1, ids_NK, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs_NV.gather(-1, ids_NK), rest_N1], -1)


def _compare(
    logits_NV: Tensor, outputs: tuple[Tensor, ...], head: OutputHead | None, how: Comparison
) -> Tensor:
    """Return the divergence of each token of a chunk, `[N]`, in nats. `logits_NV` are the
    student's; `outputs` and `head` are those of the teacher, as in `TeacherOutputs`."""
    student_NV = logprobs_of(logits_NV, how.student_temperature, how.num_tokens)
    if head is None:
        ids_NK, teacher_NK = outputs
        if isinstance(how.divergence, UldConfig):
            # The i-th likeliest token of each, whichever that is, and the rest of each.
            _, student_NK = top_logprobs(student_NV, ids_NK.shape[1])
            return (teacher_NK.exp() - student_NK.exp()).abs().sum(-1)
        return divergence(how.divergence, teacher_NK, coarse(student_NV, ids_NK))
    logits_NV = soft_cap(linear(outputs[0], head.weight_VD, head.bias_V).float(), head.cap)
    count = how.num_tokens if head.num_tokens is None else head.num_tokens
    teacher_NV = logprobs_of(logits_NV, how.teacher_temperature * head.divisor, count)
    return divergence(how.divergence, teacher_NV, student_NV)


def logprobs_of(logits_NV: Tensor, divisor: float, num_tokens: int) -> Tensor:
    """Return float32 log-probs of the first `num_tokens` tokens, from logits over `divisor`."""
    return (logits_NV[:, :num_tokens].float() / divisor).log_softmax(-1)


class _ChunkedDivergence(torch.autograd.Function):
    """Autograd function that computes the logits of a chunk again in the backward pass.

    Saved between the passes are only the student's hidden states and the teacher's outputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        outputs: tuple[Tensor, ...],
        head: OutputHead | None,
        how: Comparison,
        made: tuple[float, int, float | None],
    ) -> Tensor:
        """Return the divergence of each token from its teacher, float32 `[M]`; keep no logits.

        `made` is `(divisor, chunk_tokens, cap)`.
        """
        divisor, chunk_tokens, cap = made
        out_M = hidden_MD.new_empty(len(hidden_MD), dtype=torch.float32)
        for i in range(0, len(hidden_MD), chunk_tokens):
            part = slice(i, i + chunk_tokens)
            logits = soft_cap(linear(hidden_MD[part], weight_VD, bias_V).float(), cap) / divisor
            out_M[part] = _compare(logits, tuple(each[part] for each in outputs), head, how)
        ctx.save_for_backward(hidden_MD, weight_VD, bias_V)
        ctx.taught, ctx.made = (outputs, head, how), made
        return out_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of hidden states, weight and bias; recompute each chunk's logits."""
        hidden_MD, weight_VD, bias_V = ctx.saved_tensors
        (outputs, head, how), (divisor, chunk_tokens, cap) = ctx.taught, ctx.made
        grad_hidden_MD = torch.empty_like(hidden_MD)
        # Sums over many chunks would lose bits in bfloat16, so they are kept in float32.
        # A frozen head, as with an adapter, needs no gradient.
        learns = ctx.needs_input_grad[1]
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if learns else None
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for i in range(0, len(hidden_MD), chunk_tokens):
            part = slice(i, i + chunk_tokens)
            hidden = hidden_MD[part]
            logits = soft_cap(linear(hidden, weight_VD, bias_V).float(), cap)
            slope = None if cap is None else slope_of_cap(logits, cap)
            logits = logits.div_(divisor)
            with torch.enable_grad():
                logits.requires_grad_()
                found = _compare(logits, tuple(each[part] for each in outputs), head, how)
            (grad,) = torch.autograd.grad(found, logits, grad_M[part])
            grad = grad.div_(divisor)
            grad = (grad if slope is None else grad.mul_(slope)).to(hidden.dtype)
            grad_hidden_MD[part] = grad @ weight_VD
            if grad_weight_VD is not None:
                grad_weight_VD += grad.T @ hidden
            if grad_bias_V is not None:
                grad_bias_V += grad.sum(0)
        bias = None if grad_bias_V is None else grad_bias_V.to(weight_VD.dtype)
        weight = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_MD, weight, bias, *[None] * 4
