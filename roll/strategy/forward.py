"""The forward pass that every PyTorch backend shares: token ids in, log-probs of tokens out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.algorithms import logprobs
from roll.algorithms.api import PolicyTerms
from roll.core.batches import TokenBatch
from roll.core.errors import ConfigError
from roll.models.load import split_head
from roll.strategy import microbatch


class PolicyModel(nn.Module):
    """A causal LM whose forward pass ends in log-probs instead of logits.

    Rows are right-padded and attention is causal, so no real token sees padding and no mask is
    needed. Named parameters are those of the Hugging Face model behind the prefix `model.`.
    """

    def __init__(self, model: PreTrainedModel, *, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self._chunk_tokens = chunk_tokens
        # In a tuple, so that the parts are not registered a second time under other names.
        self._parts = split_head(model)
        if temperature <= 0:
            raise ConfigError(
                f"temperature {temperature} has no log-probs (greedy); set it above 0 to train"
            )
        self._temperature = temperature * self._parts[1].divisor

    def forward(
        self, tokens_BT: Tensor, positions_N: Tensor, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropy, float32 `[B, T]`; a tuple, in which FSDP finds the tensors."""
        backbone, head = self._parts
        hidden_BTD = backbone(input_ids=tokens_BT, use_cache=False).last_hidden_state
        terms = logprobs.from_hidden(
            hidden_BTD,
            head.weight_VD,
            head.bias_V,
            tokens_BT,
            positions_N,
            temperature=self._temperature,
            chunk_tokens=self._chunk_tokens,
            entropy=entropy,
        )
        return terms.logprobs_BT, terms.entropy_BT


def policy_terms(
    policy: PolicyModel, batch: TokenBatch, needed_BT: Tensor, device: torch.device, entropy: bool
) -> PolicyTerms:
    """Terms of the needed tokens of one micro-batch, on `device`; zero at the others."""
    positions_N = logprobs.positions(needed_BT).to(device)
    logprobs_BT, entropy_BT = policy(batch.tokens.to(device), positions_N, entropy)
    return PolicyTerms(logprobs_BT=logprobs_BT, entropy_BT=entropy_BT)


def empty_pass(policy: PolicyModel, device: torch.device) -> Tensor:
    """A pass over nothing, as a loss of zero: a rank without rows left still joins collectives."""
    tokens_BT = torch.zeros(1, 2, dtype=torch.long, device=device)
    logprobs_BT, _ = policy(tokens_BT, tokens_BT.new_empty(0), False)
    assert isinstance(logprobs_BT, Tensor)
    return logprobs_BT.sum()


def score(
    policy: PolicyModel,
    batch: TokenBatch,
    *,
    device: torch.device,
    max_tokens: int,
    entropy: bool,
    agree: Callable[[int], int],
) -> PolicyTerms:
    """Log-probs and entropy of all real tokens, float32 `[B, T]` on the CPU, rows in order.

    Args:
        agree: the number of passes, given this rank's own; the same on every rank.
    """
    out_BT = torch.zeros(batch.tokens.shape, dtype=torch.float32)
    entropy_BT = torch.zeros_like(out_BT) if entropy else None
    parts = microbatch.plan(batch.lengths.tolist(), max_tokens)
    passes = agree(len(parts))
    with torch.no_grad():
        for rows in parts:
            micro = microbatch.take(batch, rows)
            width = micro.tokens.shape[1]
            needed_BT = torch.arange(width) < micro.lengths[:, None]
            terms = policy_terms(policy, micro, needed_BT, device, entropy)
            out_BT[rows, :width] = terms.logprobs_BT.cpu()
            if entropy_BT is not None and terms.entropy_BT is not None:
                entropy_BT[rows, :width] = terms.entropy_BT.cpu()
        for _ in range(passes - len(parts)):
            empty_pass(policy, device)
    return PolicyTerms(logprobs_BT=out_BT, entropy_BT=entropy_BT)
