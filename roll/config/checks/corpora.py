"""Rules between corpora and the tools that search them; see `roll.config.checks.common`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roll.config.agentic_base import AgenticBase
from roll.config.errors import nearest
from roll.config.sections.environment import EnvironmentConfig


def corpus_problems(config: AgenticBase) -> Iterator[str]:
    """Yield corpora in unknown pools, or with an adapter; and tools that search unknown corpora, or
    that do not reach them."""
    for name, corpus in config.corpora.items():
        if corpus.pool not in config.pools:
            yield (
                f"corpora.{name}.pool: no pool {corpus.pool!r}{nearest(corpus.pool, config.pools)} "
                f"(pools: {', '.join(config.pools)})"
            )
        if corpus.model.lora is not None:
            yield f"corpora.{name}.model.lora: an encoder is not trained; drop it"
    known = ", ".join(config.corpora) or "none"
    for name, environment in config.environments.items():
        for corpus_name in _searched(environment):
            if corpus_name not in config.corpora:
                yield (
                    f"environments.{name}.kwargs.tools: no corpus {corpus_name!r}"
                    f"{nearest(corpus_name, config.corpora)} (corpora: {known})"
                )
            if environment.process or environment.python is not None:
                yield (
                    f"environments.{name}.process: a process of its own does not reach the corpora "
                    "of the run; drop `process` and `python`, or search a file (`corpus`)"
                )


def _searched(environment: EnvironmentConfig) -> Iterator[str]:
    """Yield the corpora that the tools of an environment search; what has another form is refused
    where tools are loaded."""
    tools = environment.kwargs.get("tools", ())
    for entry in tools if isinstance(tools, list | tuple) else ():
        search = entry.get("search") if isinstance(entry, Mapping) else None
        dense = search.get("dense") if isinstance(search, Mapping) else None
        if isinstance(dense, str):
            yield dense
