"""`model.compile` in run files, and where it is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll.commands.preflight import inspect
from roll.config import load_config
from roll.config.errors import ConfigError
from roll.config.sections.model import ModelConfig
from roll.models.kernels.compiled import compile_layers
from tests.runs import ROOT, write_task
from tests.tiny import tiny_qwen3

FOLDER = "TORCHINDUCTOR_CACHE_DIR"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "actor_train.strategy={kind: megatron}",
            "model.compile: compiles layers of Hugging Face models, and actor_train is of kind: m",
        ),
        (
            "actor_train.strategy={kind: fsdp2, tp: 2}",
            "model.compile: actor_train.strategy.tp gives each rank a part of every matrix",
        ),
    ],
)
def test_backends_that_do_not_compile_layers_refuse_it(
    tmp_path: Path, override: str, said: str
) -> None:
    file = write_task(tmp_path)
    with pytest.raises(ConfigError, match=said):
        load_config(file, ["model.compile=true", override])
    load_config(file, ["model.compile=false", override.replace("tp: 2", "tp: 1")])


def said_of(file: Path, environ: dict[str, str]) -> list[str]:
    loaded = load_config(file, ["model.compile=true", "cluster.platform=cpu"])
    return [
        str(finding.error)
        for finding in inspect(loaded, environ)
        if finding.only_here and "model.compile" in str(finding.error)
    ]


def test_a_machine_without_a_compiler_refuses_it_before_anything_starts(tmp_path: Path) -> None:
    file, tools = write_task(tmp_path), tmp_path / "bin"
    tools.mkdir()
    (without,) = said_of(file, {"PATH": str(tools)})
    assert "it needs a C++ compiler, and there is no g++ here; install one" in without
    (tools / "g++").touch(mode=0o755)
    assert said_of(file, {"PATH": str(tools)}) == []
    (other,) = said_of(file, {"PATH": str(tools), "CXX": "clang++-99"})
    assert "no clang++-99 here" in other
    (off,) = said_of(file, {"PATH": str(tools), "TORCHDYNAMO_DISABLE": "1"})
    assert "TORCHDYNAMO_DISABLE=1 switches it off; unset it" in off


def test_a_worker_with_the_compiler_switched_off_does_not_go_on_without() -> None:
    """The variable is set for all tests (`tests/conftest.py`)."""
    with pytest.raises(ConfigError, match="TORCHDYNAMO_DISABLE=1 is set, so nothing would"):
        compile_layers(tiny_qwen3(), ModelConfig(path="x", compile=True))


COMPILE = """
import os
import torch._dynamo  # as something in a worker has done; it sets the variable to PyTorch's default
from roll.config.sections.model import ModelConfig
from roll.models.kernels.compiled import compile_layers
from tests.tiny import tiny_qwen3

assert compile_layers(tiny_qwen3(), ModelConfig(path="x", compile=True))
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("own", [None, "own"])
def test_compiled_code_stays_in_the_home_of_the_user_or_where_he_says(
    own: str | None, tmp_path: Path
) -> None:
    environ = {k: v for k, v in os.environ.items() if k not in ("TORCHDYNAMO_DISABLE", FOLDER)}
    environ |= {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environ |= {} if own is None else {FOLDER: str(tmp_path / own)}
    command = [sys.executable, "-W", "ignore", "-c", COMPILE]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == str(tmp_path / (own or ".cache/roll/inductor"))


BACKWARD = """
import threading
import torch
from torch._dynamo.backends.common import aot_autograd
from roll.config.sections.model import ModelConfig
from roll.models.kernels.compiled import compile_layers
from tests.tiny import tiny_qwen3

compiled = []

def noted(graph, inputs):
    compiled.append(threading.current_thread().name)
    return graph.forward

torch.compiler.set_default_backend(aot_autograd(fw_compiler=noted, bw_compiler=noted))
model = tiny_qwen3()
compile_layers(model, ModelConfig(path="x", compile=True))
out = model(torch.ones(1, 1, dtype=torch.long)).logits
thread = threading.Thread(target=out.sum().backward, name="backward")
thread.start()
thread.join()
assert len(compiled) >= 2 and all(p.grad is not None for p in model.parameters())
print(*set(compiled))
"""


@pytest.mark.slow
def test_nothing_is_compiled_in_the_thread_of_the_backward_pass() -> None:
    """GPUs have one, where the settings of the compiler are PyTorch's own. The sizes of a single
    token are no unknowns, and PyTorch would compile their backward pass when it runs."""
    environ = {k: v for k, v in os.environ.items() if k != "TORCHDYNAMO_DISABLE"}
    environ |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", BACKWARD]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["MainThread"]
