"""Commands on models and on the output_dir of runs: merge, average, report, compare, watch,
samples, replay, eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roll.cli.shared import ERR, OUT, Debug, Overrides, leave_out_triton, reported, told_if_slow
from roll.config.errors import UserError

EVALUATIONS = Path("outputs/eval")


def merge(
    source: Annotated[Path, typer.Argument(help="A checkpoint, or the output_dir of a run.")],
    target: Annotated[Path, typer.Argument(help="The Hugging Face folder to write.")],
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code of the model's folder, if named.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write the trained model of a checkpoint as one Hugging Face folder, and load it as a
    check."""
    with reported(debug):
        from roll.output_dir.checkpoints import checkpoint_of, require_free

        require_free(target)
        checkpoint_of(source)
        with told_if_slow():
            from roll.commands.merge import merge as merged
            from roll.distributed.processes.shutdown import orderly_end

        with orderly_end():
            merged(source, target, trust_remote_code=trust_remote_code)


def average(
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="Hugging Face folders, or checkpoints; or one output_dir, with --last."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The Hugging Face folder to write.")],
    last: Annotated[
        int | None, typer.Option(min=2, help="Number of newest checkpoints of the run to take.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code of the model's folder, if named.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write the mean of the weights of several models, or checkpoints of a run, as one model."""
    with reported(debug):
        from roll.output_dir.checkpoints import require_free

        require_free(out)
        with told_if_slow():
            from roll.commands.average import average as averaged
            from roll.distributed.processes.shutdown import orderly_end

        with orderly_end():
            averaged(sources, out, last=last, trust_remote_code=trust_remote_code)


def report(
    folders: Annotated[list[Path], typer.Argument(help="The output_dir of each run.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file to write.")] = None,
    debug: Debug = False,
) -> None:
    """Write a page about a run, or about several that are compared: curves, alarms, samples."""
    with reported(debug):
        from roll.commands.report import write_report

        OUT.print(str(write_report(folders, out)), markup=False)


def compare(
    folders: Annotated[list[Path], typer.Argument(help="The output_dir of each run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """Show runs side by side: settings that differ, curves, first, best and last values. Runs that
    differ in their seed only are one."""
    with reported(debug):
        from roll.commands.compare import as_json as json_of
        from roll.commands.compare import compared, comparison

        groups = compared(folders)
        if as_json:
            OUT.out(json_of(groups), highlight=False)
        else:
            OUT.print(comparison(groups))


def watch(
    folder: Annotated[Path, typer.Argument(help="The output_dir of a run.")],
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page of the run to browsers of this machine.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of --serve; 0, or left out: any free one."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show how it is now, and end.")] = False,
    debug: Debug = False,
) -> None:
    """Follow a run: how far it is, alarms, curves, times; until it has ended."""
    with reported(debug):
        if serve and once:
            raise UserError("--once shows the run in the terminal, --serve as a page: take one")
        if port is not None and not serve:
            raise UserError("--port is that of the page of --serve: give --serve, too, or no port")
        from roll.commands import watch as watching

        if serve:
            watching.serve(folder, lambda line: OUT.print(line, markup=False), port=port or 0)
        else:
            watching.watch(folder, once=once)


def samples(
    folder: Annotated[Path, typer.Argument(help="The output_dir of a run.")],
    where: Annotated[
        str | None, typer.Option(help="Condition, such as \"reward < 0 and tag == 'math'\".")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Step of training or of validations.")] = None,
    sort: Annotated[
        str | None, typer.Option(help="Smallest first, such as 'reward', or '-reward'.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Largest number of samples.")] = 20,
    full: Annotated[bool, typer.Option("--full", help="Show long texts whole.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line, with token ids and log-probs.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Show samples that a run has kept (docs/samples.md)."""
    with reported(debug):
        from roll.commands.samples.find import Question
        from roll.commands.samples.printing import print_samples

        question = Question(where, step, sort, limit, tokens=as_json)
        print_samples(folder, question, OUT, ERR, full=full, as_json=as_json)


def replay(
    folder: Annotated[Path, typer.Argument(help="The output_dir of a run.")],
    step: Annotated[int, typer.Option(min=0, help="Number of the step.")],
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Do one step of a run again, from its checkpoint and kept samples, and compare the metrics
    (docs/replay.md)."""
    with reported(debug):
        leave_out_triton()
        from roll.commands.replay import find_again
        from roll.commands.replay import replay as replayed

        again = find_again(folder, step, overrides or ())
        OUT.print(f"from {again.begins}: {len(again.steps)} step(s)", markup=False)
        from roll.commands.preloads import forking

        with forking(again.config) as fork_server:
            lines = replayed(again, fork_server)
        for line in lines:
            sign = f"differs by {abs(line.then - line.now):.3g}" if line.differs else ""
            OUT.print(f"{line.name:<34}{line.then:>24.17g}{line.now:>24.17g}  {sign}", markup=False)
        wrong = [line.name for line in lines if line.differs]
        told = f"{len(wrong)} differ: {', '.join(wrong)}" if wrong else "all equal to the bit"
        OUT.print(f"{len(lines)} metrics of step {step}, then and now; {told}", markup=False)


def evaluate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            help="Folders of models, names on the hub, output_dirs of runs; then values that win "
            "over the sets, such as sampling.max_new_tokens=512 (docs/eval.md).",
            metavar="MODEL",
        ),
    ],
    sets: Annotated[
        str, typer.Option(help="Sets of questions: shipped ones by name, files of yours by path.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of answers and results.")] = EVALUATIONS,
    checkpoint: Annotated[str, typer.Option(help="Steps of checkpoints of the run: 10,20.")] = "",
    engine: Annotated[str, typer.Option(help="vllm, sglang or hf.")] = "vllm",
    temperature: Annotated[
        str, typer.Option(help="Temperatures, such as 0,0.6; 0 is greedy, with one response.")
    ] = "",
    samples: Annotated[
        int | None, typer.Option("--samples", "-n", min=1, help="Responses to each question.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure models, or checkpoints of a run, on sets of questions: means with intervals, pass@k,
    maj@k. What is answered already is not generated again."""
    with reported(debug):
        leave_out_triton()
        from roll.commands.eval.asked import Asked, look_for

        asked = Asked(
            arguments=tuple(arguments),
            sets=sets,
            out=out,
            checkpoints=checkpoint,
            engine=engine,
            temperatures=temperature,
            samples=samples,
        )
        look_for(asked)  # before the imports, so that a misspelt name shows at once
        with told_if_slow():
            from roll.commands.eval.command import run_evaluation
            from roll.commands.eval.results import table_of

        OUT.print(table_of(run_evaluation(asked)))
        OUT.print(f"everything is in {out}/", markup=False)
