"""Models are on the machine before a limit of time begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError, WaitTimeoutError
from roll.distributed.pending import Pending
from roll.models.fetch import fetch
from roll.runtime.clusters import wait_for_engines


def test_every_name_is_fetched_once_and_folders_are_left_alone(tmp_path: Path) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, *, allow_patterns: list[str]) -> None:
        asked.append((name, allow_patterns))

    models = [
        ModelConfig(path="some/model", tokenizer="some/tokenizer"),
        ModelConfig(path=str(tmp_path)),
        ModelConfig(path="some/model", dtype="bfloat16"),
    ]
    fetch(models, download=download)
    assert [name for name, _ in asked] == ["some/model", "some/tokenizer"]
    assert all("*.safetensors" in files and "*.bin" not in files for _, files in asked)


def test_a_download_that_fails_says_so_and_not_that_workers_are_late() -> None:
    def download(name: str, **_: Any) -> None:
        raise LocalEntryNotFoundError("no route to host\nand more")

    with pytest.raises(
        ConfigError,
        match=r"'some/model' is no folder here, and could not be taken .*no route to host\)",
    ):
        fetch([ModelConfig(path="some/model")], download=download)


class Silent:
    """Engines that never come up."""

    def collect(self, timeout_s: float) -> list[Any]:
        raise self.overdue(timeout_s)

    def poll(self, timeout_s: float) -> bool:
        return False

    def done(self) -> bool:
        return False

    def settle(self, timeout_s: float) -> bool:
        return False

    def overdue(self, timeout_s: float) -> WaitTimeoutError:
        return WaitTimeoutError(f"waited {timeout_s:g} s for actor_infer.start")


def test_engines_that_are_late_are_told_apart_from_a_download() -> None:
    loading: Pending[None] = Pending(Silent(), lambda results: None, 1.0)
    with pytest.raises(WaitTimeoutError) as caught:
        wait_for_engines(loading, 5.0)
    assert "waited 5 s for actor_infer.start" in str(caught.value)
    assert "captures graphs" in str(caught.value)
    assert "cluster.start_timeout_s" in str(caught.value)
