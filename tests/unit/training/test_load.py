"""Loading models and tokenizers, and what is said when that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    PreTrainedModel,
    Qwen3ForSequenceClassification,
)

from roll.algorithms.logprobs import soft_cap
from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError
from roll.models.load import (
    CRITIC,
    REWARD_MODEL,
    load_causal_lm,
    load_config,
    load_tokenizer,
    load_value_model,
    outline_classifier,
)
from roll.models.parts.head import split_head
from roll.strategy.training.heads import ScoreHead, ValueHead
from roll.strategy.training.token_model import ForwardRequest
from tests.tiny import save_tiny_model, tiny_qwen3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_model_and_tokenizer_load_as_saved(folder: Path) -> None:
    model = load_causal_lm(ModelConfig(path=str(folder), dtype="bfloat16"))
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert load_causal_lm(ModelConfig(path=str(folder)), dtype=torch.float32).dtype == torch.float32
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    assert tokenizer.decode(tokenizer("1+1=2")["input_ids"]) == "1+1=2"


def test_backbone_and_head_give_the_models_logits(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    backbone, head = split_head(model)
    tokens = torch.tensor([[5, 6, 7]])
    hidden = backbone(input_ids=tokens).last_hidden_state
    assert torch.equal(hidden @ head.weight_VD.T, model(tokens).logits)
    assert head.bias_V is None
    assert head.divisor == 1


@pytest.mark.parametrize("head", [ScoreHead(), ValueHead()], ids=["score", "value"])
def test_scores_of_a_model_in_16_bits_are_not_rounded_to_16_bits(head: Any, folder: Path) -> None:
    """A reward model's scores near 10 would otherwise be multiples of 1/16, and siblings equal."""
    made = head.load(ModelConfig(path=str(folder)), torch.bfloat16)
    states_ND = torch.randn(8, 64).to(torch.bfloat16)
    layer = made.new_head
    with torch.no_grad():
        layer.weight.normal_()
        found = made.head(states_ND, torch.zeros(8), ForwardRequest(torch.zeros(8), [8])).values
    assert layer.weight.dtype == torch.bfloat16
    exact = states_ND.double() @ layer.weight.double().T
    torch.testing.assert_close(found.double(), exact[:, 0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_critic_of_a_reward_model_begins_with_a_head_of_zeros(
    tmp_path: Path, deferred: bool
) -> None:
    """Its file has a weight of that name already, and no bias."""
    config = tiny_qwen3().config
    config.num_labels = 1
    scorer = Qwen3ForSequenceClassification(config)
    torch.nn.init.normal_(scorer.score.weight)
    scorer.save_pretrained(tmp_path)
    loaded: Any = load_value_model(ModelConfig(path=str(tmp_path)), deferred=deferred)
    for parameter in loaded.score.parameters():
        assert torch.equal(parameter.detach(), torch.zeros(parameter.shape))
    assert [name for name, _ in loaded.score.named_parameters()] == ["weight", "bias"]


def test_an_outline_is_of_the_classifier_that_would_be_loaded(folder: Path) -> None:
    model = ModelConfig(path=str(folder))
    critic, scorer = (outline_classifier(model, kind) for kind in (CRITIC, REWARD_MODEL))
    assert (critic.head, scorer.head) == (("score.weight", "score.bias"), ("score.weight",))
    assert not critic.stored
    assert critic.config.architectures == ["Qwen3ForTokenClassification"]
    assert (scorer.config.num_labels, scorer.config.architectures) == (
        1,
        ["Qwen3ForSequenceClassification"],
    )


def test_missing_folder_is_named_with_the_command_that_makes_it() -> None:
    config = ModelConfig(path="examples/nothing/model", made_by="python make_model.py")
    for load in (load_causal_lm, load_tokenizer):
        with pytest.raises(ConfigError, match=r"nothing/model' does not exist.*make_model"):
            load(config)
    with pytest.raises(ConfigError, match="'/nothing' does not exist"):
        load_causal_lm(ModelConfig(path="/nothing"))


def test_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    for load in (load_causal_lm, load_tokenizer):
        with pytest.raises(ConfigError, match="is not a Hugging Face checkpoint"):
            load(ModelConfig(path=str(tmp_path)))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        load_causal_lm(ModelConfig(path=str(tmp_path / "file")))


def test_a_model_without_a_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(
        ConfigError, match=r"has no tokenizer: none of tokenizer\*, vocab\*, .* is in"
    ):
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    load_tokenizer(ModelConfig(path=str(tmp_path), tokenizer=str(folder)))


def test_hub_name_that_cannot_be_fetched_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model 'no-such-org/no-such-model'.*hub"):
        load_causal_lm(ModelConfig(path="no-such-org/no-such-model"))


def test_checkpoint_that_lacks_a_tensor_is_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 tensors, e.g. 'model.norm.weight'"):
        load_causal_lm(ModelConfig(path=str(tmp_path)))


def test_dropout_is_off_in_every_form(tmp_path: Path) -> None:
    GPT2Config(n_layer=1, n_embd=8, n_head=1).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_pdrop"] == 0.1
    config = load_config(ModelConfig(path=str(tmp_path)))
    assert config.attn_pdrop == config.resid_pdrop == config.embd_pdrop == 0.0


def gemma(**values: Any) -> Gemma2ForCausalLM:
    config = Gemma2Config(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8, **values,
    )  # fmt: skip
    return Gemma2ForCausalLM(config)


@pytest.mark.parametrize("cap", [1.0, 0.3, None])
def test_a_bound_of_logits_is_a_part_of_the_head(cap: float | None) -> None:
    model = gemma(final_logit_softcapping=cap)
    model.lm_head.weight.data.mul_(30)
    backbone, head = split_head(model)
    tokens = torch.tensor([[5, 6, 7]])
    logits = backbone(input_ids=tokens).last_hidden_state @ head.weight_VD.T
    assert head.cap == cap
    torch.testing.assert_close(soft_cap(logits, head.cap), model(tokens).logits)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lm_head_multiplier": 0.7}, "lm_head_multiplier: 0.7"),
        ({"final_logit_softcapping": -1.0}, "-1.0; expected above 0"),
    ],
)
def test_bent_logits_are_refused_instead_of_ignored(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        split_head(gemma(**values))


def tiny(model_type: str, **values: Any) -> PreTrainedModel:
    sizes = {
        "vocab_size": 16, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **(sizes | values))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("hyperclovax", {"logits_scaling": 0.25}),
        ("granite", {"logits_scaling": 0.25}),
        ("cohere", {"logit_scale": 0.25}),
        ("minicpm3", {"dim_model_base": 8}),
        ("xlstm", {"num_heads": 2, "output_logit_soft_cap": 0.01, "mode": "inference"}),
    ],
)
def test_a_head_that_scales_gives_the_models_logits(
    model_type: str, values: dict[str, Any]
) -> None:
    model, tokens = tiny(model_type, **values), torch.tensor([[5, 6, 7]])
    backbone, head = split_head(model)
    states = backbone(input_ids=tokens, use_cache=False).last_hidden_state
    logits = soft_cap(states @ head.weight_VD.T, head.cap) / head.divisor
    assert (head.cap, head.divisor) != (None, 1.0)
    torch.testing.assert_close(logits, model(tokens, use_cache=False).logits)


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("bert", r"'cls.predictions.*beside its backbone and its output head"),
        ("modernbert-decoder", r"'lm_head.dense.weight' beside its backbone and its output head"),
        ("inkling_text", r"logits_mup_width_multiplier: 24"),
    ],
)
def test_a_head_of_more_than_a_product_is_refused(model_type: str, said: str) -> None:
    values = {"head_dim": 16, "num_experts": 2} if model_type == "inkling_text" else {}
    with pytest.raises(ConfigError, match=said):
        split_head(tiny(model_type, **values))


def test_a_bound_of_attention_is_refused_where_the_kernel_would_leave_it_out(
    tmp_path: Path,
) -> None:
    tokens, logits = torch.tensor([[5, 6, 7]]), {}
    model = gemma(attn_logit_softcapping=0.01, initializer_range=1.0)
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        logits[attention] = model(tokens).logits
    assert (logits["eager"] - logits["sdpa"]).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping\); set it to eager"):
        load_causal_lm(ModelConfig(path=str(tmp_path)))
    loaded = load_causal_lm(ModelConfig(path=str(tmp_path), attention="eager"))
    torch.testing.assert_close(loaded(tokens).logits, logits["eager"])
