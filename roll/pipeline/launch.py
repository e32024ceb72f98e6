"""From a checked config to a running pipeline, and out again without leaving anything behind."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from roll.config.compose import LoadedConfig
from roll.core.logs import setup_logging
from roll.distributed.resources import ResourceManager
from roll.distributed.shutdown import orderly_end
from roll.pipeline.preflight import user_folder
from roll.pipeline.rlvr import RlvrPipeline

logger = logging.getLogger(__name__)


def launch(loaded: LoadedConfig) -> dict[str, Any]:
    """Run the pipeline to its end; returns its summary.

    Whatever ends it (the last step, an error, Ctrl-C, SIGTERM), workers, engines and a Ray that
    was started here are stopped.
    """
    setup_logging("driver")
    config = loaded.config
    folder = user_folder(loaded)
    sys.path.insert(0, str(folder))
    if config.resume == "never":
        _set_aside(Path(config.output_dir))
    with orderly_end() as cleanups:
        runner = cleanups.enter_context(asyncio.Runner())
        logger.info("starting Ray and the workers")
        resources = cleanups.enter_context(
            ResourceManager(config.cluster, config.pools, python_path=[str(folder)])
        )
        pipeline = RlvrPipeline(config, resources, runner, platform=resources.platform)
        summary = pipeline.run()
    _print_end(Path(config.output_dir), summary)
    return summary


def _set_aside(output_dir: Path) -> None:
    """`resume: never` begins in an empty folder; what is there is renamed, never deleted."""
    if not output_dir.exists() or not any(output_dir.iterdir()):
        return
    number = 1
    while (aside := output_dir.with_name(f"{output_dir.name}.{number}")).exists():
        number += 1
    output_dir.rename(aside)
    logger.info("resume is never: the earlier run is kept in %s", aside)


def _print_end(output_dir: Path, summary: dict[str, Any]) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for name, value in summary["validation"].items():
        if name.endswith("mean@1"):
            console.print(f"{name}: {value['first']:.3f} -> [bold]{value['last']:.3f}[/bold]")
    console.print(f"{summary['steps']} steps; everything is in {output_dir}/")
