"""What the command line says of an interrupt, of misspelt names and of slow imports."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from roll.cli import reported
from roll.cli.shared import told_if_slow

WITHOUT_LIBRARIES = """
import json, sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "ray")))  # they cannot be imported
from roll.cli import app
for arguments in json.loads(sys.argv[1]):
    try:
        app(arguments)
    except SystemExit as end:
        print(end.code, file=sys.stderr)
"""


@pytest.mark.parametrize(("text", "said"), [("", "stopped: Ctrl-C"), ("SIGTERM", "SIGTERM")])
def test_an_interrupt_says_what_stopped_it(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as stopped, reported(debug=False):
        raise KeyboardInterrupt(*([text] if text else []))
    assert stopped.value.exit_code == 130
    assert said in capsys.readouterr().err


def test_a_run_that_is_interrupted_says_where_it_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stop = KeyboardInterrupt("ended by SIGINT")
    stop.add_note("the same command goes on with step 40 of 80")
    with pytest.raises(typer.Exit), reported(debug=False):
        raise stop
    told = capsys.readouterr().err
    assert told == "stopped: ended by SIGINT; the same command goes on with step 40 of 80\n"


def test_a_misspelt_name_needs_no_large_library(tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    (model / "config.json").write_text("{}")
    state = run / "checkpoints" / "step_000004" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text("{}")
    commands = {
        "merge run model": "model exists; name a folder that does not, or remove it",
        "merge nix new": "nix is no folder; name a checkpoint",
        "average run model --out model": "model exists; name a folder that does not, or remove it",
        "eval model --sets nix.yaml": "nix.yaml",
        "eval ./nix --sets gsm8k": "nix is no model",
        "eval run --sets gsm8k --checkpoint 5": "no complete checkpoint of step [5]",
        "chat run --checkpoint 5": "no complete checkpoint of step [5]",
        "chat ./nix": "nix is no model",
    }
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARIES, json.dumps([c.split() for c in commands])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    parts = told.split("\n2\n")
    assert len(parts) == len(commands) + 1, told
    for part, (command, expected) in zip(parts, commands.items(), strict=False):
        assert expected in part, command


def test_a_slow_import_is_told_and_a_quick_one_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    told = ""
    with told_if_slow("importing much", patience_s=0.01):
        deadline = time.monotonic() + 60
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
            told = capsys.readouterr().err
    assert told == "importing much\n"
    with told_if_slow("importing little"):
        pass
    assert capsys.readouterr().err == ""
