"""The command chat."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roll.cli.shared import ERR, OUT, Debug, Overrides, leave_out_triton, reported, told_if_slow


def chat(
    model: Annotated[
        str, typer.Argument(help="The output_dir of a run, a model's folder, or a name on the hub.")
    ],
    overrides: Overrides = None,
    checkpoint: Annotated[
        int | None, typer.Option(min=0, help="Step of a checkpoint of the run; its last weights.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="hf, vllm or sglang. Without a GPU hf; else as in the run, or vllm."),
    ] = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Show the log-prob of each token.")
    ] = False,
    reward: Annotated[
        bool, typer.Option("--reward", help="Show what the rewards of the run say of each answer.")
    ] = False,
    rows: Annotated[
        bool,
        typer.Option(
            "--rows", help="Lines are JSON objects with prompt, answer, tag, each for itself."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object for each answer, with its tokens.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Talk to the policy of a run, or to a model; lines of a pipe get one answer each. Values such
    as sampling.temperature=0 win over those of the run (docs/chat.md)."""
    with reported(debug):
        leave_out_triton()
        from roll.commands.eval.models import find_models

        # Before the imports, so that a misspelt name shows at once.
        find_models([model], () if checkpoint is None else (checkpoint,), Path())
        with told_if_slow():
            from roll.commands.chat.command import Shown, Wish
            from roll.commands.chat.command import chat as talk

        wish = Wish(model, tuple(overrides or ()), checkpoint, engine)
        talk(wish, Shown(logprobs, reward, as_json, rows), OUT, ERR)
