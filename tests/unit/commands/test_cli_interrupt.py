"""What the command line says of an interrupt."""

from __future__ import annotations

import pytest
import typer

from roll.cli import reported


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
    stop.add_note("the same command goes on behind step 40 of 80")
    with pytest.raises(typer.Exit), reported(debug=False):
        raise stop
    told = capsys.readouterr().err
    assert told == "stopped: ended by SIGINT; the same command goes on behind step 40 of 80\n"
