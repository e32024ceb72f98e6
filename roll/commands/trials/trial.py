"""Trials of `roll check`: the configs of models, rows of each source through the tokenizer, and one
row through each reward.

This takes seconds, most of them for importing the tokenizer's library, which happens only if there
is something to try. Nothing is downloaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from roll.commands.trials.parts import try_parts
from roll.commands.trials.result import Trial
from roll.commands.trials.tasks import try_tasks
from roll.commands.trials.user_code import wrong_code
from roll.config.agentic_base import AgenticBase
from roll.config.errors import UserError
from roll.config.offline import DistillationConfig, SftConfig
from roll.config.offline_base import OfflineConfig, PreferenceConfig
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig
from roll.config.sections.data import FileConfig
from roll.config.sections.model import ModelConfig
from roll.config.user_code.import_path import searched_first
from roll.core.errors import ConfigError, DataError, NotMadeYetError, RowError
from roll.core.hub import is_cached, similar_folder
from roll.data.sources import raw_rows, resolve_format

if TYPE_CHECKING:
    from roll.data.datasets import Source, SourceReport

LOOKED_AT = 1000
"""Number of rows that are tried of each source."""

Make = Callable[[str, FileConfig], "tuple[Source[Any], SourceReport]"]


def try_out(config: RunConfig, folder: Path) -> Trial:
    """Try the first rows of each source, the rewards on these rows if the rows are correct, and the
    parts that the user brought; nothing of it if the user's code cannot be called.

    Args:
        config: the run to try.
        folder: folder of the user's modules, which a source or a reward may name.
    """
    with searched_first(folder):
        if wrong := wrong_code(config, folder):
            return Trial(wrong=wrong)
        trial = _try_rows(config, folder)
        if not trial.wrong:
            _try_models(config, trial)
        try_parts(config, trial)
    return trial


def _try_rows(config: RunConfig, folder: Path) -> Trial:
    """Try rows, and what scores them; see `try_out`."""
    if isinstance(config, RlvrBase) and not config.generates:
        trial = Trial()
        trial.told.append(f"samples of {config.rollout.replay}: no rows and no rewards are tried")
        return trial
    if isinstance(config, AgenticBase):
        trial = try_tasks(config, folder)
        _try_template(config, trial)
        _try_sandboxes(config, trial)
        return trial
    trial = try_data(config)
    if isinstance(config, RlvrBase) and not trial.wrong:
        from roll.commands.trials.rewards import try_rewards

        _try_sandboxes(config, trial)
        if not trial.wrong:
            try_rewards(config.rewards, folder, trial, config.judges)
    return trial


def _try_models(config: RunConfig, trial: Trial) -> None:
    """Read the config.json of each model that lies in a folder; add the mistakes to `trial`, such
    as a model that the installed transformers does not know."""
    from roll.models.load import load_config

    for key, model in config.models.items():
        if Path(model.path).expanduser().is_dir():
            try:
                load_config(model)
            except UserError as error:
                trial.wrong.append(ConfigError(f"{key}: {error}"))


def _try_sandboxes(config: RlvrBase, trial: Trial) -> None:
    from roll.commands.trials.sandboxes import try_sandboxes  # imports what only rewards need

    try_sandboxes(config, trial)


def _try_template(config: AgenticBase, trial: Trial) -> None:
    """Tell whether the chat template rewrites earlier turns, where no environment says what is to
    be done then; and try it where one does. Nothing is tried if the tokenizer is not here."""
    model = config.train_model
    if not config.data.chat_template or not _is_here(model):
        return
    from roll.data.chat.templates import DatedTokenizer
    from roll.data.chat.turns import Turns
    from roll.envs.contexts import check_history, rewrites_turns
    from roll.models.load import load_tokenizer

    try:
        tokenizer = DatedTokenizer(load_tokenizer(model, fetch=False), datetime.now())
        turns = Turns(tokenizer, config.data, frozenset())
        rewriting = rewrites_turns(turns)
        for name, environment in config.environments.items():
            check_history(name, environment, turns)
            if rewriting and "history" not in environment.model_fields_set:
                trial.told.append(
                    f"environments.{name}: the chat template drops the thoughts of earlier turns; "
                    "they stay in the context (history: keep), `history: fork` would drop them"
                )
    except UserError as error:
        trial.wrong.append(error)


def try_data(config: RunConfig) -> Trial:
    """Tokenize the first rows of each source that is on this machine; return what was found.
    Mistakes are in `wrong` of the result, and are not raised."""
    trial = Trial()
    sources = dict(_sources_here(config, trial))
    named = _row_names(config)
    if not sources:
        return trial
    model = config.train_model
    if not _is_here(model):
        trial.untried += [f"{name} (no tokenizer)" for name in sources]
        name = model.tokenizer or model.path
        similar = similar_folder(name)
        hint = "" if similar is None else f"; did you mean {similar!r}?"
        trial.told.append(
            f"no rows tried: the tokenizer of {name} is not on this machine yet{hint}"
        )
        return trial
    try:
        make = _maker(config)
    except UserError as error:
        trial.wrong.append(error)
        return trial
    whole: dict[str, Source[Any]] = {}
    for name, source in sources.items():
        try:
            made, report, partly = _first_rows(make, named[name], source)
            _check_rows(config, name, made, report)
            for item in made.items if isinstance(config, RlvrBase) else ():
                trial.rows.setdefault(item.tag, item)
        except UserError as error:
            trial.wrong.append(error)
            continue
        if not partly:
            whole[name] = made
            trial.counted[name] = report.kept
        _note_mean(config, trial, name, report)
        first = "the first " if partly else ""
        trial.told.append(
            f"{source.path}: {report.kept} of {first}{report.rows} rows kept, "
            f"{_longest(report, _most_tokens(config))}"
        )
        trial.remarks += [f"{source.path}: {remark}" for remark in report.remarks]
        if 2 * report.kept < report.rows:
            trial.remarks.append(
                f"{source.path}: only {report.kept} of {first}{report.rows} rows would be "
                "trained on"
            )
    has_sets = isinstance(config, RlvrBase | OfflineConfig) and config.validation.sets
    if has_sets and not trial.wrong:
        from roll.commands.trials.overlap import try_overlap

        rows = {name: whole.get(name) for name in sources}
        try_overlap(config, trial, rows, lambda name: make(named[name], sources[name])[0], sources)
    return trial


def _longest(report: SourceReport, limit: int) -> str:
    """Return how long the rows of a source are, and how long those are that the limit allows."""
    allowed = max((tokens for tokens in report.lengths if tokens <= limit), default=0)
    if report.longest_tokens <= limit:
        return f"the longest has {allowed} of at most {limit} tokens"
    return (
        f"the longest that fits has {allowed} of at most {limit} tokens, the longest of all "
        f"{report.longest_tokens}"
    )


def _note_mean(config: RunConfig, trial: Trial, name: str, report: SourceReport) -> None:
    """Note how long the rows of a source are. A pair has two lengths, and is left out."""
    most = _most_tokens(config)
    lengths = [tokens for tokens in report.lengths if tokens <= most]
    if lengths and not isinstance(config, PreferenceConfig):
        trial.mean_tokens[name] = sum(lengths) / len(lengths)


def _first_rows(
    make: Make, name: str, source: FileConfig
) -> tuple[Source[Any], SourceReport, bool]:
    """Return the first rows of a source, and whether there are more; all rows if the first ones
    would be refused: a run judges the whole file, which may be sorted, and tells all mistakes."""
    if next(itertools.islice(raw_rows(source), LOOKED_AT, None), None) is None:
        return *make(name, source), False
    try:
        return *make(name, source.model_copy(update={"limit": LOOKED_AT})), True
    except DataError as error:
        from roll.commands.trials.overlap import is_large

        if isinstance(error, RowError) and is_large(source):
            raise  # it tells of the first rows; all would take minutes
        return *make(name, source), False


def _row_names(config: RunConfig) -> dict[str, str]:
    """Return the name that ids of rows begin with, by the key of their source in the config."""
    from roll.data.datasets import named_sources

    assert isinstance(config, RlvrBase | OfflineConfig)
    data: Any = config.data
    names = {f"data.sources.{i}": name for i, name in enumerate(named_sources(data.sources))}
    return names | {f"validation.sets.{name}": name for name in config.validation.sets}


def _sources_here(config: RunConfig, trial: Trial) -> Iterator[tuple[str, FileConfig]]:
    """Yield the sources and validation sets that are files or folders, each with its key in the
    config.

    Those on the hub, and missing ones with `made_by`, are recorded in `trial` as untried.

    Raises:
        DataError: any other source is missing, or its format is unknown.
    """
    assert isinstance(config, RlvrBase | OfflineConfig)
    data: Any = config.data  # each pipeline has its own class; all have sources
    named = {f"data.sources.{i}": source for i, source in enumerate(data.sources)}
    named |= {f"validation.sets.{name}": each for name, each in config.validation.sets.items()}
    for name, source in named.items():
        try:
            if resolve_format(source) == "hub":
                trial.told.append(f"{source.path}: on the hub, no rows tried")
                trial.untried.append(f"{name} (on the hub)")
            else:
                yield name, source
        except NotMadeYetError:
            trial.told.append(f"{source.path}: not made yet, no rows tried")
            trial.untried.append(f"{name} (not made yet)")


def _is_here(model: ModelConfig) -> bool:
    """Return True if the tokenizer of the model can be loaded without a download."""
    name = model.tokenizer or model.path
    return Path(name).expanduser().is_dir() or is_cached(name)


def _maker(config: RunConfig) -> Make:
    """Return the function that makes tokenized rows of a source, as in a run; UserError if the
    tokenizer or its chat template cannot be used, or it lacks a token that a sampling names."""
    from roll.data.chat.templates import DatedTokenizer
    from roll.data.chat.variables import check_variables
    from roll.data.datasets import source_prompts
    from roll.data.examples import preferences_of, texts_of
    from roll.models.load import load_tokenizer
    from roll.models.vocabulary import check_token_ids
    from roll.runtime.run_data import placeholders

    # The present serves as the date in chat templates: another date does not change the length.
    plain = load_tokenizer(config.train_model, fetch=False)
    tokenizer = DatedTokenizer(plain, datetime.now())
    make: Any
    assert isinstance(config, RlvrBase | OfflineConfig)
    check_variables("data.chat_template_kwargs", config.data.chat_template_kwargs, plain)
    seen = placeholders(config.train_model, config.data.pictures, fetch=False)
    if isinstance(config, RlvrBase):
        check_token_ids(config.samplings | config.validation_samplings, plain)
        make = partial(source_prompts, data=config.data, tokenizer=tokenizer, placeholders=seen)
    elif isinstance(config, SftConfig | DistillationConfig):
        make = texts_of(config.data, tokenizer, seen).source
    else:
        assert isinstance(config, PreferenceConfig)
        make = preferences_of(config.data, tokenizer, seen).source
    return cast(Make, make)


def _check_rows(config: RunConfig, name: str, made: Source[Any], report: SourceReport) -> None:
    """Raise DataError unless rewards and teachers take the tags of a source's rows, and ConfigError
    if the engine takes no pictures and a row has some. Validation sets of RLVR need no teacher.

    Args:
        name: key of the source in the config.
        made: rows of the source, with their report `report`.
    """
    from roll.data.datasets import Dataset
    from roll.runtime.run_data import check_pictures, check_tags

    dataset, trained_on = Dataset((made,), (report,), ""), name.startswith("data.")
    if isinstance(config, RlvrBase):
        check_pictures(dataset, config.actor_infer.strategy)
        if config.rewards:
            check_tags(dataset, "reward", config.rewards.values())
        if config.teachers and trained_on:
            check_tags(dataset, "teacher", config.teachers.values())
    if isinstance(config, DistillationConfig):
        check_tags(dataset, "teacher", config.teachers.values())


def _most_tokens(config: RunConfig) -> int:
    """Return the configured limit of tokens of a row: of its prompt for RLVR, else of all of it."""
    if isinstance(config, RlvrBase):
        return config.data.max_prompt_tokens
    assert isinstance(config, OfflineConfig)
    return config.data.max_tokens
