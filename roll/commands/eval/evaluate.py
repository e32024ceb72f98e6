"""Evaluation of models on sets of questions, with the engines and rewards of a run."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from roll.commands.eval.answers import Answers
from roll.commands.eval.cells import Cell, load_questions
from roll.commands.eval.models import Examinee, fingerprint, make_folder
from roll.commands.eval.page import results_page
from roll.commands.eval.results import Line, markdown_of, write_results
from roll.commands.eval.scores import scores_of
from roll.commands.eval.votes import votes_of
from roll.config.evaluation import EvalConfig
from roll.core.threads.loop_thread import LoopThread
from roll.core.types import Prompt
from roll.data.datasets import Dataset
from roll.distributed.cluster import Launcher
from roll.distributed.on_ray.resources import ResourceManager
from roll.distributed.processes.shutdown import orderly_end
from roll.models.fetch import fetch
from roll.models.load import load_tokenizer
from roll.output_dir.run_lock import RunLock
from roll.output_dir.whole_file import replace_file
from roll.platform.logs import setup_logging
from roll.rewards.decoding import make_decode
from roll.rewards.execution.counters import Purpose
from roll.rollout.async_utils import all_or_first_error
from roll.rollout.types import GroupTask
from roll.runtime.evaluation.serving import ServedModel, judging, serving
from roll.runtime.reward_router import RewardRouter

logger = logging.getLogger(__name__)

Launch = Callable[[EvalConfig, Sequence[str]], AbstractContextManager[Launcher]]
"""Function that starts what starts clusters, for a config and folders with code of the user."""


@dataclass(frozen=True)
class Work:
    """One model with its data and the answers that it has already."""

    examinee: Examinee
    config: EvalConfig
    data: Mapping[str, Dataset[Prompt]]
    """Name of a set -> its prompts."""
    answers: Mapping[str, Answers]
    """Name of a cell -> its answers."""

    def open_prompts(self, cell: Cell) -> list[Prompt]:
        """Return the questions of a cell that have no answers yet."""
        known = self.answers[cell.name].by_id
        return [one for one in self.data[cell.set_name].items if one.id not in known]

    def line(self, cell: Cell, task: str) -> Line:
        """Return the scores of a cell whose questions are all answered."""
        questions, data = cell.questions, self.data[cell.set_name]
        known = self.answers[cell.name].by_id
        answered = [known[prompt.id] for prompt in data.items]
        n, passes = questions.samples_per_prompt, questions.pass_score
        tags = sorted({one.tag for one in answered})
        by_tag = {
            tag: scores_of([one for one in answered if one.tag == tag], n, passes)
            for tag in (tags if len(tags) > 1 else ())
        }
        rows = sum(report.rows for report in data.report)
        whole = scores_of(answered, n, passes)
        model = self.examinee
        return Line(model.name, cell, task, rows, whole, by_tag, model.run, model.step)


def on_ray(config: EvalConfig, folders: Sequence[str]) -> AbstractContextManager[Launcher]:
    """Start Ray for an evaluation."""
    return ResourceManager(config.cluster, config.pools, python_path=folders)


def evaluate(
    models: Sequence[Examinee],
    cells: Sequence[Cell],
    config_of: Callable[[Examinee], EvalConfig],
    out: Path,
    launch: Launch = on_ray,
) -> list[Line]:
    """Answer all questions that are not answered yet, and write the results.

    What can fail without engines (models, data, settings of earlier answers) comes before any
    engine is started.

    Args:
        models: models to evaluate.
        cells: sets of questions, each at a temperature.
        config_of: function that returns how a model is served.
        out: folder of answers and results.
        launch: starts Ray.

    Raises:
        SettingsChangedError: `out` has answers with other settings.
        RollError: a model, a set or an engine cannot be used.
    """
    setup_logging("driver")
    folders = list(dict.fromkeys(str(cell.file.resolve().parent) for cell in cells))
    sys.path[:0] = folders
    with RunLock(out):
        moment = _moment(out)
        works = [_prepare(model, config_of(model), cells, out, moment) for model in models]
        if any(work.open_prompts(cell) for work in works for cell in cells):
            with orderly_end() as cleanups:
                launcher = cleanups.enter_context(launch(works[0].config, folders))
                loop = cleanups.enter_context(LoopThread("roll-rollout"))
                for work in works:
                    _answer(work, cells, launcher, loop)
        return _write(works, cells, out)


def _moment(out: Path) -> datetime:
    """Return the date and time that chat templates treat as the present: that of the first
    session in the folder, so that prompts stay the same."""
    file = out / "rendered_at.txt"
    if not file.is_file():
        replace_file(file, datetime.now().isoformat() + "\n")
    return datetime.fromisoformat(file.read_text(encoding="utf-8").strip())


def _prepare(
    model: Examinee, config: EvalConfig, cells: Sequence[Cell], out: Path, moment: datetime
) -> Work:
    """Write or download a model, read the questions, and open the answers of each cell."""
    make_folder(model, trust_remote_code=config.model.trust_remote_code)
    fetch([config.model])
    data = load_questions(cells, config.model, moment)
    served = _settings_of(config)
    answers = {
        cell.name: Answers(
            out / model.name / cell.name,
            {"model": served} | _settings(cell, data[cell.set_name].fingerprint),
        )
        for cell in cells
    }
    return Work(model, config, data, answers)


def _settings_of(config: EvalConfig) -> dict[str, Any]:
    """Return what answers depend on in the model, its engine and the seed. The number of engines
    and their sizes are left out: an evaluation may go on with others."""
    model, engine = config.model, config.actor_infer
    options = {
        "overrides": dict(model.overrides),
        "engine_args": dict(getattr(engine.strategy, "engine_args", {})),
    }
    return {
        "path": model.path,
        "fingerprint": fingerprint(model.path),
        "tokenizer": model.tokenizer,
        "dtype": engine.dtype or model.dtype,
        "engine": engine.strategy.kind,
        "quantization": getattr(engine.strategy, "quantization", None),
        "seed": config.seed,
        # Left out where they are empty, as in folders of versions that did not keep them.
        **{name: values for name, values in options.items() if values},
    }


def _settings(cell: Cell, data: str) -> dict[str, Any]:
    """Return what answers depend on in the set; its rows are stood for by their fingerprint, so
    that a file may move."""
    told = json.loads(cell.questions.model_dump_json())
    for source in told["data"]["sources"]:
        for key in ("path", "format", "subset", "split", "made_by", "limit"):
            del source[key]
    for reward in told["rewards"].values():
        for key in ("workers", "concurrency", "env"):
            del reward[key]
    return {"set": told, "rows": data}


def _answer(work: Work, cells: Sequence[Cell], launcher: Launcher, loop: LoopThread) -> None:
    """Serve a model, and have it answer all questions that it has not answered yet."""
    todo = [cell for cell in cells if work.open_prompts(cell)]
    if not todo:
        return
    logger.info("%s: starting the engines", work.examinee.name)
    decode = make_decode(load_tokenizer(work.config.model))
    longest = max(cell.questions.max_tokens for cell in cells)
    with serving(work.config, launcher, loop, decode, longest) as served:
        for cell in todo:
            with judging(cell.name, cell.questions, work.config, launcher) as router:
                loop.run(_answer_cell(work, cell, served, router))


async def _answer_cell(work: Work, cell: Cell, served: ServedModel, router: RewardRouter) -> None:
    """Answer the open questions of one cell, and keep each answer as soon as it is scored."""
    prompts, answers = work.open_prompts(cell), work.answers[cell.name]
    total = len(work.data[cell.set_name])
    logger.info(
        "%s, %s: %d of %d questions to answer, %d responses each",
        work.examinee.name,
        cell.name,
        len(prompts),
        total,
        cell.questions.samples_per_prompt,
    )
    tags = Counter(prompt.tag for prompt in prompts)
    expected = {tag: float(n * cell.questions.samples_per_prompt) for tag, n in tags.items()}
    # In a thread, as below: it waits for other processes.
    await asyncio.to_thread(router.begin_step, expected, Purpose.VALIDATION)
    run_group, votes = served.run_group(cell.questions, router), votes_of(cell.questions)
    room = asyncio.Semaphore(work.config.max_in_flight_groups)

    async def one(prompt: Prompt) -> None:
        async with room:
            group = await run_group(GroupTask(prompt, 0))
        # Long responses are fetched from other processes.
        await asyncio.to_thread(answers.add, group, votes)

    await all_or_first_error([one(prompt) for prompt in prompts])


def _write(works: Sequence[Work], cells: Sequence[Cell], out: Path) -> list[Line]:
    """Write the results of all models, one table and one page; return the lines of the table."""
    several = len({cell.set_name for cell in cells}) < len(cells)
    lines: list[Line] = []
    for work in works:
        own = [work.line(cell, cell.name if several else cell.set_name) for cell in cells]
        config = json.loads(work.config.model_dump_json())
        told = config | {"engine": config["actor_infer"]["strategy"]}
        write_results(out / work.examinee.name, own, told)
        lines += own
    replace_file(out / "table.md", markdown_of(lines))
    replace_file(out / "results.html", results_page(lines))
    return lines
