"""A pass in training gives the numbers of one that scores, whatever the family draws by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from roll.config.sections.model import LoraConfig, ModelConfig
from roll.models import lora
from roll.models.load import load_config
from roll.strategy.training.heads import PolicyHead, PolicyModel
from roll.strategy.training.token_model import ForwardRequest
from tests.families import FAMILIES, SIZES, WITH_VISION, config_of, make, save

TOKENS = torch.randint(4, SIZES["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(0))
ASKED = ForwardRequest(torch.tensor([3, 4, 11, 14, 20, 23]), lengths=[12, 12])


def load(folder: Path, name: str) -> PolicyModel:
    return PolicyHead(1.0, 1024).load(config_of(save(folder, name), name), torch.float32)


def logprobs(model: PolicyModel) -> Tensor:
    with torch.no_grad():
        return model(TOKENS, ASKED)[0]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_training_computes_what_scoring_does_and_twice_the_same(tmp_path: Path, name: str) -> None:
    model = load(tmp_path, name)
    scored = logprobs(model.eval())
    model.train()
    assert torch.equal(logprobs(model), logprobs(model))
    assert (logprobs(model) - scored).abs().max() < 1e-6
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    trained = model(TOKENS, ASKED)[0]
    assert (trained.detach() - scored).abs().max() < 1e-6
    trained.sum().backward()


@pytest.mark.parametrize("name", ["phimoe", "mixtral_jitter"])
def test_the_families_that_draw_would_not_by_themselves(name: str) -> None:
    """So the gate above has something to keep out."""
    model = make(name).train()
    assert not torch.equal(model(TOKENS).logits, model(TOKENS).logits)


def test_an_adapter_still_drops_and_layers_are_still_computed_again(tmp_path: Path) -> None:
    model = load(tmp_path, "llama")
    lora.insert_adapter(model.model, LoraConfig(rank=2, dropout=0.5))
    for _, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    assert not torch.equal(logprobs(model), logprobs(model))
    layer = model.model.get_decoder().layers[0]
    assert layer.training
    calls = []
    layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model(TOKENS, ASKED)[0].sum().backward()
    assert len(calls) == 2
    assert torch.equal(logprobs(model.eval()), logprobs(model))


@pytest.mark.parametrize("name", sorted(WITH_VISION))
def test_dropout_is_off_in_every_part_of_a_nested_config(tmp_path: Path, name: str) -> None:
    config = load_config(ModelConfig(path=str(save(tmp_path, name))))
    assert config.get_text_config().attention_dropout == 0
