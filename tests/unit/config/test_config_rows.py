"""Run files of pipelines on rows at hand: what is refused, in whose words, and the arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.config import load_config
from roll.config.errors import ConfigError
from roll.config.offline_base import NO_LIMIT, OfflineConfig
from roll.config.step_plan import plan_lines

PAIRS = {"path": "pairs.jsonl"}
TEXTS = {"path": "texts.jsonl"}


def load(tmp_path: Path, pipeline: str, **changes: Any) -> OfflineConfig:
    source = TEXTS if pipeline == "sft" else PAIRS
    config: dict[str, Any] = {
        "pipeline": pipeline,
        "output_dir": "out",
        "max_steps": 10,
        "model": {"path": "model"},
        "pools": {"all": "0"},
        "actor_train": {"pool": "all"},
        "data": {"sources": [source], "rows_per_step": 4},
        **({"reference": {"pool": "all"}} if pipeline == "dpo" else {}),
    }
    config |= changes
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in config.items() if v is not None}))
    loaded = load_config(path).config
    assert isinstance(loaded, OfflineConfig)
    return loaded


def messages(value: Any) -> dict[str, Any]:
    return {"data": {"sources": [{**TEXTS, "columns": {"messages": value}}], "rows_per_step": 4}}


MESSAGES = "data.sources.0.columns.messages"


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        (5, [f"{MESSAGES} = 5: must be a text or a list"]),
        ({"role": "user"}, [f"{MESSAGES} = {{'role': 'user'}}: must be a text or a list"]),
        ([5], [f"{MESSAGES}.0 = 5: must be a mapping with the keys role, content"]),
        ("{a", [f"{MESSAGES} = '{{a': '{{a': expected '}}' before end of string; a brace"]),
        (
            [{"rol": "user", "content": "x"}],
            [
                f"{MESSAGES}.0.role: missing; it must be set",
                f"{MESSAGES}.0.rol = 'user': unknown key; did you mean 'role'?",
            ],
        ),
        (
            [{"role": "user", "content": "x"}, {"role": 1, "content": "{}"}],
            [
                f"{MESSAGES}.1.role = 1: input should be a valid string",
                f"{MESSAGES}.1.content = '{{}}': '{{}}': braces hold the name of a column",
            ],
        ),
    ],
)
def test_mistakes_in_turns_made_of_columns_name_the_key_as_written(
    tmp_path: Path, value: Any, lines: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "sft", **messages(value))
    told = str(caught.value)
    found = told.splitlines()
    assert len(found) == len(lines), told
    assert all(line in each for line, each in zip(lines, found, strict=True)), told
    assert not any(word in told for word in ("TurnConfig", "function", "tuple", "valid dict"))


def test_a_value_of_no_known_form_is_told_the_forms(tmp_path: Path) -> None:
    for targets, told in ((5, "must be 'all-linear' or a list"), ([5], "targets.0 = 5: input")):
        model = {"path": "model", "lora": {"rank": 4, "targets": targets}}
        with pytest.raises(ConfigError, match=told) as caught:
            load(tmp_path, "sft", model=model)
        assert len(str(caught.value).splitlines()) == 1


LABELS = {"chosen": None, "rejected": None, "completion": "c", "label": "ok"}
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("sft", {"max_steps": None}, "epochs: set epochs or max_steps"),
    ("sft", {"pools": {"all": "0-2"}}, "data.rows_per_step: 4 rows do not divide over the 3"),
    ("sft", {"data": {"sources": [TEXTS], "rows_per_step": 4, "too_lng": 1}}, "unknown key"),
    ("sft", {"reference": {"pool": "all"}}, "reference"),
    (
        "sft",
        {"data": {"sources": [{**TEXTS, "columns": {"prompt": "p"}}], "rows_per_step": 4}},
        "`prompt` goes with `completion`",
    ),
    ("dpo", {"reference": None}, "a `reference` role; add `reference: {pool: all}`, or"),
    ("dpo", {"loss": {"kind": "simpo"}}, "compares with no reference; drop the role"),
    ("dpo", {"loss": {"kind": "sigmiod"}}, "did you mean 'sigmoid'?"),
    (
        "dpo",
        {"loss": {"kind": "orpo"}, "reference": None, "reference_logprobs": "once"},
        "reference_logprobs: there is no reference to score with",
    ),
    (
        "dpo",
        {"data": {"sources": [{**PAIRS, "columns": LABELS}], "rows_per_step": 4}},
        "data.sources.0.columns.label: this loss compares pairs",
    ),
    (
        "dpo",
        {"validation": {"sets": {"x": {**PAIRS, "columns": {"margin": "m"}}}}},
        "validation.sets.x.columns.margin: no loss of `dpo` has margins",
    ),
    (
        "dpo",
        {"validation": {"sets": {"x": {**PAIRS, "weight": 2.0}}}},
        "validation.sets.x.weight: all rows of each set are validated",
    ),
    (
        "reward_model",
        {"actor_train": {"pool": "all", "logprob_chunk_tokens": 8}},
        "actor_train.logprob_chunk_tokens: a reward model has a score",
    ),
    (
        "dpo",
        {"loss": {"kind": "kto"}, "data": {"sources": [PAIRS], "rows_per_step": 1}},
        "needs at least 2 rows",
    ),
    (
        "reward_model",
        {"validation": {"sets": {"x": {**PAIRS, "columns": LABELS}}}},
        "validation.sets.x.columns.label",
    ),
    (
        "reward_model",
        {"data": {"sources": [{**PAIRS, "columns": {"chosen": None}}], "rows_per_step": 4}},
        "set `chosen` and `rejected`",
    ),
    (
        "dpo",
        {"actor_train": {"pool": "all", "strategy": {"kind": "megatron", "mtp_loss_weight": 0.1}}},
        "actor_train.strategy.mtp_loss_weight: half of the texts of pipeline dpo",
    ),
    (
        "reward_model",
        {"actor_train": {"pool": "all", "strategy": {"kind": "megatron", "mtp_loss_weight": 0.1}}},
        "actor_train.strategy.mtp_loss_weight: a reward model predicts no tokens",
    ),
    (
        "sft",
        {"model": {"path": "model", "lora": {"serve": "adapter"}}},
        "model.lora.serve: pipeline sft has no engine to push to",
    ),
    *(
        (pipeline, {"track": {key: value}}, f"track.{key}: pipeline {pipeline} {why}")
        for pipeline, key, value, why in (
            ("sft", "samples", "all", "generates no samples to keep"),
            ("dpo", "rollouts_every", 1, "generates no samples to keep"),
            ("reward_model", "rollouts_samples", 8, "generates no samples to keep"),
            ("sft", "verify_weights", "always", "has no engine to push to"),
        )
    ),
    (
        "sft",
        {"checkpoint": {"keep_best": 1, "best_metric": "val/x/los"}},
        "no validation makes 'val/x/los'",
    ),
]


@pytest.mark.parametrize(("pipeline", "changes", "says"), BAD)
def test_what_does_not_fit_is_refused_with_its_key(
    tmp_path: Path, pipeline: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, pipeline, **changes)
    assert says in str(raised.value)


@pytest.mark.parametrize("pipeline", ["sft", "dpo", "reward_model"])
def test_a_resolved_config_loads_as_it_is(tmp_path: Path, pipeline: str) -> None:
    config = load(tmp_path, pipeline, epochs=2.0, max_steps=None)
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    assert load_config(path).config == config
    assert "for 2 epoch(s)" in plan_lines(config)[0]


@pytest.mark.parametrize(
    ("epochs", "max_steps", "rows", "steps"),
    [
        (1.0, None, 16, 4),
        (1.0, None, 17, 5),
        (0.5, None, 17, 3),
        (3.0, 5, 16, 5),
        (0.01, None, 9, 1),
    ],
)
def test_epochs_become_steps_once_the_rows_are_known(
    tmp_path: Path, epochs: float, max_steps: int | None, rows: int, steps: int
) -> None:
    config = load(tmp_path, "sft", epochs=epochs, max_steps=max_steps)
    assert config.max_steps == (max_steps or NO_LIMIT)
    assert config.with_steps(rows).max_steps == steps


def test_a_schedule_that_does_not_fit_the_epochs_is_refused(tmp_path: Path) -> None:
    optimizer = {"schedule": "cosine", "warmup_steps": 6}
    config = load(
        tmp_path,
        "sft",
        epochs=1.0,
        max_steps=None,
        actor_train={"pool": "all", "optimizer": optimizer},
    )
    with pytest.raises(ConfigError, match="leave none of the run's 4 optimizer steps"):
        config.with_steps(16)


def test_an_adapter_needs_no_reference_role(tmp_path: Path) -> None:
    config = load(tmp_path, "dpo", reference=None, model={"path": "model", "lora": {"rank": 2}})
    assert config.base_is_reference
