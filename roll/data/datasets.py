"""Sources -> tokenized prompts, with a report of what was left out and a fingerprint."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from roll.config.data import DataConfig, SourceConfig
from roll.core.errors import DataError
from roll.core.types import Prompt
from roll.data.sources import read_source
from roll.data.templates import PromptTokenizer, render_prompts, tokenize_prompts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What became of one source's rows.

    Example: SourceReport(name="gsm8k", kept=990, too_long=10, longest_tokens=1830)
    """

    name: str
    kept: int
    too_long: int
    """Rows left out because their prompt is longer than `max_prompt_tokens`."""
    longest_tokens: int
    """Tokens of the longest prompt, also of those left out."""


@dataclass(frozen=True, slots=True)
class PromptSource:
    """The prompts of one source, in file order."""

    name: str
    """File stem or dataset name; unique in a dataset."""
    weight: float
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class PromptDataset:
    """All prompts of a run, source by source."""

    sources: tuple[PromptSource, ...]
    report: tuple[SourceReport, ...]
    fingerprint: str
    """Hash of ids, tokens, answers and tags; differs when any of them does."""

    def __len__(self) -> int:
        return sum(len(source.prompts) for source in self.sources)

    @property
    def prompts(self) -> list[Prompt]:
        """All prompts, source after source."""
        return [prompt for source in self.sources for prompt in source.prompts]

    @classmethod
    def load(
        cls,
        sources: Sequence[SourceConfig] | Mapping[str, SourceConfig],
        data: DataConfig,
        tokenizer: PromptTokenizer,
        *,
        base_dir: Path | None = None,
    ) -> PromptDataset:
        """Read, render and tokenize.

        Args:
            sources: training sources, or validation sets by name (the name then begins the ids).
            data: template settings and the limit of prompt tokens.
            tokenizer: of the model that will read the prompts.
            base_dir: where relative paths begin; the working directory when left out.

        Raises:
            DataError: a source cannot be read, or all its prompts are too long.
        """
        named = dict(sources) if isinstance(sources, Mapping) else _named(sources)
        loaded = [_load(name, source, data, tokenizer, base_dir) for name, source in named.items()]
        kept = tuple(source for source, _ in loaded)
        return cls(kept, tuple(report for _, report in loaded), _fingerprint(kept))


def _load(
    name: str,
    source: SourceConfig,
    data: DataConfig,
    tokenizer: PromptTokenizer,
    base_dir: Path | None,
) -> tuple[PromptSource, SourceReport]:
    rows = read_source(source, base_dir)
    texts = render_prompts(rows, tokenizer, data, source.system)
    tokens = tokenize_prompts(texts, tokenizer, data)
    prompts = tuple(
        Prompt(
            id=f"{name}:{number}",
            tokens=ids,
            text=text,
            answer=row.answer,
            tag=row.tag,
            extra=row.extra,
        )
        for number, (row, text, ids) in enumerate(zip(rows, texts, tokens, strict=True))
        if len(ids) <= data.max_prompt_tokens
    )
    longest = max(len(ids) for ids in tokens)
    report = SourceReport(name, len(prompts), len(rows) - len(prompts), longest)
    if not prompts:
        raise DataError(
            f"{source.path}: all {len(rows)} prompts are longer than max_prompt_tokens = "
            f"{data.max_prompt_tokens} (the longest has {longest}); raise `data.max_prompt_tokens`"
        )
    empty = next((prompt.id for prompt in prompts if not prompt.tokens), None)
    if empty is not None:
        raise DataError(f"{source.path}: prompt {empty} has no tokens; give it a text")
    _log(report, data.max_prompt_tokens)
    return PromptSource(name, source.weight, prompts), report


def _log(report: SourceReport, limit: int) -> None:
    if report.too_long:
        log.warning(
            "source %s: %d prompts kept, %d left out because they are longer than "
            "max_prompt_tokens = %d (the longest has %d tokens)",
            report.name,
            report.kept,
            report.too_long,
            limit,
            report.longest_tokens,
        )
    else:
        log.info("source %s: %d prompts", report.name, report.kept)


def _named(sources: Sequence[SourceConfig]) -> dict[str, SourceConfig]:
    """Sources by file stem (the last part of a hub name); a second one of a stem gets a number."""
    named: dict[str, SourceConfig] = {}
    for source in sources:
        path = Path(source.path)
        stem = path.stem or "source"
        name, number = stem, 2
        while name in named:
            name, number = f"{stem}-{number}", number + 1
        named[name] = source
    return named


def _fingerprint(sources: Sequence[PromptSource]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        digest.update(json.dumps([source.name, len(source.prompts)]).encode())
        for prompt in source.prompts:
            record = [prompt.id, prompt.tokens, prompt.answer, prompt.tag]
            digest.update(json.dumps(record).encode())
    return digest.hexdigest()[:32]
