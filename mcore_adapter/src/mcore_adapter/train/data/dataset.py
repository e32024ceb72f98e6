"""Data files as flat arrays of tokens, made by one rank and mapped by all."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mcore_adapter.errors import ConfigError, DataError
from mcore_adapter.load import read_config
from mcore_adapter.train.data.encode import (
    Encode,
    Encoded,
    encode_answer,
    encode_pair,
    encode_text,
)
from mcore_adapter.train.settings import Settings

ENCODE: dict[str, Encode] = {"pretrain": encode_text, "sft": encode_answer, "dpo": encode_pair}
_TOKENIZER_FILES = ("*token*", "chat_template*", "vocab*", "merges*", "*.model")


@dataclass(frozen=True)
class Dataset:
    """Sequences behind each other; those of one example are neighbours."""

    name: str
    """The digest of what it was made of."""
    tokens_N: Tensor
    trained_N: Tensor
    bounds_S: Tensor
    """Where each sequence starts, and where the last one ends."""
    sequences_each: int
    """Sequences of an example."""
    rows: int
    skipped: int
    """Rows that were too long, or had nothing left to train on when they were cut."""
    cut: int
    """Rows that were truncated or split."""

    @property
    def summary(self) -> str:
        """What became of the rows."""
        parts = [f"{self.rows:,} rows"]
        if self.skipped:
            parts.append(f"{self.skipped:,} skipped as too long")
        if self.cut:
            parts.append(f"{self.cut:,} cut to the longest length")
        trained = int(self.trained_N.sum())
        parts.append(f"{len(self):,} examples of {len(self.tokens_N):,} tokens")
        return ", ".join([*parts, f"{trained:,} of them trained on"])

    def __len__(self) -> int:
        """Examples."""
        return (len(self.bounds_S) - 1) // self.sequences_each

    def sequences_of(self, example: int) -> range:
        first = example * self.sequences_each
        return range(first, first + self.sequences_each)

    def lengths_of(self, example: int) -> tuple[int, ...]:
        return tuple(self._lengths[number] for number in self.sequences_of(example))

    def num_trained(self, example: int) -> int:
        sequences = self.sequences_of(example)
        start, end = self.bounds_S[sequences.start], self.bounds_S[sequences.stop]
        return int(self.trained_N[start:end].sum())

    def sequence(self, number: int) -> tuple[Tensor, Tensor]:
        """Its tokens, and which of them are trained on."""
        start, end = self.bounds_S[number], self.bounds_S[number + 1]
        return self.tokens_N[start:end].long(), self.trained_N[start:end]

    @cached_property
    def _lengths(self) -> list[int]:
        lengths: list[int] = self.bounds_S.diff().tolist()
        return lengths


def digest(path: Path, settings: Settings) -> str:
    """Of everything that the tokens of a data file depend on."""
    how = [settings.method, settings.data.max_length, settings.data.too_long]
    found = hashlib.sha256(json.dumps(how).encode())
    model = settings.model
    files = {file for pattern in _TOKENIZER_FILES for file in model.glob(pattern) if file.is_file()}
    for file in [*sorted(files), path]:
        with file.open("rb") as opened:
            found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()[:16]


def prepare(path: Path, target: Path, settings: Settings) -> None:
    """Write the arrays of a data file, unless they are there.

    Raises:
        DataError: a row that cannot be used, with its file and line.
        ConfigError: the model's folder has no tokenizer that can be used.
    """
    if target.is_file():
        return
    tokenizer = load_tokenizer(settings.model)
    made = _Arrays(read_config(settings.model)["vocab_size"])
    for line, row in _rows(path):
        try:
            example = ENCODE[settings.method](row, tokenizer)
            made.add(example, settings.data.max_length, settings.data.too_long)
        except DataError as error:
            raise DataError(f"{path}:{line}: {error}") from error
    if not made.trained:
        raise DataError(
            f"{path} has no rows to train on: of {made.rows}, {made.skipped} are too long"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_suffix(".partial")
    save_file(made.tensors(), aside)
    aside.rename(target)


def load_tokenizer(model: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's folder; code in the folder is never run.

    Raises:
        ConfigError: there is none, or only one with code of its own.
    """
    try:
        # Left out, transformers asks a person at a terminal whether to run the code.
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        hint = (
            "; its code is not run here: save the tokenizer as a tokenizer.json beside the model"
            if "custom code" in reason[0]
            else ""
        )
        raise ConfigError(
            f"{model} has no tokenizer that can be used: {reason[0]}{hint}"
        ) from error


def read_arrays(path: Path) -> dict[str, Tensor]:
    """
    Raises:
        DataError: the file is damaged.
    """
    try:
        return load_file(path)
    except SafetensorError as error:
        raise DataError(f"{path} is damaged: {error}; remove it, it is made again") from error


def read(target: Path, name: str, sequences_each: int) -> Dataset:
    """What `prepare` wrote, mapped into memory.

    Raises:
        DataError: the file is damaged.
    """
    found = read_arrays(target)
    rows, skipped, cut = found["counts"].tolist()
    return Dataset(
        name=name,
        tokens_N=found["tokens"],
        trained_N=found["trained"],
        bounds_S=found["bounds"],
        sequences_each=sequences_each,
        rows=rows,
        skipped=skipped,
        cut=cut,
    )


@dataclass
class _Arrays:
    """Grow by an example at a time; lists of numbers would take seven times the memory."""

    vocab: int
    tokens: array[int] = field(default_factory=lambda: array("i"))
    trained: bytearray = field(default_factory=bytearray)
    bounds: array[int] = field(default_factory=lambda: array("q", [0]))
    rows: int = 0
    skipped: int = 0
    cut: int = 0

    def add(self, example: tuple[Encoded, ...], longest: int, too_long: str) -> None:
        self.rows += 1
        length = max(len(sequence.tokens) for sequence in example)
        beyond = max(max(sequence.tokens) for sequence in example)
        if beyond >= self.vocab:
            raise DataError(
                f"token {beyond} is beyond the vocabulary of {self.vocab}: the tokenizer is of "
                "another model"
            )
        if length <= longest:
            self._append(example)
        elif too_long == "error":
            raise DataError(
                f"it has {length} tokens, data.max_length is {longest}; raise that, or say what to "
                "do with data.too_long"
            )
        elif too_long == "skip":
            self.skipped += 1
        elif too_long == "split":
            self.cut += 1
            for piece in _pieces(example[0], longest):
                self._append((piece,))
        else:
            shorter = tuple(sequence.part(0, longest) for sequence in example)
            differ = len({tuple(sequence.tokens) for sequence in shorter}) == len(shorter)
            if differ and all(any(sequence.trained) for sequence in shorter):
                self.cut += 1
                self._append(shorter)
            else:
                self.skipped += 1

    def tensors(self) -> dict[str, Tensor]:
        return {
            "tokens": torch.frombuffer(self.tokens, dtype=torch.int32),
            "trained": torch.frombuffer(self.trained, dtype=torch.bool),
            "bounds": torch.frombuffer(self.bounds, dtype=torch.int64),
            "counts": torch.tensor([self.rows, self.skipped, self.cut]),
        }

    def _append(self, example: tuple[Encoded, ...]) -> None:
        for sequence in example:
            self.tokens.extend(sequence.tokens)
            self.trained.extend(sequence.trained)
            self.bounds.append(len(self.tokens))


def _pieces(sequence: Encoded, longest: int) -> Iterator[Encoded]:
    """Each starts with the last token of the one before, so that every token is predicted once."""
    for start in range(0, len(sequence.tokens) - 1, longest - 1):
        yield sequence.part(start, start + longest)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows and their lines, counted from 1; blank lines are none."""
    with path.open("rb") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{line}: no JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}:{line}: {type(row).__name__}, expected an object")
            yield line, row
