"""The command line, as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.convert.tiny_checkpoints import assert_same, by_transformers

SOURCE = Path(__file__).parents[2] / "mcore_adapter"


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return by_transformers(tmp_path_factory.mktemp("cli") / "src", "qwen3_moe")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mcore_adapter", *map(str, arguments)]
    path = os.pathsep.join([str(SOURCE / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_a_checkpoint_goes_there_moves_and_comes_back(src: Path, tmp_path: Path) -> None:
    options = ["--tp", "2", "--pp", "2", "--ep", "2", "--etp", "1", "--layers", "3,1"]
    there = run("to-mcore", src, tmp_path / "mcore", *options, "--workers", "2")
    assert there.returncode == 0, there.stderr
    assert "GB/s" in there.stdout
    moved = run("convert", tmp_path / "mcore", tmp_path / "moved", "--tp", "4")
    assert moved.returncode == 0, moved.stderr
    assert (tmp_path / "moved" / "dense-pp0-tp3.safetensors").is_file()
    back = run("convert", tmp_path / "moved", tmp_path / "back")
    assert back.returncode == 0, back.stderr
    assert_same(src, tmp_path / "back")


def test_an_error_is_one_line_and_exit_code_1(src: Path, tmp_path: Path) -> None:
    wrong: list[list[str | Path]] = [
        ["to-mcore", src, tmp_path / "x", "--tp", "3"],
        ["to-mcore", src, tmp_path / "x", "--layers", "a"],
        ["to-mcore", src, tmp_path / "x", "--dtype", "fp8"],
        ["to-hf", src, tmp_path / "x"],
        ["check", tmp_path],
    ]
    for arguments in wrong:
        done = run(*arguments)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stopped_command_says_so_and_leaves_nothing(
    number: signal.Signals, src: Path, tmp_path: Path
) -> None:
    """The signal comes when the first worker is forked; its number is the last argument."""
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "number = int(sys.argv.pop())\n"
        "os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), number))\n"
        "from mcore_adapter.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "to-mcore", str(src), str(tmp_path / "dst")]
    command += ["--workers", "2", str(number.value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + number, done.stderr
    assert done.stderr == "stopped: nothing was written\n"
    assert os.listdir(tmp_path) == []


def test_check_tells_what_it_found_without_torch_in_two_seconds(src: Path) -> None:
    code = (
        "import sys; from mcore_adapter.cli import app\n"
        f"try: app(['check', {str(src)!r}, '--tp', '2', '--ep', '2', '--dtype', 'bf16'])\n"
        "except SystemExit as e: code = e.code\n"
        "heavy = {'torch', 'megatron', 'transformers', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE / "src")}
    command = [sys.executable, "-c", code]
    before = os.times()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    after = os.times()
    assert done.returncode == 0, done.stdout + done.stderr
    # Seconds of CPU, not of the clock: other work on the machine is not ours to measure.
    spent_user = after.children_user - before.children_user
    assert spent_user + after.children_system - before.children_system < 2
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0] == "model type qwen3_moe (Hugging Face)"
    assert "tp divides 1, 2, 4" in lines
    assert "pp divides 1, 2, 4" in lines
    assert "ep divides 1, 2, 4" in lines
    # two of four layers have 4 experts of 3 x 16 x 32; a rank has half of half of each, in bf16
    of_experts = 2 * 4 * 3 * 16 * 32 // 4 * 2
    assert any(line.endswith(f"{of_experts / 1e3:.1f} kB of it experts") for line in lines)


def test_a_worker_loads_neither_torch_nor_the_command_line() -> None:
    code = (
        "import sys, mcore_adapter.convert.run_conversion, mcore_adapter.models\n"
        "print(sorted({'torch', 'megatron', 'transformers', 'typer', 'rich'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_console_script_is_main() -> None:
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"mcore-adapter": "mcore_adapter.cli:main"}
