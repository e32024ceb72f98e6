"""Smallest run file of RLVR, as a configuration or as the error that it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.config import RlvrConfig, load_config
from roll.config.errors import ConfigError

RUN = """\
pipeline: rlvr
output_dir: out
max_steps: 10
model: {path: model}
pools: {all: "0"}
actor_train: {pool: all, optimizer: {lr: 1e-4}}
actor_infer: {pool: all, strategy: {kind: vllm, tp: 1}}
reference: {pool: all}
data:
  sources: [{path: a.jsonl, tag: sort}]
  prompts_per_step: 32
rewards:
  sort: {fn: exact, tags: [sort]}
"""


def loaded(path: Path, *overrides: str) -> RlvrConfig:
    config = load_config(path, overrides).config
    assert isinstance(config, RlvrConfig)
    return config


def error(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)
