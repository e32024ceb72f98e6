"""Log-probabilities of a vocabulary that is cut over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_adapter.parallel.logprobs import token_logprobs
from tests.convert.spawned import run_ranks

VOCAB, PADDED, ROWS = 13, 16, 10


def example() -> tuple[Tensor, Tensor, Tensor]:
    """Logits [2, 5, PADDED], targets [2, 5], and weights [2, 2, 5] of the two results."""
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 5, PADDED, generator=g) * 3
    targets = torch.randint(0, VOCAB, (2, 5), generator=g)
    return logits, targets, torch.randn(2, 2, 5, generator=g)


EACH = torch.linspace(0.5, 2.0, ROWS).view(2, 5)
"""A temperature for each token."""


def by_hand(temperature: float | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities, entropy, the gradient of their weighted sum, and the sum of the squared
    probabilities, in float64."""
    logits, targets, weights = example()
    wide = logits.double().requires_grad_()
    divisor = EACH.double()[..., None] if temperature is None else temperature
    logprobs = (wide[..., :VOCAB] / divisor).log_softmax(-1)
    chosen = logprobs.gather(-1, targets[..., None])[..., 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    (chosen * weights[0] + entropy * weights[1]).sum().backward()
    assert wide.grad is not None
    squares = logprobs.detach().exp().square().sum(-1)
    return chosen.detach(), entropy.detach(), wide.grad, squares


def on_ranks(temperature: float | None, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    group = torch.distributed.group.WORLD
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    logits, targets, weights = example()
    mine = logits.chunk(ranks, dim=-1)[rank].clone().requires_grad_()
    settings: dict[str, Any] = {"vocab": VOCAB, "group": group, "chunk": chunk}
    divisor = EACH if temperature is None else temperature
    found = token_logprobs(
        mine, targets, temperature=divisor, entropy=True, squares=True, **settings
    )
    alone = token_logprobs(mine, targets, temperature=divisor, **settings)
    assert alone[1:] == (None, None)
    assert torch.equal(alone[0], found[0])
    assert found[1] is not None
    assert found[2] is not None
    (found[0] * weights[0] + found[1] * weights[1]).sum().backward()
    assert mine.grad is not None
    return found[0].detach(), found[1].detach(), mine.grad, found[2]


# On eight ranks the last one has nothing but padding.
@pytest.mark.parametrize(("ranks", "chunk"), [(1, 1024), (2, 3), (8, 4)])
@pytest.mark.parametrize("temperature", [1.0, 0.7, None])
def test_they_are_those_of_the_whole_vocabulary(
    ranks: int, chunk: int, temperature: float | None
) -> None:
    expected = by_hand(temperature)
    answers = run_ranks(on_ranks, ranks, temperature, chunk)
    for logprobs, entropy, _, squares in answers:
        torch.testing.assert_close(logprobs.double(), expected[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy.double(), expected[1], atol=1e-5, rtol=0)
        torch.testing.assert_close(squares.double(), expected[3], atol=1e-6, rtol=0)
    gradient = torch.cat([answer[2] for answer in answers], dim=-1)
    torch.testing.assert_close(gradient.double(), expected[2], atol=1e-5, rtol=0)


def test_a_small_entropy_beside_large_logits_is_not_lost() -> None:
    logits = torch.full((1, 1, VOCAB), 4096.0 - 20)
    logits[..., 3] = 4096.0
    found = token_logprobs(
        logits, torch.tensor([[3]]), vocab=VOCAB, temperature=1.0, chunk=4, entropy=True
    )
    logprobs = logits.double().log_softmax(-1)
    expected = -(logprobs.exp() * logprobs).sum(-1)
    # The entropy is 5.2e-7. The spacing of float32 at 4096 is 5e-4, at 1 it is 1.2e-7.
    assert found[1] is not None
    torch.testing.assert_close(found[1].double(), expected, rtol=0, atol=6e-8)
    torch.testing.assert_close(found[0].double(), logprobs[..., 3], rtol=0, atol=6e-8)
