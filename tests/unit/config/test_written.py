"""Config written as a run file: read again it is the same, whatever stands in its texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from roll.config.loading.written import (
    RunFileDumper,
    in_one_line,
    run_file_text,
    without_marks,
)
from roll.output_dir.config_diff import changed_keys
from tests.rlvr_file import RUN, loaded

TEXTS = st.one_of(
    st.lists(st.sampled_from(["${", *"\\${}a'\"\n: é"]), max_size=8).map("".join),
    st.text("0123456789eE-+._:", min_size=1, max_size=6),
    st.sampled_from(["true", "null", "~", "no", "on", ".inf", ".NaN", "0x1F", "1_0", "2001-01-01"]),
)


@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(TEXTS, min_size=20, max_size=20))
def test_a_written_config_is_read_as_the_same(texts: list[str], tmp_path: Path) -> None:
    first, second = tmp_path / "run.yaml", tmp_path / "config.yaml"
    first.write_text(RUN)
    config = loaded(first)
    reward = config.rewards["sort"].model_copy(update={"kwargs": {"texts": texts}})
    config = config.model_copy(update={"rewards": {"sort": reward}})
    second.write_text(run_file_text(config))

    assert loaded(second) == config
    plain = yaml.safe_load(second.read_text())
    assert without_marks(plain) == json.loads(config.model_dump_json())
    assert changed_keys(tmp_path, config) == []


@pytest.mark.parametrize(
    "text", ["1e-6", "5e3", "1E+5", "-1e2", "1_0e1", ".5e-3", "1:30.5", ".inf", "null", "1e", "a"]
)
def test_a_text_that_looks_like_a_number_stays_a_text(text: str) -> None:
    written = [yaml.dump([text, {text: 1}], Dumper=RunFileDumper), in_one_line([text, {text: 1}])]
    for each in written:
        assert OmegaConf.to_container(OmegaConf.create(each)) == [text, {text: 1}]
    assert in_one_line("a1e5") == "a1e5"  # what can only be a text has no quotes


def test_a_literal_dollar_stays_literal(tmp_path: Path) -> None:
    first, second = tmp_path / "run.yaml", tmp_path / "again.yaml"
    first.write_text(
        RUN
        + "  other: {fn: exact, tags: [sort], kwargs: {form: '\\${seed} costs ${seed}'}}\nseed: 3\n"
    )
    config = loaded(first)
    assert config.rewards["other"].kwargs == {"form": "${seed} costs 3"}

    second.write_text(run_file_text(config))

    assert loaded(second) == config
