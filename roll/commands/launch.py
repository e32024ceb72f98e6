"""`roll run`: the way from a checked config to a running pipeline and to an orderly end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from roll.commands.checks.output_folder import check_output_folder
from roll.commands.preflight import user_folder
from roll.commands.trials.user_code import wrong_code
from roll.config.checks.notices import notices
from roll.config.loading.compose import LoadedConfig
from roll.config.run import RunConfig
from roll.config.user_code.import_path import load_object
from roll.core.errors import ConfigError
from roll.core.threads.loop_thread import LoopThread
from roll.core.threads.told_wait import told_wait
from roll.distributed.on_ray.resources import ResourceManager
from roll.distributed.processes.fork_server import ForkServer
from roll.distributed.processes.shutdown import StopWish, orderly_end
from roll.models.fetch import fetch
from roll.output_dir.resume import check_optimizer, finished_summary, refuse_other_settings
from roll.output_dir.run_lock import RunLock
from roll.output_dir.summary import read_summary
from roll.output_dir.trackers import check_trackers
from roll.output_dir.upload import check_urls, copy_missing, fetched, is_url
from roll.pipeline.agentic import AgenticPipeline
from roll.pipeline.base import Pipeline
from roll.pipeline.distill import DistillPipeline
from roll.pipeline.dpo import DpoPipeline
from roll.pipeline.reward_model import RewardModelPipeline
from roll.pipeline.rlvr import RlvrPipeline
from roll.pipeline.sft import SftPipeline
from roll.platform.allocator import give_back_each_minute, keep_freed_memory
from roll.platform.collector import calm_collector
from roll.platform.logs import setup_logging

logger = logging.getLogger(__name__)


PIPELINES: Mapping[str, type[Pipeline[Any]]] = {
    "rlvr": RlvrPipeline,
    "agentic": AgenticPipeline,
    "sft": SftPipeline,
    "distill": DistillPipeline,
    "dpo": DpoPipeline,
    "reward_model": RewardModelPipeline,
}


def launch(
    loaded: LoadedConfig,
    pipelines: Mapping[str, type[Pipeline[Any]]] = PIPELINES,
    fork_server: ForkServer | None = None,
) -> dict[str, Any]:
    """Run the pipeline to its end, unless an earlier session has done so, and return its summary.

    Steps that can fail on the driver (importing code of the user's, finding the checkpoint, reading
    the data, opening the output folder) come before Ray is started. However the run ends (last
    step, error, Ctrl-C, SIGTERM), workers, engines and a Ray that was started here are stopped.

    Raises:
        ConfigError: code that the user brought cannot be called as the run file says.
        SettingsChangedError: the run has ended before, with other settings.
    """
    setup_logging("driver")
    keep_freed_memory()
    give_back_each_minute()
    folder = user_folder(loaded)
    sys.path.insert(0, str(folder))
    pipeline = pipeline_class(loaded.config.pipeline, pipelines)
    if wrong := wrong_code(loaded.config, folder):
        raise ConfigError("\n".join(map(str, wrong)))
    for notice in notices(loaded.config):
        logger.warning("%s", notice)
    check_urls(loaded.config)
    check_output_folder(loaded)
    output_dir = Path(loaded.config.output_dir).expanduser().absolute()
    if loaded.config.resume == "never" or not _has_ended(output_dir):
        _refuse_to_end_before_it_begins(loaded.config)
    # The lock comes first, because the next calls also clean up what a killed run has left in the
    # folder.
    with RunLock(output_dir) as lock:
        config, data = pipeline.prepare(_with_checkpoint_here(loaded.config, output_dir))
        placed = config.model_copy(update={"output_dir": str(output_dir)})
        summary = finished_summary(placed)
        if summary is not None:
            refuse_other_settings(placed)
            copy_missing(placed)
        else:
            _refuse_to_end_before_it_begins(config)
            check_optimizer(placed)
            check_trackers(config.track)
            if config.resume == "never":
                lock.begin_anew()
            summary = _run(pipeline, config, data, folder, fork_server)
    return summary


def pipeline_class(
    name: str, pipelines: Mapping[str, type[Pipeline[Any]]] = PIPELINES
) -> type[Pipeline[Any]]:
    """Return the pipeline that a run file names: of the table, or a class of the user's.

    Raises:
        ConfigError: the class is no Pipeline.
    """
    if ":" not in name:
        return pipelines[name]
    found = load_object(name)
    if not (isinstance(found, type) and issubclass(found, Pipeline)):
        raise ConfigError(f"pipeline: {name} does not derive from a pipeline of roll.extend")
    return found


def _run(
    pipeline: type[Pipeline[Any]],
    config: RunConfig,
    data: Any,
    folder: Path,
    fork_server: ForkServer | None,
) -> dict[str, Any]:
    """Run the pipeline, and return its summary when Ray has ended again."""
    with started(config, folder, fork_server) as (resources, loop):
        return pipeline(config, resources, loop, platform=resources.platform, data=data).run()


@contextmanager
def started(
    config: RunConfig, folder: Path, fork_server: ForkServer | None
) -> Iterator[tuple[ResourceManager, LoopThread]]:
    """Download the models of a run, and start Ray and an event loop for the time of the block.

    Args:
        folder: folder of the user's modules.
        fork_server: starts the workers.
    """
    calm_collector()
    # Downloads come before everything that has a time limit.
    fetch(config.models.values())
    with orderly_end() as cleanups:
        logger.info("starting Ray and the workers")
        with told_wait("Ray to start"):
            resources = cleanups.enter_context(
                ResourceManager(
                    config.cluster,
                    config.pools,
                    python_path=[str(folder)],
                    fork_server=fork_server,
                    overlapping=config.roles_overlap,
                )
            )
        # Entered last, so that it ends first: generation still calls workers, which must be alive.
        yield resources, cleanups.enter_context(LoopThread("roll-rollout"))


def _with_checkpoint_here(config: RunConfig, output_dir: Path) -> RunConfig:
    """Return the config with the path of a copy in place of a URL in `resume`; CheckpointError if
    there is no complete checkpoint, or it cannot be copied."""
    if not is_url(config.resume):
        return config
    return config.model_copy(update={"resume": str(fetched(config.resume, output_dir))})


def _has_ended(output_dir: Path) -> bool:
    """Return whether the last session of the run has come to its last step, so that this one may
    have nothing to do but to say so."""
    summary = read_summary(output_dir)
    return summary is not None and summary["status"] == "finished"


def _refuse_to_end_before_it_begins(config: RunConfig) -> None:
    """Raise ConfigError if the run is to end at a moment that has passed."""
    if config.stop_at is not None and StopWish(config.stop_at).reason:
        raise ConfigError(
            f"stop_at: {config.stop_at} has passed, so the run would end after its first step; "
            "name a later moment, or leave it out"
        )


def print_end(config: RunConfig, summary: Mapping[str, Any]) -> None:
    """Print to stderr how a run has ended: the first and last validation scores, the verdict, why
    it ended before its last step, trackers that failed, the number of steps and the output folder.

    Args:
        summary: what `launch` returned.
    """
    output_dir = Path(config.output_dir).expanduser().absolute()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    verdict = summary.get("verdict") or ""  # earlier versions wrote none
    for name, value in summary["validation"].items():
        if f"{name} went from" in verdict:  # told below
            continue
        if name.endswith(("mean@1", "/loss", "/accuracy", "/divergence")):
            went = f"{name}: {value['first']:.3f} -> "
            console.print(Text.assemble(went, (f"{value['last']:.3f}", "bold")))
    if verdict:
        console.print(verdict, markup=False, style="bold")
    if reason := summary.get("ended_early"):
        console.print(f"ended before max_steps: {reason}", markup=False)
    for told in summary.get("failed_trackers", ()):
        console.print(f"tracker {told}", markup=False, style="yellow")
    console.print(f"{summary['steps']} steps; everything is in {output_dir}/", markup=False)
