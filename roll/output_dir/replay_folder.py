"""Kept samples of a run as a source to train on (`rollout.replay`), and what they must fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from roll.config.agentic_base import AgenticBase
from roll.config.rlvr_base import RlvrBase
from roll.core.errors import ConfigError, DataError
from roll.output_dir.config_diff import leaves, settings_of
from roll.output_dir.sample_files import Origin, origin_of, sample_files, schema

KEY = "rollout.replay"
EXPECTED = "expected the output_dir of `roll rollout`, or of a run with track.samples=all"
MOST_TOLD = 8
"""Largest number of settings that one message names."""


@dataclass(frozen=True, slots=True)
class ReplayFolder:
    """Folder of a run whose samples another run trains on."""

    path: Path
    files: Mapping[int, Path]
    """Step -> file of its samples."""
    origin: Origin
    """What the samples were made with."""

    def read(self, step: int) -> Any:
        """Return the samples of a step as a table of Arrow; DataError if the file is damaged."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.ParquetFile(self.files[step]).read()
        except (OSError, pa.ArrowException) as error:
            raise _damaged(self.files[step], error) from error


def open_replay(config: RlvrBase, steps: range, made_by: RlvrBase | None = None) -> ReplayFolder:
    """Return the folder that `rollout.replay` names, if a run can train on its samples. Only the
    ends of its files are read.

    Args:
        steps: steps that the run has to do.
        made_by: config with which the samples were made; None: that in their folder.

    Raises:
        ConfigError: it is no folder of a run, it is that of this run, or its samples were made with
            other settings.
        DataError: samples of some steps are missing, or a file is damaged, or of an earlier
            version.
    """
    assert config.rollout.replay is not None
    path = Path(config.rollout.replay).expanduser()
    if not path.is_dir():
        raise ConfigError(f"{KEY}: {path} is no folder; {EXPECTED}")
    here, own = path.resolve(), Path(config.output_dir).expanduser().resolve()
    if here == own or here in own.parents or own in here.parents:
        raise ConfigError(
            f"{KEY}: {path} and output_dir = {config.output_dir} are in one another, and a run "
            "clears its own samples when it begins; give this run another output_dir"
        )
    files = sample_files(path, "train")
    if not files or not (path / "config.yaml").is_file():
        lacks = "no config.yaml" if files else "no samples of steps (samples/train)"
        raise ConfigError(f"{KEY}: {path} has {lacks}; {EXPECTED}")
    _check_settings(config, path, made_by or _maker(config, path / "config.yaml"))
    _check_steps(files, steps, path)
    origins = {_origin(files[step], config.samples_per_step) for step in steps}
    if len(origins) > 1:
        raise DataError(f"{KEY}: the files of {path} were made with different models; {EXPECTED}")
    return ReplayFolder(path, files, origins.pop() if origins else _origin(files[min(files)], None))


def _maker(config: RlvrBase, file: Path) -> RlvrBase:
    """Return the config in a file; ConfigError unless it is one of the pipeline of `config`."""
    told = settings_of(file)
    if told.get("pipeline") != config.pipeline:
        raise ConfigError(
            f"{KEY}: {file.parent} is a run of pipeline: {told.get('pipeline')}, this one is of "
            f"{config.pipeline}; name a run of the same pipeline"
        )
    try:
        return type(config).model_validate_json(json.dumps(told))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{KEY}: {file} is not of this version: {where}: {first['msg']}; make the samples again"
        ) from None


def _check_settings(config: RlvrBase, path: Path, made_by: RlvrBase) -> None:
    """Raise ConfigError unless the settings by which samples are made are those with which the
    samples of `path` were made."""
    then, now = dict(_making(made_by)), dict(_making(config))
    changed = [
        f"{key}: {then.get(key, 'unset')} there, {now.get(key, 'unset')} here"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    ]
    if changed:
        more = [f"and {len(changed) - MOST_TOLD} more"] if len(changed) > MOST_TOLD else []
        raise ConfigError(
            f"{KEY}: the samples of {path} were made with other settings, which a run that trains "
            "on them must not change:\n  " + "\n  ".join([*changed[:MOST_TOLD], *more])
        )


def _making(config: RlvrBase) -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of every setting by which samples are made and scored."""
    values = config.model_dump(mode="json")
    values["rollout"] = {**values["rollout"], "replay": None}
    values["data"] = {**values["data"], "cache": None}  # a place on disk
    own = {"rewards", "filters", "sampling"}
    values["domains"] = {
        tag: {key: value for key, value in domain.items() if key in own}
        for tag, domain in values["domains"].items()
    }
    names = ["data", "sampling", "rollout", "rewards", "judges", "domains"]
    if isinstance(config, AgenticBase):
        names += ["environments", "opponents", "corpora"]
    yield from leaves({name: values[name] for name in names})


def _check_steps(files: Mapping[int, Path], steps: range, path: Path) -> None:
    """Raise DataError unless there is a file for each step."""
    missing = [step for step in steps if step not in files]
    if not missing:
        return
    more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
    advice = "let the run that keeps them go on"
    if steps.start == 0 and missing[0] > 0:
        advice = f"set max_steps={missing[0]}, or {advice}"
    raise DataError(
        f"{KEY}: {path} has samples of {len(files)} steps ({min(files)} to {max(files)}), and this "
        f"run trains on the steps {steps.start} to {steps.stop - 1}: step {missing[0]}{more} "
        f"missing; {advice}"
    )


def _origin(file: Path, samples: int | None) -> Origin:
    """Return what the samples of a file were made with.

    Args:
        samples: number of samples of a step; None: any.

    Raises:
        DataError: the file is damaged, lacks columns, or has another number of samples.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        opened = pq.ParquetFile(file)
        columns, rows = opened.schema_arrow, opened.metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise _damaged(file, error) from error
    wrong = [one.name for one in schema() if one.name not in columns.names]
    if wrong:
        raise DataError(
            f"{file} lacks columns that training needs: {', '.join(wrong)}; it was changed, or "
            "written by an earlier version, make the samples again"
        )
    wrong = [one.name for one in schema() if columns.field(one.name).type != one.type]
    origin = origin_of(columns)
    if wrong or origin is None:
        what = f"has other types in {', '.join(wrong)}" if wrong else "names no tokenizer"
        raise DataError(f"{file} {what}: another program has written it; make the samples again")
    if samples is not None and rows != samples:
        raise DataError(
            f"{file} has {rows} samples, and a step of this run trains on {samples}; let the run "
            "that keeps the samples write it again"
        )
    return origin


def _damaged(file: Path, error: Exception) -> DataError:
    """Return the error for a file that cannot be read."""
    told = " ".join(str(error).split())[:300]
    return DataError(f"{file} cannot be read: {told}; make the samples of this step again")
