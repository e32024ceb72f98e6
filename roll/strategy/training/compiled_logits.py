"""torch.compile of what is read of the logits of a chunk, and of their gradient.

The functions of `roll.algorithms.logprobs` go through the logits in memory about ten times, with
one operation after another. Compiled, each reads them once or twice: on GPUs that is one Triton
kernel, which PyTorch writes. They compute the same formulas, without changing logits in place,
which compiled code would have to write back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.logprobs import (
    LogitChunk,
    LogitChunks,
    LogitsRead,
    logit_slopes,
    read_logits,
)
from roll.models.kernels.compiled import prepare

_threads = threading.local()


def compiled_chunks(chunks: LogitChunks) -> LogitChunks:
    """Return the chunks with functions that are compiled when they first run.

    Sizes are unknowns of the compiled code, so chunks of other lengths do not compile it again.
    """
    read: Any = torch.compile(_plain_read, dynamic=True)
    slopes: Any = torch.compile(_plain_slopes, dynamic=True)
    return replace(chunks, read=partial(_read, read), slopes=partial(_slopes, slopes))


def _read(
    compiled: Callable[[LogitChunk], LogitsRead], chunk: LogitChunk, also: tuple[bool, bool]
) -> LogitsRead:
    """Read logits; see `read_logits`. Entropies and squares are read in any case, because compiled
    code computes them on the way; those that nobody asked for are left out of the result."""
    if len(chunk.targets) == 1:  # the compiler takes a size of one for a constant
        return read_logits(chunk, also)
    _prepare_thread()
    logprobs, lse, entropy, squares = compiled(chunk)
    return LogitsRead(logprobs, lse, entropy if also[0] else None, squares if also[1] else None)


def _slopes(compiled: Callable[..., Tensor], chunk: LogitChunk, *read: Any) -> Tensor:
    """Return the gradient of logits; arguments as for `logit_slopes`."""
    if len(chunk.targets) == 1:  # see `_read`
        return logit_slopes(chunk, *read)
    _prepare_thread()
    return compiled(chunk, *read)


def _prepare_thread() -> None:
    """Set the compiler up once in each thread: the backward pass of a GPU has one of its own."""
    if not getattr(_threads, "prepared", False):
        prepare()
        _threads.prepared = True


def _bounded(logits_NV: Tensor, cap: float | None) -> Tensor:
    """Return the logits in float32, bounded as by `soft_cap`."""
    logits = logits_NV.float()
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _plain_read(chunk: LogitChunk) -> LogitsRead:
    """Return all that can be read of the logits of a chunk."""
    logits = _bounded(chunk.logits, chunk.cap) / chunk.temperature
    lse = logits.logsumexp(-1)
    chosen = logits.gather(-1, chunk.targets[:, None]).squeeze(-1) - lse
    logp = logits - lse[:, None]
    probs = logp.exp()
    return LogitsRead(chosen, lse, -(probs * logp).sum(-1), probs.square().sum(-1))


def _plain_slopes(
    chunk: LogitChunk,
    lse_N: Tensor,
    entropy_N: Tensor,
    grad_logprobs_N: Tensor,
    grad_entropy_N: Tensor | None,
) -> Tensor:
    """Return the gradient of the logits of a chunk, `[N, V]` in their dtype."""
    logits = _bounded(chunk.logits, chunk.cap)
    logp = logits / chunk.temperature - lse_N[:, None]
    probs = logp.exp()
    ids_V = torch.arange(logits.shape[-1], device=logits.device)
    hit_NV = (ids_V == chunk.targets[:, None]).float()
    grad = (hit_NV - probs) * grad_logprobs_N[:, None]
    if grad_entropy_N is not None:
        grad = grad - probs * (logp + entropy_N[:, None]) * grad_entropy_N[:, None]
    grad = grad / chunk.temperature
    if chunk.cap is not None:
        grad = grad * (1 - (logits / chunk.cap).square())
    return grad.to(chunk.logits.dtype)
