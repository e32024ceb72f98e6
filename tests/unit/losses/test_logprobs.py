"""Chunked log-probs and entropy against whole logits and plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from roll.algorithms import logprobs
from roll.algorithms.logprobs import LogitChunks, from_logits, positions
from roll.algorithms.loss_interface import PolicyTerms

B, T, D, V = 3, 7, 8, 11


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, D, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype)
    bias = torch.randn(V, generator=g, dtype=torch.float64).to(dtype)
    tokens = torch.randint(0, V, (B, T), generator=g)
    return hidden, weight, bias, tokens


def from_hidden(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, at: Tensor, **options: Any
) -> PolicyTerms:
    """At their places, `[B, T]`."""
    options["chunks"] = LogitChunks(options.pop("chunk_tokens"), options.pop("cap", None))
    logprobs_N, entropy_N, squares_N = logprobs.from_hidden(
        hidden.flatten(0, 1)[at - 1], weight, bias, tokens.flatten()[at], **options
    )
    empty = torch.zeros(tokens.shape)
    return PolicyTerms(
        empty.put(at, logprobs_N),
        None if entropy_N is None else empty.put(at, entropy_N),
        squares_BT=None if squares_N is None else empty.put(at, squares_N),
    )


def by_hand(logits: Tensor, tokens: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Token by token, straight from the definition; a temperature for all, or for each row."""
    of_B = torch.as_tensor(temperature).expand(B)
    logp = torch.zeros(B, T, dtype=logits.dtype)
    entropy = torch.zeros(B, T, dtype=logits.dtype)
    for b in range(B):
        for t in range(1, T):
            p = torch.softmax(logits[b, t - 1] / of_B[b], -1)
            logp[b, t] = p[tokens[b, t]].log()
            entropy[b, t] = -(p * p.log()).sum()
    return logp, entropy


@pytest.mark.parametrize("learned", ["logprobs", "entropy", "both"])
@settings(max_examples=12)
@given(
    st.integers(1, 30),
    st.floats(0.3, 2.0),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 0.8, 3.0]),
)
def test_any_chunk_size_gives_values_and_gradients_of_plain_autograd(
    learned: str,
    chunk: int,
    one: float,
    with_bias: bool,
    frozen: bool,
    by_row: bool,
    cap: float | None,
) -> None:
    own_B = one * torch.linspace(0.5, 2.0, B, dtype=torch.float64)
    hidden, weight, bias, tokens = inputs()
    g = torch.Generator().manual_seed(1)
    up_logp, up_entropy = torch.randn(2, B, T, generator=g, dtype=torch.float64)
    leaves = [hidden, *([] if frozen else [weight]), *([bias] if with_bias else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    bias_V = bias if with_bias else None
    logits = torch.nn.functional.linear(hidden, weight, bias_V)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    want = by_hand(logits, tokens, own_B if by_row else one)
    everywhere = positions(torch.ones(B, T, dtype=torch.bool))
    got = from_hidden(
        hidden, weight, bias_V, tokens, everywhere,
        temperature=own_B[everywhere // T] if by_row else one, chunk_tokens=chunk, entropy=True,
        cap=cap,
    )  # fmt: skip
    assert got.entropy_BT is not None

    def gradients(logp: Tensor, entropy: Tensor) -> tuple[Tensor, ...]:
        """Of what is learned; the other result has no gradient at all."""
        parts = {"logprobs": logp * up_logp, "entropy": entropy * up_entropy}
        used = [part for name, part in parts.items() if learned in (name, "both")]
        return torch.autograd.grad(torch.stack(used).sum(), leaves)

    want_grads, grads = gradients(*want), gradients(got.logprobs_BT, got.entropy_BT)
    torch.testing.assert_close(got.logprobs_BT.double(), want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.entropy_BT.double(), want[1], atol=1e-5, rtol=1e-5)
    for grad, want_grad in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(grad, want_grad, atol=1e-4, rtol=1e-4)


def test_whole_logits_give_the_same_numbers_by_definition() -> None:
    hidden, weight, _, tokens = inputs(torch.float32)
    logits = hidden @ weight.T
    want = by_hand(logits.double(), tokens, 0.7)
    got = from_logits(logits, tokens, temperature=0.7, entropy=True)
    assert got.entropy_BT is not None
    torch.testing.assert_close(got.logprobs_BT.double(), want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.entropy_BT.double(), want[1], atol=1e-5, rtol=1e-5)
    assert from_logits(logits, tokens, temperature=0.7).entropy_BT is None


def test_tokens_not_asked_for_and_position_zero_are_zero() -> None:
    hidden, weight, _, tokens = inputs(torch.float32)
    needed = torch.rand(B, T) < 0.5
    needed[0, 0] = True
    whole = from_logits(hidden @ weight.T, tokens, temperature=1.0).logprobs_BT
    needed_from_1 = needed.clone()
    needed_from_1[:, 0] = False
    got = from_hidden(
        hidden, weight, None, tokens, positions(needed), temperature=1.0, chunk_tokens=4
    )
    torch.testing.assert_close(got.logprobs_BT, whole * needed_from_1)
    assert got.entropy_BT is None


def test_asking_for_no_token_still_has_a_gradient_of_zero() -> None:
    hidden, weight, _, tokens = inputs(torch.float32)
    hidden.requires_grad_()
    none = positions(torch.zeros(B, T, dtype=torch.bool))
    got = from_hidden(hidden, weight, None, tokens, none, temperature=1.0, chunk_tokens=4)
    got.logprobs_BT.sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_bf16_inputs_get_a_float32_softmax() -> None:
    hidden, weight, _, tokens = inputs(torch.bfloat16)
    everywhere = positions(torch.ones(B, T, dtype=torch.bool))
    got = from_hidden(hidden, weight, None, tokens, everywhere, temperature=1.0, chunk_tokens=5)
    logits = torch.nn.functional.linear(hidden, weight)
    want, _ = by_hand(logits.double(), tokens, 1.0)
    assert got.logprobs_BT.dtype == torch.float32
    torch.testing.assert_close(got.logprobs_BT.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("entropy", [False, True])
def test_squared_probabilities_are_summed_and_change_no_gradient(entropy: bool) -> None:
    hidden, weight, _, tokens = inputs(torch.float32)
    hidden.requires_grad_()
    everywhere = positions(torch.ones(B, T, dtype=torch.bool))
    plain, got = (
        from_hidden(
            hidden, weight, None, tokens, everywhere,
            temperature=0.7, chunk_tokens=4, entropy=entropy, squares=squares,
        )
        for squares in (False, True)
    )  # fmt: skip
    probs = ((hidden @ weight.T).double() / 0.7).softmax(-1)
    want = torch.zeros(B, T, dtype=torch.float64)
    want[:, 1:] = probs[:, :-1].square().sum(-1)
    assert plain.squares_BT is None
    assert got.squares_BT is not None
    torch.testing.assert_close(got.squares_BT.double(), want, atol=1e-6, rtol=1e-5)
    assert not got.squares_BT.requires_grad
    for terms in (plain, got):
        assert (terms.entropy_BT is not None) is entropy
    pair = [torch.autograd.grad(_total(terms), hidden)[0] for terms in (plain, got)]
    assert torch.equal(*pair)


def _total(terms: PolicyTerms) -> Tensor:
    return terms.logprobs_BT.sum() + (0 if terms.entropy_BT is None else terms.entropy_BT.sum())


class _LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.numel())
        return out


@pytest.mark.parametrize("entropy", [False, True])
def test_full_logits_never_exist_forward_or_backward(entropy: bool) -> None:
    rows, length, size, vocab, chunk = 4, 32, 4, 500, 8
    hidden = torch.randn(rows, length, size, requires_grad=True)
    weight = torch.randn(vocab, size, requires_grad=True)
    tokens = torch.randint(0, vocab, (rows, length))
    everywhere = positions(torch.ones(rows, length, dtype=torch.bool))
    with _LargestTensor() as seen:
        got = from_hidden(
            hidden, weight, None, tokens, everywhere,
            temperature=1.0, chunk_tokens=chunk, entropy=entropy,
        )  # fmt: skip
        got.logprobs_BT.sum().backward()
    assert seen.largest == chunk * vocab
