"""Settings of sampling that engines or the trainer cannot follow are refused, with what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from roll.config import load_config
from roll.config.evaluation import ChatConfig
from roll.config.loading.question_sets import load_chat
from roll.config.rlvr_base import RlvrBase
from roll.config.sections.domain import DomainSampling
from roll.config.sections.sampling import RESHAPING, SamplingConfig
from roll.core.errors import ConfigError, EngineError
from roll.core.types import GenerateRequest, SamplingParams
from roll.models.vocabulary import check_token_ids
from roll.strategy.sglang.requests import generate_input
from tests.pipelines.test_agentic import task
from tests.rlvr_file import error, loaded
from tests.tiny import char_tokenizer

SGLANG = "actor_infer.strategy={kind: sglang}"


def chat(engine: str, *overrides: str) -> ChatConfig:
    infer = {"pool": "all", "strategy": {"kind": engine}}
    return load_chat(
        {"pools": {"all": "0"}, "model": {"path": "m"}, "actor_infer": infer}, overrides
    )


def test_stop_tokens_of_a_tag_stand_in_place_of_those_of_the_run(run_file: Path) -> None:
    config = loaded(
        run_file, "sampling.stop_token_ids=[5, 6]", "domains.sort.sampling.stop_token_ids=[7]"
    )
    assert config.sampling.stop_token_ids == (5, 6)
    assert config.domain_sampling["sort"].stop_token_ids == (7,)
    assert "greater than or equal to 0" in error(run_file, "sampling.stop_token_ids=[-1]")


@pytest.mark.parametrize("key", ["sampling", "domains.sort.sampling", "validation.sampling"])
def test_stop_tokens_that_sglang_would_ignore_are_refused_once(run_file: Path, key: str) -> None:
    both = [f"{key}.stop_token_ids=[5]", f"{key}.ignore_eos=true"]
    loaded(run_file, *both)
    told = error(run_file, SGLANG, *both, "domains.sort.sampling.max_new_tokens=9")
    assert f"{key}.stop_token_ids: with actor_infer.strategy.kind = sglang" in told
    assert told.count("stop_token_ids: with") == 1
    chat("vllm", "sampling.stop_token_ids=[5]", "sampling.ignore_eos=true")
    with pytest.raises(ConfigError, match=r"sampling.stop_token_ids: with actor_infer"):
        chat("sglang", "sampling.stop_token_ids=[5]", "sampling.ignore_eos=true")


def test_a_token_that_does_not_exist_is_told_with_its_key() -> None:
    tokenizer = char_tokenizer()
    last = max(tokenizer.get_vocab().values())
    check_token_ids({"sampling": SamplingConfig(stop_token_ids=(0, last))}, tokenizer)
    wrong = SamplingConfig(stop_token_ids=(last + 1,))
    with pytest.raises(ConfigError, match=rf"validation.sampling.stop_token_ids: .* {last + 1};"):
        check_token_ids({"sampling": SamplingConfig(), "validation.sampling": wrong}, tokenizer)


RESHAPED = {
    "min_p": "0.1",
    "repetition_penalty": "1.1",
    "presence_penalty": "0.5",
    "frequency_penalty": "-0.5",
    "logit_bias": "{5: -100}",
}


def test_every_setting_of_sampling_is_known_to_be_trained_or_not() -> None:
    trained = {
        "temperature",
        "top_p",
        "top_k",
        "max_new_tokens",
        "stop",
        "stop_in_text",
        "stop_token_ids",
        "ignore_eos",
    }
    assert RESHAPED.keys() == set(RESHAPING)
    assert trained | RESHAPED.keys() == SamplingConfig.model_fields.keys()
    assert trained == DomainSampling.model_fields.keys()


@pytest.mark.parametrize("name", RESHAPED)
@pytest.mark.parametrize("pipeline", ["rlvr", "agentic"])
def test_what_the_trainer_cannot_compute_is_refused_in_training_and_allowed_elsewhere(
    run_file: Path,
    tmp_path: Path,
    name: str,
    pipeline: str,
) -> None:
    path = run_file if pipeline == "rlvr" else task(tmp_path / "agentic")
    value = RESHAPED[name]
    told = error(path, f"sampling.{name}={value}")
    assert f"sampling.{name}: changes the distribution" in told
    assert "set it in validation.sampling" in told
    told = error(path, f"domains.x.sampling.{name}={value}")
    assert f"domains.x.sampling.{name} = " in told
    assert ": changes the distribution" in told
    config = load_config(path, [f"validation.sampling.{name}={value}"]).config
    assert isinstance(config, RlvrBase)
    assert config.validation_sampling.reshaping == [name]
    assert config.samplings["sampling"].reshaping == []
    assert chat("hf", f"sampling.{name}={value}").sampling.reshaping == [name]


@pytest.mark.parametrize("name", sorted(set(RESHAPED) - {"logit_bias"}))
def test_what_sglang_cannot_do_is_refused_with_engine_and_key(run_file: Path, name: str) -> None:
    asked = f"validation.sampling.{name}={RESHAPED[name]}"
    told = error(run_file, SGLANG, asked)
    assert f"validation.sampling.{name}: with actor_infer.strategy.kind = sglang, " in told
    with pytest.raises(ConfigError, match=rf"sampling.{name}: with actor_infer.strategy.kind"):
        chat("sglang", f"sampling.{name}={RESHAPED[name]}")
    params = SamplingParams(1.0, 8, **{name: yaml.safe_load(RESHAPED[name])})
    with pytest.raises(EngineError, match=f"has {name}: with SGLang"):
        generate_input(GenerateRequest("r", (1,), params), 0, max_model_len=9, vocab_size=9, eos=1)


@pytest.mark.parametrize("name", RESHAPED)
def test_an_engine_that_guesses_ahead_takes_none_of_them(run_file: Path, name: str) -> None:
    guesses = "actor_infer.strategy.speculation={kind: ngram}"
    told = error(run_file, guesses, f"validation.sampling.{name}={RESHAPED[name]}")
    assert f"validation.sampling.{name}: with actor_infer.strategy.speculation, vLLM" in told


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("min_p=1.5", "less than or equal to 1"),
        ("repetition_penalty=0", "greater than 0"),
        ("presence_penalty=2.5", "less than or equal to 2"),
        ("frequency_penalty=-2.5", "greater than or equal to -2"),
        ("logit_bias={5: -101}", "greater than or equal to -100"),
        ("logit_bias={five: 1}", "integer"),
        ("logit_bias={-1: 1}", "greater than or equal to 0"),
        ("stop=['']", "at least 1 character"),
    ],
)
def test_values_without_a_meaning_are_refused(run_file: Path, override: str, told: str) -> None:
    assert told in error(run_file, f"validation.sampling.{override}")


@pytest.mark.parametrize("key", ["sampling", "domains.sort.sampling"])
def test_an_empty_stop_string_is_refused_in_training(run_file: Path, key: str) -> None:
    assert f"{key}.stop" in error(run_file, f"{key}.stop=['a', '']")


@pytest.mark.parametrize("key", ["sampling", "domains.sort.sampling", "validation.sampling"])
def test_a_temperature_at_which_an_engine_does_not_sample_is_refused(
    run_file: Path, key: str
) -> None:
    loaded(run_file, f"{key}.temperature=0.01")
    told = error(run_file, f"{key}.temperature=0.009")
    assert f"{key}.temperature: vLLM (actor_infer) samples at 0.01 in place of 0.009" in told
    loaded(run_file, SGLANG, f"{key}.temperature=0.009")
    told = error(run_file, SGLANG, f"{key}.temperature=1e-7")
    assert f"{key}.temperature: with actor_infer.strategy.kind = sglang, " in told
    loaded(run_file, "actor_infer.strategy={kind: hf}", f"{key}.temperature=1e-7")
    chat("vllm", "sampling.temperature=0")


def test_a_bias_survives_the_file_of_the_resolved_config(run_file: Path, tmp_path: Path) -> None:
    config = loaded(run_file, "validation.sampling.logit_bias={5: -100, 7: 1.5}")
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    found = load_config(again).config
    assert found == config
    assert isinstance(found, RlvrBase)
    assert found.validation_sampling.logit_bias == {5: -100.0, 7: 1.5}


def test_a_tag_has_texts_without_their_stop_string_and_environments_have_none(
    run_file: Path,
    tmp_path: Path,
) -> None:
    config = loaded(run_file, "domains.sort.sampling.stop_in_text=false")
    assert config.sampling.stop_in_text
    assert not config.domain_sampling["sort"].stop_in_text
    for key in ("sampling", "validation.sampling"):
        told = error(task(tmp_path / key), f"{key}.stop_in_text=false")
        assert f"{key}.stop_in_text: environments read turns as they were written" in told
