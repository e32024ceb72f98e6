"""Divergence of a student from its teachers where tensor parallel ranks share its vocabulary.

As in `roll.algorithms.teacher_divergence`, float32 numbers of the whole vocabulary exist for a
chunk of tokens only, and are made again in the backward pass. Each rank makes the student's and the
teacher's numbers of its own tokens. Axis letters: N needed tokens, M needed tokens of one teacher,
W logits of this rank, S tokens of this rank, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from mcore_adapter.parallel.vocabulary import VocabularyPart
from roll.algorithms.divergences import divergence
from roll.algorithms.logprobs import soft_cap
from roll.algorithms.teacher_divergence import Comparison, TeacherOutputs, outputs_by_teacher
from roll.config.algorithm.divergences import AdaptiveKlConfig, UldConfig
from roll.core.teacher_outputs import OutputHead, TeacherRow

_OF_SORTED = (AdaptiveKlConfig, UldConfig)
"""Divergences that sort the tokens by their probabilities; all others are sums over tokens."""


def outputs_here(
    rows: Sequence[TeacherRow],
    needed_BT: Tensor,
    device: torch.device,
    compared: Comparison,
    part: VocabularyPart,
) -> tuple[TeacherOutputs, ...]:
    """Collect each teacher's outputs for the needed tokens, on `device`, with the part of the head
    that makes the logits of this rank. See `outputs_by_teacher`."""

    def placed(head: OutputHead) -> OutputHead:
        return head.on(device, _teacher_part(head, compared, part).columns)

    return outputs_by_teacher(rows, needed_BT, device, placed=placed)


def divergences(
    logits_NW: Tensor,
    teachers: Sequence[TeacherOutputs],
    compared: Comparison,
    part: VocabularyPart,
    *,
    chunk_tokens: int,
) -> Tensor:
    """Compute the divergence of each needed token, float32 `[N]`; zero without teacher outputs.
    Collective; the result is the same on all tensor parallel ranks.

    Args:
        logits_NW: this rank's logits of the student, with their padding.
        teachers: result of `outputs_here`; a token is in one of them at most.
        compared: divergence and temperatures.
        part: this rank's part of the tokens that are compared, `compared.num_tokens` of all ranks.
        chunk_tokens: largest number of tokens that are computed at a time.
    """
    found: Tensor = _ChunkedDivergence.apply(logits_NW, teachers, compared, part, chunk_tokens)
    return found


class _ChunkedDivergence(torch.autograd.Function):
    """Autograd function that keeps the student's logits, and computes each chunk again for its
    gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NW: Tensor,
        teachers: Sequence[TeacherOutputs],
        compared: Comparison,
        part: VocabularyPart,
        chunk_tokens: int,
    ) -> Tensor:
        """Return the divergence of each token from its teacher, float32 `[N]`."""
        out_N = logits_NW.new_zeros(len(logits_NW), dtype=torch.float32)
        for teacher in teachers:
            for rows, of_chunk in _chunks(teacher, chunk_tokens):
                scaled = _scaled(logits_NW, rows, compared, part)
                out_N[rows] = _compare(scaled, of_chunk, teacher.head, compared, part)
        ctx.save_for_backward(logits_NW)
        ctx.taught = teachers, compared, part, chunk_tokens
        return out_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of this rank's logits, made chunk by chunk; 0 for padding."""
        (logits_NW,) = ctx.saved_tensors
        teachers, compared, part, chunk_tokens = ctx.taught
        grad_NW = torch.zeros_like(logits_NW)
        for teacher in teachers:
            for rows, of_chunk in _chunks(teacher, chunk_tokens):
                with torch.enable_grad():
                    scaled = _scaled(logits_NW, rows, compared, part).requires_grad_()
                    found = _compare(scaled, of_chunk, teacher.head, compared, part)
                (grad,) = torch.autograd.grad(found, scaled, grad_N[rows])
                grad_NW[rows, : part.size] = grad.div_(compared.student_temperature).to(
                    grad_NW.dtype
                )
        return grad_NW, *[None] * 4


def _chunks(teacher: TeacherOutputs, chunk_tokens: int) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
    """Divide a teacher's tokens into chunks: numbers of the tokens, and what the teacher gave."""
    columns = (teacher.index_M, *teacher.outputs)
    parts = zip(*(each.split(chunk_tokens) for each in columns), strict=True)
    return [(rows, tuple(of_chunk)) for rows, *of_chunk in parts if len(rows)]


def _scaled(logits_NW: Tensor, rows: Tensor, compared: Comparison, part: VocabularyPart) -> Tensor:
    """Return the student's logits of a chunk over its temperature, float32, without padding."""
    return logits_NW.detach()[rows, : part.size].float() / compared.student_temperature


def _compare(
    scaled_NS: Tensor,
    outputs: Sequence[Tensor],
    head: OutputHead | None,
    how: Comparison,
    part: VocabularyPart,
) -> Tensor:
    """Return the divergence of each token of a chunk, `[N]`, in nats, the same on all ranks.

    `scaled_NS` are the student's logits over its temperature; `outputs` and `head` are those of the
    teacher, as in `TeacherOutputs`, the head with this rank's tokens.
    """
    student_NS = part.logprobs(scaled_NS)
    if head is None:
        ids_NK, teacher_NK = outputs
        if isinstance(how.divergence, UldConfig):
            # The i-th likeliest token of each, whichever that is, and the rest of each.
            ids_NK = part.likeliest(student_NS, ids_NK.shape[1])
            return (teacher_NK.exp() - part.coarse(student_NS, ids_NK).exp()).abs().sum(-1)
        return divergence(how.divergence, teacher_NK, part.coarse(student_NS, ids_NK))
    with torch.no_grad():
        logits_NS = soft_cap(linear(outputs[0], head.weight_VD, head.bias_V).float(), head.cap)
        theirs = _teacher_part(head, how, part)
        teacher_NS = theirs.logprobs(logits_NS.div_(how.teacher_temperature * head.divisor))
    if isinstance(how.divergence, _OF_SORTED):
        return divergence(how.divergence, theirs.whole(teacher_NS), part.whole(student_NS))
    return part.added(divergence(how.divergence, teacher_NS, student_NS))


def _teacher_part(head: OutputHead, how: Comparison, part: VocabularyPart) -> VocabularyPart:
    """Return this rank's part of a teacher's tokens: those of the student's part, or, of a teacher
    with other tokens, an equal share."""
    count = how.num_tokens if head.num_tokens is None else head.num_tokens
    if count == part.vocab:
        return part
    return VocabularyPart(part.group, count, -(-count // part.group.size()))
