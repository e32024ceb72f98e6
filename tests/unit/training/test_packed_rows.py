"""Rows packed into one give what padded rows give: attention stays inside each sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from roll.core.batches import TokenBatch
from roll.core.errors import ConfigError
from roll.models.packing import enable
from roll.strategy.training import microbatch
from roll.strategy.training.forward import token_terms
from roll.strategy.training.heads import PolicyModel
from tests.tiny import tiny_qwen3

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def sliding() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4)).eval()


def sliding_qwen2_moe() -> PreTrainedModel:
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    sizes = {**SMALL, **experts, "shared_expert_intermediate_size": 16, "initializer_range": 0.5}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, **windows)).eval()


def sliding_phimoe() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {**SMALL, "num_local_experts": 4, "sliding_window": 4, "initializer_range": 0.5}
    return PhimoeForCausalLM(PhimoeConfig(**sizes, bos_token_id=1, eos_token_id=2)).eval()


def batch(lengths: list[int], seed: int = 0) -> TokenBatch:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 60, (len(lengths), max(lengths)), generator=g)
    return TokenBatch(tokens=tokens, lengths=torch.tensor(lengths))


def terms_and_gradients(
    model: PreTrainedModel, rows: TokenBatch, *, packed: bool
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    policy = PolicyModel(model, temperature=0.9, chunk_tokens=16)
    if packed:
        policy.pack_rows()
    needed = torch.arange(rows.tokens.shape[1]) < rows.lengths[:, None]
    policy.zero_grad()
    terms = token_terms(policy, rows, needed, CPU, entropy=True)
    assert terms.entropy_BT is not None
    (terms.logprobs_BT * needed).pow(2).sum().backward()
    grads = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    return terms.logprobs_BT.detach(), terms.entropy_BT.detach(), grads


@pytest.mark.parametrize("make", [tiny_qwen3, sliding])
@given(
    runs=st.lists(st.tuples(st.integers(1, 11), st.integers(1, 3)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
@settings(max_examples=15)
def test_packed_rows_have_the_log_probs_and_gradients_of_padded_ones(
    make: Any, runs: list[tuple[int, int]], seed: int
) -> None:
    torch.manual_seed(seed)
    rows = batch([length for length, count in runs for _ in range(count)], seed)
    model = make()
    padded = terms_and_gradients(model, rows, packed=False)
    packed = terms_and_gradients(model, rows, packed=True)
    torch.testing.assert_close(packed[0], padded[0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(packed[1], padded[1], atol=1e-5, rtol=1e-6)
    largest = max(grad.abs().max().item() for grad in padded[2])
    for one, other in zip(packed[2], padded[2], strict=True):
        # What only looks at itself has gradients of rounding alone.
        scale = max(other.abs().max().item(), 1e-2 * largest)
        torch.testing.assert_close(one, other, atol=1e-5 * scale, rtol=1e-4)


@pytest.mark.parametrize("make", [sliding_qwen2_moe, sliding_phimoe])
def test_packed_rows_have_the_window_that_a_model_leaves_to_its_mask(make: Any) -> None:
    rows, policies = batch([11, 3, 9]), [PolicyModel(make(), temperature=1.0, chunk_tokens=16)]
    policies.append(PolicyModel(make(), temperature=1.0, chunk_tokens=16))
    policies[1].pack_rows()
    needed = torch.arange(rows.tokens.shape[1]) < rows.lengths[:, None]
    padded, packed = (
        token_terms(policy, rows, needed, CPU, entropy=False).logprobs_BT.detach() * needed
        for policy in policies
    )
    torch.testing.assert_close(packed, padded, atol=1e-4, rtol=1e-5)


def test_a_token_of_one_sequence_changes_nothing_in_another() -> None:
    rows = batch([5, 7, 3])
    model = tiny_qwen3()
    before, _, _ = terms_and_gradients(model, rows, packed=True)
    rows.tokens[1] = (rows.tokens[1] + 1) % 60
    after, _, _ = terms_and_gradients(model, rows, packed=True)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(before[1], after[1])


def test_models_that_would_mix_sequences_are_refused() -> None:
    linear = Qwen3NextForCausalLM(
        Qwen3NextConfig(**SMALL, linear_num_value_heads=2, linear_num_key_heads=2)
    )
    with pytest.raises(ConfigError, match=r"linear_attention.*leave out `packing`"):
        enable(linear)
    sinks = GptOssForCausalLM(GptOssConfig(**SMALL, head_dim=8, num_local_experts=2))
    policy = PolicyModel(sinks, temperature=1.0, chunk_tokens=16)
    policy.pack_rows()
    with pytest.raises(ConfigError, match="sinks"):
        token_terms(policy, batch([3, 4]), torch.ones(2, 4).bool(), CPU, entropy=False)


def test_a_model_that_keeps_the_borders_of_sequences_to_itself_is_refused() -> None:
    """Without them its attention would see the row as one sequence."""
    policy = PolicyModel(
        NemotronForCausalLM(NemotronConfig(**SMALL)), temperature=1.0, chunk_tokens=16
    )
    policy.pack_rows()
    with pytest.raises(ConfigError, match=r"NemotronAttention does not hand on.*row_lengths"):
        token_terms(policy, batch([3, 4]), torch.ones(2, 4).bool(), CPU, entropy=False)


@given(
    st.lists(st.integers(1, 50), min_size=0, max_size=30).filter(lambda x: len(x) % 2 == 0),
    st.integers(1, 200),
    st.booleans(),
)
def test_plans_of_pairs_keep_pairs_and_budget(
    lengths: list[int], budget: int, packed: bool
) -> None:
    parts = microbatch.plan(lengths, budget, unit=2, packed=packed)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        assert all(row // 2 in {r // 2 for r in part} and row ^ 1 in part for row in part)
        inside = [lengths[row] for row in part]
        size = sum(inside) if packed else len(inside) * max(inside)
        assert size <= budget or len(part) == 2
