"""Rotary embeddings that depend on how long rows are: no row's numbers depend on another row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)

from roll.core.batches import TokenBatch
from roll.core.errors import ConfigError
from roll.models.kernels.rotary import kinds_by_length, kinds_in_file
from roll.strategy.training.forward import score, token_terms
from roll.strategy.training.heads import PolicyModel
from roll.strategy.training.microbatch import plan_of

ORIGINAL = 16
SIZES: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


def model_of(rope: dict[str, Any], *, packs: bool) -> PolicyModel:
    torch.manual_seed(0)
    rope = {**rope, "rope_theta": 10_000.0, "original_max_position_embeddings": ORIGINAL}
    if rope["rope_type"] == "longrope":
        sizes = {**SIZES, "original_max_position_embeddings": ORIGINAL}
        made: PreTrainedModel = Phi3ForCausalLM(Phi3Config(**sizes, rope_parameters=rope))
    else:
        sizes = {**SIZES, "max_position_embeddings": ORIGINAL}
        made = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope))
    model = PolicyModel(made.eval(), temperature=1.0, chunk_tokens=64)
    if packs:
        model.pack_rows()
    return model


def logprobs(model: PolicyModel, *lengths: int) -> torch.Tensor:
    """Of the tokens of the last row."""
    lengths_B = torch.tensor(lengths)
    tokens_BT = torch.arange(max(lengths)).remainder(29).expand(len(lengths), -1).clone()
    needed_BT = torch.arange(max(lengths)) < lengths_B[:, None]
    batch = TokenBatch(tokens=tokens_BT, lengths=lengths_B)
    with torch.no_grad():
        terms = token_terms(model, batch, needed_BT, torch.device("cpu"), entropy=False)
    return terms.logprobs_BT[-1, : lengths[-1]]


@pytest.mark.parametrize("packs", [False, True])
def test_rows_on_both_sides_of_the_original_length_are_refused_together(packs: bool) -> None:
    model = model_of(LONGROPE, packs=packs)
    for rows in ((16, 10), (30, 20)):
        torch.testing.assert_close(logprobs(model, *rows), logprobs(model, rows[-1]))
    short, long = logprobs(model, 10), logprobs(model, 30)[:10]
    assert (short - long).abs().max() > 1e-3, "the lengths make no difference here"
    with pytest.raises(
        ConfigError, match=r"type longrope, which change above 16 tokens .* 10 to 30"
    ):
        logprobs(model, 30, 10)


@pytest.mark.parametrize("packs", [False, True])
def test_a_batch_is_scored_as_its_rows_are_alone(packs: bool) -> None:
    model, lengths = model_of(LONGROPE, packs=packs), [30, 10, 16, 17, 2, 30]
    tokens_BT = torch.arange(30).remainder(29).expand(len(lengths), -1).clone()
    batch = TokenBatch(tokens=tokens_BT, lengths=torch.tensor(lengths))

    def scored(rows: TokenBatch) -> torch.Tensor:
        found = score(
            model,
            rows,
            device=torch.device("cpu"),
            max_tokens=1000,
            entropy=False,
            agree=lambda count: count,
        )
        return found.logprobs_BT

    together_BT = scored(batch)
    for row, length in enumerate(lengths):
        alone_T = scored(batch.select([row]).trim(length))[0]
        torch.testing.assert_close(together_BT[row, :length], alone_T)


@pytest.mark.parametrize(("unit", "parts"), [(1, [[0, 2], [1, 3]]), (2, [[0, 1, 2, 3]])])
def test_rows_that_stay_together_are_not_separated(unit: int, parts: list[list[int]]) -> None:
    class Units(TokenBatch):
        pass

    Units.unit = unit
    lengths = torch.tensor([17, 8, 16, 9])
    batch = Units(tokens=torch.zeros(4, 17, dtype=torch.long), lengths=lengths)
    found = plan_of(batch, 1000, packed=True, border=10)
    assert [sorted(part) for part in found] == parts


def test_a_file_tells_the_same_types_in_any_form() -> None:
    original = {"original_max_position_embeddings": 16}
    older = {"rope_scaling": {"type": "su", "long_factor": []}, **original}
    newer = {"text_config": {"rope_parameters": {"full": {"rope_type": "longrope", **original}}}}
    assert kinds_in_file(older) == kinds_in_file(newer) == {"longrope": 16}
    dynamic = {"rope_scaling": {"rope_type": "dynamic"}, "max_position_embeddings": 32}
    assert kinds_in_file(dynamic) == {"dynamic": 32}
    assert kinds_in_file({"rope_scaling": None}) == kinds_in_file({}) == {}
    model = model_of(LONGROPE, packs=False).model
    assert kinds_in_file(model.config.to_dict()) == kinds_by_length(model.config)


def test_rows_above_the_length_of_the_model_are_refused_where_later_passes_depend_on_them() -> None:
    model = model_of(DYNAMIC, packs=False)
    logprobs(model, 16, 10)
    with pytest.raises(ConfigError, match="type dynamic, which change above 16 tokens"):
        logprobs(model, 20)
