"""`start_pipeline`: the command line of the scripts `examples/start_<pipeline>_pipeline.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from roll.cli.run_files import run
from roll.cli.shared import Debug, Overrides, reported
from roll.config.loading.compose import compose


def start_pipeline(pipeline: str, *others: str) -> Callable[[], None]:
    """Return the command of `examples/start_<pipeline>_pipeline.py`.

    Args:
        pipeline: pipeline to run.
        others: other pipelines that the run file may name instead.
    """

    def start(
        config_path: Annotated[Path, typer.Option("--config_path", help="Folder of the run file.")],
        config_name: Annotated[str, typer.Option("--config_name", help="Its name, without .yaml.")],
        overrides: Overrides = None,
        debug: Debug = False,
    ) -> None:
        """Run this example's pipeline; continue from the newest checkpoint in its output_dir."""
        file, chosen = config_path / f"{config_name}.yaml", [*(overrides or ())]
        with reported(debug):
            named = compose(file, chosen)[0].get("pipeline")
        if named not in others:
            chosen.insert(0, f"pipeline={pipeline}")
        run(file, chosen, debug)

    return lambda: typer.run(start)
