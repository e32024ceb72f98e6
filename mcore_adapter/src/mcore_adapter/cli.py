"""Command line: `mcore-adapter to-mcore|to-hf|convert|check|train`.

Importing this module is fast. Only `train` needs torch, transformers and megatron; the commands
that convert or check do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mcore_adapter import __version__
from mcore_adapter.convert.arrays import FLOATS
from mcore_adapter.convert.conversions import Settings
from mcore_adapter.convert.storage.signals import Stopped, signals_raised
from mcore_adapter.errors import McoreAdapterError, printable
from mcore_adapter.parallel_sizes import ParallelSizes

app = typer.Typer(
    help="Hugging Face checkpoints in Megatron-Core parallel layouts, and back.",
    epilog="Exit codes: 0 done; 1 an error; 2 an option that does not exist; 130 after Ctrl-C; "
    "128 + n ended by signal n.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_STOPPED = 130
"""Exit code after Ctrl-C, the same as in shells."""
_out = Console(highlight=False, soft_wrap=True)
_err = Console(stderr=True, highlight=False, soft_wrap=True)

Src = Annotated[Path, typer.Argument(help="The folder to read.", metavar="SRC")]
Dst = Annotated[Path, typer.Argument(help="The folder to write; must not exist.", metavar="DST")]
Tp = Annotated[int | None, typer.Option("--tp", min=1, help="Tensor parallel ranks.")]
Pp = Annotated[int | None, typer.Option("--pp", min=1, help="Pipeline stages.")]
Vpp = Annotated[int | None, typer.Option("--vpp", min=1, help="Chunks of layers per stage.")]
Ep = Annotated[int | None, typer.Option("--ep", min=1, help="Expert parallel ranks.")]
Etp = Annotated[
    int | None, typer.Option("--etp", min=1, help="Tensor parallel ranks of experts; else --tp.")
]
Layers = Annotated[
    str | None,
    typer.Option("--layers", help="Layers of each chunk, as in 3,5,5,3; else even."),
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="fp32, bf16 or fp16; else as it is.")]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Processes; else one per core.")
]
Flush = Annotated[
    bool,
    typer.Option("--flush", help="Wait for the disk, so that a power failure takes nothing back."),
]
Base = Annotated[
    Path | None, typer.Option("--base", help="The model of an adapter in PEFT format.")
]
Adapter = Annotated[Path | None, typer.Option("--adapter", help="A LoRA adapter of the model.")]
Merge = Annotated[bool, typer.Option("--merge", help="Add the adapter to the weights.")]


def _tell_version(wanted: bool) -> None:
    """Print the version and exit, if `wanted`."""
    if wanted:
        _out.print(f"mcore-adapter {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_tell_version, is_eager=True),
    ] = False,
) -> None:
    """Take the options that stand before the command."""


def size_options(
    tp: Tp = None,
    pp: Pp = None,
    vpp: Vpp = None,
    ep: Ep = None,
    etp: Etp = None,
    layers: Layers = None,
) -> ParallelSizes | None:
    """Return the parallel sizes given as options; None if no option is given.

    Raises:
        McoreAdapterError: `--layers` is not a list of numbers.
    """
    if {tp, pp, vpp, ep, etp, layers} == {None}:
        return None
    try:
        lengths = tuple(int(n) for n in layers.split(",")) if layers is not None else None
    except ValueError:
        raise McoreAdapterError(f"--layers is {layers!r}, expected numbers as in 3,5,5,3") from None
    return ParallelSizes(tp=tp or 1, pp=pp or 1, vpp=vpp or 1, ep=ep or 1, etp=etp, layers=lengths)


def takes_sizes(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that has the options of `size_options` in place of its argument `sizes`.

    The argument gets the result of `size_options`. Errors are printed as `_reported` prints them.
    """
    own, options = signature(command, eval_str=True), signature(size_options, eval_str=True)
    arguments = [p for name, p in own.parameters.items() if name != "sizes"]

    @wraps(command)
    def with_options(**values: Any) -> None:
        with _reported():
            given = {name: values.pop(name) for name in options.parameters}
            command(sizes=size_options(**given), **values)

    taken = [*arguments, *options.parameters.values()]
    taken.sort(key=lambda p: p.default is not Parameter.empty)
    with_options.__signature__ = Signature(taken)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in taken}
    return with_options


@app.command(
    "to-mcore",
    epilog="Example: mcore-adapter to-mcore Qwen3-30B-A3B qwen3-mcore --tp 2 --pp 2 --ep 4",
)
@takes_sizes
def to_mcore(
    src: Src,
    dst: Dst,
    sizes: ParallelSizes | None,
    dtype: Dtype = None,
    workers: Workers = None,
    flush: Flush = False,
    base: Base = None,
) -> None:
    """Convert a Hugging Face checkpoint, an adapter or another layout to a Megatron layout."""
    from mcore_adapter.convert import commands

    with _progress() as settings:
        commands.to_mcore(
            src, dst, sizes or ParallelSizes(), settings(dtype, workers, flush), base=base
        )


@app.command("to-hf", epilog="Example: mcore-adapter to-hf qwen3-mcore qwen3-hf --dtype bf16")
def to_hf(
    src: Src,
    dst: Dst,
    adapter: Adapter = None,
    merge: Merge = False,
    dtype: Dtype = None,
    workers: Workers = None,
    flush: Flush = False,
) -> None:
    """Convert a Megatron layout to Hugging Face files."""
    from mcore_adapter.convert import commands

    with _reported(), _progress() as settings:
        commands.to_hf(src, dst, settings(dtype, workers, flush), adapter=adapter, merge=merge)


@app.command("convert", epilog="Example: mcore-adapter convert qwen3-mcore qwen3-tp8 --tp 8")
@takes_sizes
def convert(
    src: Src,
    dst: Dst,
    sizes: ParallelSizes | None,
    dtype: Dtype = None,
    workers: Workers = None,
    flush: Flush = False,
    base: Base = None,
) -> None:
    """Convert in the direction that SRC calls for.

    A Hugging Face folder becomes a Megatron layout. A Megatron layout becomes another Megatron
    layout if sizes are given, and Hugging Face files if not.
    """
    from mcore_adapter.convert import commands
    from mcore_adapter.convert.storage.folders import META

    with _progress() as settings:
        how = settings(dtype, workers, flush)
        if (src / META).is_file() and sizes is None:
            commands.to_hf(src, dst, how)
        else:
            commands.to_mcore(src, dst, sizes or ParallelSizes(), how, base=base)


@app.command("check", epilog="Example: mcore-adapter check Qwen3-30B-A3B --tp 2 --pp 2 --ep 4")
@takes_sizes
def check(src: Src, sizes: ParallelSizes | None, dtype: Dtype = None, base: Base = None) -> None:
    """Report what a folder holds and how it divides over ranks. Reads file headers only."""
    from mcore_adapter.convert.check import check as report_of
    from mcore_adapter.convert.check import describe

    report = report_of(src, sizes, dtype=_known(dtype), base=base)
    for note in report.notes:
        _note(note)
    _out.print(f"model type   {report.model_type} ({report.kind})")
    types = ", ".join(f"{count:,} {dtype}" for dtype, count in report.dtypes.items())
    _out.print(f"parameters   {report.num_parameters:,} ({types})")
    _out.print(f"bytes        {_size(report.num_bytes)} in {report.num_tensors} tensors")
    for name, fits in report.divides.items():
        _out.print(f"{name + ' divides':<12} {', '.join(map(str, fits))}")
    _out.print(f"bytes of a rank at {describe(report.sizes)}")
    for stage, (dense, experts) in report.rank_bytes.items():
        of_experts = f", {_size(experts)} of it experts" if experts else ""
        _out.print(f"  {stage:<10} {_size(dense + experts)}{of_experts}")
    _out.print("every tensor is mapped")


@app.command("train", epilog="Example: mcore-adapter train sft.yaml layout.tp=2 optimizer.lr=1e-5")
def train(
    config: Annotated[Path, typer.Argument(help="A YAML file.", metavar="CONFIG")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="As in optimizer.lr=1e-5.", metavar="KEY=VALUE")
    ] = None,
) -> None:
    """Pretrain, fine-tune or DPO-train a Hugging Face checkpoint under any parallel layout.

    On several ranks: torchrun --nproc-per-node 8 -m mcore_adapter train CONFIG KEY=VALUE...
    """
    from mcore_adapter.train.settings import read_settings

    with _reported("stopped: checkpoints are as they were; say resume=auto to go on"):
        # Read the settings before the slow imports, so that a typo is reported at once.
        settings = read_settings(config, overrides or ())
        from mcore_adapter.platform import quiet_imports

        with quiet_imports():
            from mcore_adapter.train.setup import train as to_the_end
        if number := to_the_end(settings):
            raise typer.Exit(128 + number)


def main() -> None:
    """Run the command line. The console script `mcore-adapter` calls this function."""
    app()


@contextmanager
def _reported(when_stopped: str = "stopped: nothing was written") -> Iterator[None]:
    """Print an error of the block as one line, and exit with code 1.

    Ctrl-C prints `when_stopped` and exits with code 130. SIGTERM and SIGHUP also print it, and exit
    with 128 plus the number of the signal.
    """
    try:
        yield
    except (McoreAdapterError, OSError) as error:
        _err.print(f"error: {printable(str(error))}", markup=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        _err.print(when_stopped)
        raise typer.Exit(_STOPPED) from None
    except Stopped as stopped:
        _err.print(when_stopped)
        raise typer.Exit(128 + stopped.number) from None


@contextmanager
def _progress() -> Iterator[Callable[[str | None, int | None, bool], Settings]]:
    """Show a progress bar with GB/s, and print the total when the block ends.

    Yields a function that takes dtype, workers and flush and returns the `Settings` of a
    conversion, which report their progress to the bar. The function raises McoreAdapterError if the
    dtype is unknown. In the block, SIGTERM and SIGHUP raise `Stopped`.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    start, total = time.monotonic(), 0
    text = TextColumn("{task.percentage:>3.0f}% {task.fields[rate]}")
    columns = BarColumn(), text, TimeRemainingColumn()
    with (
        signals_raised(),
        Progress(
            *columns,
            console=_err,
            transient=True,
            disable=not _err.is_terminal,
            # Refresh after each tensor: a thread for it would keep the workers from being forked.
            auto_refresh=False,
        ) as bar,
    ):
        task = bar.add_task("", total=None, rate="")

        def announce(num_bytes: int) -> None:
            nonlocal total
            total += num_bytes
            bar.update(task, total=total)

        def advance(num_bytes: int) -> None:
            done = bar.tasks[0].completed + num_bytes
            bar.update(task, completed=done, rate=_rate(done, start), refresh=True)

        def settings(dtype: str | None, workers: int | None, flush: bool) -> Settings:
            return Settings(_known(dtype), workers, advance, _note, announce, flush)

        yield settings
    _out.print(f"wrote {_size(total)} at {_rate(total, start)}")


def _note(text: str) -> None:
    _err.print(f"note: {printable(text)}", markup=False)


def _rate(num_bytes: float, start: float) -> str:
    """Return the mean rate since `start`, a time of `time.monotonic`, as text in GB/s."""
    return f"{num_bytes / 1e9 / max(time.monotonic() - start, 1e-9):.2f} GB/s"


def _size(num_bytes: int) -> str:
    """Return a number of bytes as text in GB, MB or kB, which are powers of 1000."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


def _known(dtype: str | None) -> str | None:
    """Return the value of `--dtype`; raise McoreAdapterError if it is no name in `FLOATS`."""
    if dtype is not None and dtype not in FLOATS:
        raise McoreAdapterError(f"--dtype is {dtype!r}, expected one of {', '.join(FLOATS)}")
    return dtype
