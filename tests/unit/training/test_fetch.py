"""Models are on the machine before a limit of time begins."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError, WaitTimeoutError
from roll.core.hub import require_hub
from roll.distributed.pending import Pending
from roll.models.fetch import fetch
from roll.runtime.clusters import wait_for_engines


@pytest.fixture
def in_folder() -> Iterator[Callable[[Path], None]]:
    """Changes the current folder for the time of a test."""
    before = Path.cwd()
    yield os.chdir
    os.chdir(before)


def reached(name: str) -> None:
    """The hub answers."""


def test_every_name_is_fetched_once_and_folders_are_left_alone(tmp_path: Path) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, *, allow_patterns: list[str]) -> None:
        asked.append((name, allow_patterns))

    models = [
        ModelConfig(path="some/model", tokenizer="some/tokenizer"),
        ModelConfig(path=str(tmp_path)),
        ModelConfig(path="some/model", dtype="bfloat16"),
    ]
    fetch(models, download=download, reach=reached)
    assert [name for name, _ in asked] == ["some/model", "some/tokenizer"]
    assert all("*.safetensors" in files and "*.bin" not in files for _, files in asked)


def test_a_download_that_fails_says_so_and_not_that_workers_are_late() -> None:
    def download(name: str, **_: Any) -> None:
        raise LocalEntryNotFoundError("no route to host\nand more")

    with pytest.raises(
        ConfigError,
        match=r"'some/model' is no folder here, and could not be taken .*no route to host\)",
    ):
        fetch([ModelConfig(path="some/model")], download=download, reach=reached)


class Hub:
    """A server that answers each request with a status, or not at all; counts connections."""

    def __init__(self, status: int | None) -> None:
        self.status = status
        self.asked = 0
        self.open: list[socket.socket] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            self.asked += 1
            self.open.append(connection)
            if self.status is not None:
                connection.recv(1 << 16)
                connection.sendall(
                    f"HTTP/1.1 {self.status} X\r\nContent-Length: 0\r\n\r\n".encode()
                )


def outside(code: str, *arguments: str, **environ: str) -> str:
    """Output of a program: the client reads at its import where the hub is, and whether it may be
    asked, which tests may not."""
    known = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=known | environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


ASKED = """
import sys
from roll.core.hub import require_hub
for url, limit_s in zip(sys.argv[1::2], map(float, sys.argv[2::2])):
    try:
        require_hub("no-such/model", url=url, limit_s=limit_s)
        print("answers")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_a_hub_that_answers_is_left_to_its_client_and_a_silent_one_is_asked_once() -> None:
    answering = [Hub(status) for status in (200, 404, 429, 503)]
    silent = Hub(None)
    urls = [*(hub.url for hub in answering), "http://127.0.0.1:9"]
    limits = [argument for url in urls for argument in (url, "60")]
    *said, refused, slow = outside(ASKED, *limits, silent.url, "1").splitlines()
    assert said == ["answers"] * 4
    told = r"ConfigError: model 'no-such/model': there is no such folder in .* and no such model in"
    assert re.match(rf"{told} the hub's cache, and the hub .* \(.* refused\)$", refused)
    assert re.match(rf"{told} the hub's cache, and the hub .* \(.*\)$", slow)
    assert [hub.asked for hub in (*answering, silent)] == [1] * 5


def test_a_similar_model_that_is_here_is_named(
    tmp_path: Path, in_folder: Callable[[Path], None]
) -> None:
    (tmp_path / "Qwen3-0.6B").mkdir()
    (tmp_path / "Qwen3-0.6B" / "config.json").write_text("{}")
    in_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"; did you mean 'Qwen3-0.6B'\?$"):
        require_hub("Qwen3-0.6BB", url="http://127.0.0.1:9", limit_s=60.0)


CACHED = """
import sys
from pathlib import Path
from roll.core.hub import require_hub
folder = Path(sys.argv[1]) / "models--my--model"
(folder / "refs").mkdir(parents=True)
(folder / "refs" / "main").write_text("abc")
(folder / "snapshots" / "abc").mkdir(parents=True)
(folder / "snapshots" / "abc" / "config.json").write_text("{}")
require_hub("my/model", url="http://127.0.0.1:9")
try:
    require_hub("my/modell", url="http://127.0.0.1:9")
except Exception as error:
    print(error)
"""


def test_what_is_in_the_cache_needs_no_hub(tmp_path: Path) -> None:
    said = outside(CACHED, str(tmp_path), HF_HUB_CACHE=str(tmp_path))
    assert said.rstrip().endswith("; did you mean 'my/model'?")


UNREACHED = """
from roll.config.sections.model import ModelConfig
from roll.models.fetch import fetch
from roll.models.load import load_config, load_tokenizer
for act in (load_tokenizer, load_config, lambda model: fetch([model])):
    try:
        act(ModelConfig(path='no-such/model'))
    except Exception as error:
        print(type(error).__name__, 'cannot be reached' in str(error))
"""


@pytest.mark.slow
def test_loading_and_fetching_ask_once_before_they_try(tmp_path: Path) -> None:
    silent = Hub(None)
    where = {"HF_ENDPOINT": silent.url, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_ETAG_TIMEOUT": "1"}
    assert outside(UNREACHED, **where).split() == ["ConfigError", "True"] * 3
    assert silent.asked == 3


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
