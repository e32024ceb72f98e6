"""Log-probs of tokens, entropy and squared probabilities of their distributions, in chunks.

Full `[B, T, V]` logits never exist.

The logits at position t - 1 describe token t. Only this module handles that shift by one; all other
code uses tensors whose position t describes token t. Axis letters: N needed tokens, D hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from roll.algorithms.loss_interface import PolicyTerms


def positions(needed_BT: Tensor) -> Tensor:
    """Return flat indices of the needed tokens, ascending, int64 `[N]`, without position 0.

    Position 0 has no log-prob. Call this on the host and move the result to the accelerator: on the
    accelerator, counting the tokens would block until the device has finished its queue.
    """
    flat = needed_BT.clone()
    flat[:, 0] = False
    return flat.flatten().nonzero().flatten()


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """Bound logits in place to `cap * tanh(logits / cap)`, as gemma does; None: no bound."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def slope_of_cap(capped: Tensor, cap: float) -> Tensor:
    """Return the derivative of bounded logits by the logits, given the bounded ones."""
    return (capped / cap).square_().neg_().add_(1.0)


class LogitChunk(NamedTuple):
    """Logits of some tokens as the output head returns them, and what they are read with."""

    logits: Tensor
    """Logits `[N, V]`, which a reader may overwrite."""
    targets: Tensor
    """Ids `[N]` of the tokens."""
    temperature: float | Tensor
    """Number, or column `[N, 1]`, that divides the bounded logits."""
    cap: float | None
    """Bound of the logits before the temperature, see `soft_cap`; None: there is none."""


class LogitsRead(NamedTuple):
    """Numbers that are read of the logits of some tokens, each float32 `[N]`."""

    logprobs: Tensor
    lse: Tensor
    """Log-sum-exp of the logits, bounded and divided."""
    entropy: Tensor | None
    squares: Tensor | None
    """Sum of the squared probabilities."""


def read_logits(chunk: LogitChunk, also: tuple[bool, bool]) -> LogitsRead:
    """Read log-probs of a chunk and, as `also` says, entropies and sums of squares."""
    entropy, squares = also
    logits = soft_cap(chunk.logits.float(), chunk.cap).div_(chunk.temperature)
    lse = logits.logsumexp(-1)
    chosen = logits.gather(-1, chunk.targets[:, None]).squeeze(-1) - lse
    entropy_N = squares_N = None
    if entropy or squares:
        # lse - E[logits] would lose a small entropy to cancellation.
        logp = logits.sub_(lse[:, None])
        entropy_N = -logp.exp().mul_(logp).sum(-1) if entropy else None
        squares_N = logp.exp_().square_().sum(-1) if squares else None
    return LogitsRead(chosen, lse, entropy_N, squares_N)


def logit_slopes(
    chunk: LogitChunk,
    lse_N: Tensor,
    entropy_N: Tensor,
    grad_logprobs_N: Tensor,
    grad_entropy_N: Tensor | None,
) -> Tensor:
    """Return the gradient of the logits of a chunk, `[N, V]` in their dtype.

    Args:
        lse_N: what `read_logits` has returned, and so `entropy_N`.
        grad_logprobs_N: gradient of the log-probs, and `grad_entropy_N` that of the entropies or
            None.
    """
    cap, temperature = chunk.cap, chunk.temperature
    logits = soft_cap(chunk.logits.float(), cap)
    slope = None if cap is None else slope_of_cap(logits, cap)
    logp = logits.div_(temperature).sub_(lse_N[:, None])
    probs = logp.exp()
    factor = grad_logprobs_N[:, None]
    if grad_entropy_N is not None:
        # d entropy / d logit = -p (log p + entropy); d logprob / d logit = onehot - p
        surprise = logp.add_(entropy_N[:, None])
        grad = probs.mul_(surprise.mul_(-grad_entropy_N[:, None]).sub_(factor))
    else:
        grad = probs.mul_(-factor)
    grad.scatter_add_(-1, chunk.targets[:, None], factor)
    grad = grad.div_(temperature)
    return (grad if slope is None else grad.mul_(slope)).to(chunk.logits.dtype)


@dataclass(frozen=True, slots=True)
class LogitChunks:
    """Way in which logits are computed and read: so many tokens at a time, by these functions."""

    tokens: int
    """Number of tokens of a chunk, at least 1."""
    cap: float | None = None
    """Bound of the logits before the temperature, see `soft_cap`; None: there is none."""
    read: Callable[[LogitChunk, tuple[bool, bool]], LogitsRead] = read_logits
    slopes: Callable[[LogitChunk, Tensor, Tensor, Tensor, Tensor | None], Tensor] = logit_slopes


def from_hidden(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    *,
    temperature: float | Tensor,
    chunks: LogitChunks,
    entropy: bool = False,
    squares: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute log-probs of the tokens `targets_N`, entropy, and the sum of squared probabilities,
    from the hidden states before them.

    At most `chunks.tokens * V` float32 logits exist at once. The backward pass computes the logits
    again, with the same limit. All results are float32 `[N]`; the softmax is computed in float32
    for any input dtype. The entropy is None unless `entropy` is True; so are, with `squares`, the
    squares, which have no gradient.

    Args:
        weight_VD: weight of the output head, and `bias_V` its bias or None.
        temperature: number above zero that divides the logits, as in the engine's sampling; or one
            for each token, `[N]`.
    """
    logprobs_N, entropy_N, squares_N = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, bias_V, targets_N, temperature, chunks, (entropy, squares)
    )
    return logprobs_N, entropy_N if entropy else None, squares_N if squares else None


def from_logits(
    logits_BTV: Tensor, tokens_BT: Tensor, *, temperature: float, entropy: bool = False
) -> PolicyTerms:
    """Compute log-probs and entropy from whole logits; for tests and small models.

    Results are `[B, T]`, 0 at position 0. The entropy is None unless `entropy` is True.
    """
    logits = logits_BTV[:, :-1].float() / temperature
    logp = logits.log_softmax(-1)
    chosen = logp.gather(-1, tokens_BT[:, 1:, None]).squeeze(-1)
    nats = -(logp.exp() * logp).sum(-1) if entropy else None
    pad = torch.nn.functional.pad
    return PolicyTerms(
        logprobs_BT=pad(chosen, [1, 0]),
        entropy_BT=None if nats is None else pad(nats, [1, 0]),
    )


class _ChunkedLogprobs(torch.autograd.Function):
    """Autograd function that computes the logits of a chunk again in the backward pass.

    Saved between the passes are the hidden states and two float32 numbers per token: the log-sum-
    exp of the logits and the entropy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float | Tensor,
        chunks: LogitChunks,
        also: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probs, entropies and sums of squared probabilities, each `[N]`; keep no
        logits.

        `also` says whether to compute entropies, and sums of squares; what is not computed is 0.
        """
        size = len(targets_N)
        logprobs_N = hidden_ND.new_empty(size, dtype=torch.float32)
        lse_N = torch.empty_like(logprobs_N)
        entropy_N, squares_N = torch.zeros_like(logprobs_N), torch.zeros_like(logprobs_N)
        for i in range(0, size, chunks.tokens):
            part = slice(i, i + chunks.tokens)
            logits = linear(hidden_ND[part], weight_VD, bias_V)
            chunk = LogitChunk(logits, targets_N[part], _of(temperature, part), chunks.cap)
            found = chunks.read(chunk, also)
            logprobs_N[part], lse_N[part] = found.logprobs, found.lse
            if found.entropy is not None:
                entropy_N[part] = found.entropy
            if found.squares is not None:
                squares_N[part] = found.squares
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, lse_N, entropy_N)
        ctx.temperature, ctx.chunks = temperature, chunks
        # The gradient of an entropy that is only reported stays None and costs nothing.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(squares_N)
        return logprobs_N, entropy_N, squares_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return gradients of hidden states, weight and bias; recompute each chunk's logits."""
        grad_logprobs_N, grad_entropy_N, _ = grads
        hidden_ND, weight_VD, bias_V, targets_N, lse_N, entropy_N = ctx.saved_tensors
        chunks: LogitChunks = ctx.chunks
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(lse_N)
        grad_hidden_ND = torch.empty_like(hidden_ND)
        # Sums over many chunks would lose bits in bfloat16, so they are kept in float32.
        # A frozen head, as with an adapter, needs no gradient.
        learns = ctx.needs_input_grad[1]
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if learns else None
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for i in range(0, len(targets_N), chunks.tokens):
            part = slice(i, i + chunks.tokens)
            hidden = hidden_ND[part]
            logits = linear(hidden, weight_VD, bias_V)
            grad = chunks.slopes(
                LogitChunk(logits, targets_N[part], _of(ctx.temperature, part), chunks.cap),
                lse_N[part],
                entropy_N[part],
                grad_logprobs_N[part],
                None if grad_entropy_N is None else grad_entropy_N[part],
            )
            grad_hidden_ND[part] = grad @ weight_VD
            if grad_weight_VD is not None:
                grad_weight_VD += grad.T @ hidden
            if grad_bias_V is not None:
                grad_bias_V += grad.sum(0)
        bias = None if grad_bias_V is None else grad_bias_V.to(weight_VD.dtype)
        weight = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, weight, bias, None, None, None, None


def _of(temperature: float | Tensor, part: slice) -> float | Tensor:
    """Return the number, or the column `[n, 1]`, that divides the logits of the tokens in the slice
    `part`."""
    return temperature[part, None] if isinstance(temperature, Tensor) else temperature
