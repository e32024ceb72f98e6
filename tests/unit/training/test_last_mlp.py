"""Only the tokens that are read pass the last feed-forward part, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from roll.algorithms import logprobs
from roll.models.parts import last_mlp
from roll.strategy.training.heads import PolicyModel
from roll.strategy.training.token_model import ForwardRequest
from tests.tiny import tiny_qwen3_moe

LENGTHS = [9, 7]
READ = [[4, 8], [2, 3]]
TEXT = sorted(kind for kind in last_mlp.KNOWN if not kind.endswith("_vl_text"))
"""Those that are whole models; `test_tower.py` has the others."""


def tiny(kind: str) -> PreTrainedModel:
    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        final_logit_softcapping=None,
        attn_logit_softcapping=None,
        residual_dropout=0.0,
        attention_dropout=0.0,
    )
    config.logits_scaling = 1.0
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    assert isinstance(model, PreTrainedModel)
    # Large enough that what is left out would show.
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


def tokens() -> Tensor:
    return torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))


def needed() -> Tensor:
    mask = torch.zeros(2, 9, dtype=torch.bool)
    for row, columns in enumerate(READ):
        mask[row, columns] = True
    return mask


def of_whole_logits(model: PreTrainedModel) -> tuple[Tensor, list[Tensor]]:
    """Log-probs of what is read, and the gradients of the sum of their squares."""
    model.zero_grad()
    found = logprobs.from_logits(model(tokens()).logits, tokens(), temperature=1.0)
    read_N = found.logprobs_BT[needed()]
    read_N.square().sum().backward()
    return read_N.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def of_policy(model: PreTrainedModel, *, packed: bool) -> tuple[Tensor, list[Tensor], set[int]]:
    """The same, and how many tokens the last down projection saw."""
    policy = PolicyModel(model, temperature=1.0, chunk_tokens=16)
    if packed:
        policy.pack_rows()
    seen = set()

    def look(module: nn.Module, inputs: Any) -> None:
        seen.add(inputs[0].flatten(0, -2).shape[0])

    model.zero_grad()
    handle = model.get_decoder().layers[-1].mlp.down_proj.register_forward_pre_hook(look)
    main_BT = policy(tokens(), ForwardRequest(logprobs.positions(needed()), LENGTHS))[0]
    read_N = main_BT[needed()]
    read_N.square().sum().backward()
    handle.remove()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return read_N.detach(), grads, seen


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", TEXT)
def test_log_probs_and_gradients_are_those_of_whole_logits(kind: str, checkpointed: bool) -> None:
    model = tiny(kind)
    expected, gradients = of_whole_logits(model)
    scale = max(float(gradient.abs().max()) for gradient in gradients)
    if checkpointed:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for packed in (False, True):
        found, grads, seen = of_policy(model, packed=packed)
        assert seen == {4}
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
        for mine, theirs in zip(grads, gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * scale)


def test_a_model_that_was_wrapped_gives_what_it_gave_before() -> None:
    model = tiny("qwen3")
    before = model(tokens()).logits
    of_policy(model, packed=False)
    assert torch.equal(model(tokens()).logits, before)


def test_where_nearly_all_tokens_are_read_all_are_computed() -> None:
    model = tiny("qwen3")
    policy = PolicyModel(model, temperature=1.0, chunk_tokens=16)
    assert policy.last_mlp is not None
    assert policy.last_mlp.arguments(torch.arange(8), 9) == {}
    assert policy.last_mlp.arguments(torch.arange(0), 9) == {}
    assert list(policy.last_mlp.arguments(torch.arange(4), 9))


def test_experts_get_all_tokens() -> None:
    """Their balance is counted over all of them."""
    assert last_mlp.find(tiny_qwen3_moe()) is None
