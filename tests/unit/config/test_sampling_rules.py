"""Settings of sampling that engines or the trainer cannot follow are refused, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.config.evaluation import ChatConfig
from roll.config.loading.question_sets import load_chat
from roll.config.sections.sampling import SamplingConfig
from roll.core.errors import ConfigError
from roll.models.token_ids import check_token_ids
from tests.tiny import char_tokenizer
from tests.unit.config.test_config import error, loaded, run_file  # noqa: F401 - a fixture

SGLANG = "actor_infer.strategy={kind: sglang}"


def chat(engine: str, *overrides: str) -> ChatConfig:
    infer = {"pool": "all", "strategy": {"kind": engine}}
    return load_chat(
        {"pools": {"all": "0"}, "model": {"path": "m"}, "actor_infer": infer}, overrides
    )


def test_stop_tokens_of_a_tag_stand_in_place_of_those_of_the_run(run_file: Path) -> None:  # noqa: F811
    config = loaded(
        run_file, "sampling.stop_token_ids=[5, 6]", "domains.sort.sampling.stop_token_ids=[7]"
    )
    assert config.sampling.stop_token_ids == (5, 6)
    assert config.domain_sampling["sort"].stop_token_ids == (7,)
    assert "greater than or equal to 0" in error(run_file, "sampling.stop_token_ids=[-1]")


@pytest.mark.parametrize("key", ["sampling", "domains.sort.sampling", "validation.sampling"])
def test_stop_tokens_that_sglang_would_ignore_are_refused_once(run_file: Path, key: str) -> None:  # noqa: F811
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
