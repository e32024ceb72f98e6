"""Datasets: data files as flat arrays of tokens, written by one rank and mapped by all ranks."""

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
    """Dataset of sequences of tokens, one after the other. An example has 1 or 2 sequences.

    N is the number of tokens of the dataset, S is the number of sequences plus 1.
    """

    name: str
    """Hash of everything that the tokens depend on, see `digest`."""
    tokens_N: Tensor
    """Tokens of all sequences, int32 `[N]`."""
    trained_N: Tensor
    """True for tokens that the model learns to predict, bool `[N]`."""
    bounds_S: Tensor
    """Start of each sequence in the arrays, then the end of the last sequence, int64 `[S]`."""
    sequences_per_example: int
    """Number of sequences of an example."""
    rows: int
    """Number of rows of the data file."""
    skipped: int
    """Number of rows that were left out. They were too long, or nothing was left to train on after
    truncation."""
    cut: int
    """Number of rows that were truncated or split."""

    @property
    def summary(self) -> str:
        """Summary for the user: numbers of rows, examples and tokens."""
        parts = [f"{self.rows:,} rows"]
        if self.skipped:
            parts.append(f"{self.skipped:,} skipped as too long")
        if self.cut:
            parts.append(f"{self.cut:,} cut to the longest length")
        trained = int(self.trained_N.sum())
        parts.append(f"{len(self):,} examples of {len(self.tokens_N):,} tokens")
        return ", ".join([*parts, f"{trained:,} of them trained on"])

    def __len__(self) -> int:
        """Return the number of examples."""
        return (len(self.bounds_S) - 1) // self.sequences_per_example

    def sequences_of(self, example: int) -> range:
        """Return the numbers of the sequences of an example."""
        first = example * self.sequences_per_example
        return range(first, first + self.sequences_per_example)

    def lengths_of(self, example: int) -> tuple[int, ...]:
        """Return the number of tokens of each sequence of an example."""
        return tuple(self._lengths[number] for number in self.sequences_of(example))

    def num_trained(self, example: int) -> int:
        """Return the number of trained tokens of an example."""
        sequences = self.sequences_of(example)
        start, end = self.bounds_S[sequences.start], self.bounds_S[sequences.stop]
        return int(self.trained_N[start:end].sum())

    def sequence(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of a sequence, int64, and the marks of its trained tokens, bool."""
        start, end = self.bounds_S[number], self.bounds_S[number + 1]
        return self.tokens_N[start:end].long(), self.trained_N[start:end]

    @cached_property
    def _lengths(self) -> list[int]:
        return self.bounds_S.diff().tolist()


def digest(path: Path, settings: Settings) -> str:
    """Return a hash, 16 hexadecimal digits, of all that the tokens of a data file depend on.

    This is the data file, the tokenizer, the method and the treatment of long sequences.
    """
    how = [settings.method, settings.data.max_length, settings.data.too_long]
    found = hashlib.sha256(json.dumps(how).encode())
    model = settings.model
    files = {file for pattern in _TOKENIZER_FILES for file in model.glob(pattern) if file.is_file()}
    for file in [*sorted(files), path]:
        with file.open("rb") as opened:
            found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()[:16]


def prepare(path: Path, target: Path, settings: Settings) -> None:
    """Encode a data file and write its arrays, unless the target exists. For one rank only.

    Args:
        path: data file.
        target: safetensors file for the arrays.

    Raises:
        DataError: a row cannot be used (the message has its file and line), or no row is left to
            train on.
        ConfigError: the folder of the model has no usable tokenizer.
        OSError: the data file cannot be read, or the target not written.
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
    """Load the tokenizer of a model's folder. Code in the folder is never run.

    Raises:
        ConfigError: the folder has no tokenizer, or one that needs code in the folder.
    """
    try:
        # Without this argument transformers asks the user at a terminal whether to run the code.
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
    """Map the arrays of a safetensors file into memory.

    Raises:
        DataError: the file is damaged.
    """
    try:
        return load_file(path)
    except SafetensorError as error:
        raise DataError(f"{path} is damaged: {error}; remove it, it is made again") from error


def read(target: Path, name: str, sequences_per_example: int) -> Dataset:
    """Return the dataset that `prepare` wrote, mapped into memory.

    Args:
        target: file that `prepare` wrote.
        name: name of the dataset, see `digest`.
        sequences_per_example: number of sequences of an example.

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
        sequences_per_example=sequences_per_example,
        rows=rows,
        skipped=skipped,
        cut=cut,
    )


@dataclass
class _Arrays:
    """Arrays of a dataset that grow by one example at a time.

    Lists of Python numbers would take seven times the memory.
    """

    vocab: int
    tokens: array[int] = field(default_factory=lambda: array("i"))
    trained: bytearray = field(default_factory=bytearray)
    bounds: array[int] = field(default_factory=lambda: array("q", [0]))
    rows: int = 0
    skipped: int = 0
    cut: int = 0

    def add(self, example: tuple[Encoded, ...], longest: int, too_long: str) -> None:
        """Add the example of a row; cut it or skip it if it is too long.

        Args:
            example: sequences of the row.
            longest: largest number of tokens of a sequence.
            too_long: treatment of longer sequences, see `Data.too_long`.

        Raises:
            DataError: a token is beyond the vocabulary, or a sequence is too long for `error`.
        """
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
        """Return the arrays by their names in the file; they share the memory of this object."""
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
    """Split a sequence into pieces of at most `longest` tokens, which must be at least 2.

    Each piece starts with the last token of the piece before, so that every token except the first
    is predicted exactly once.
    """
    for start in range(0, len(sequence.tokens) - 1, longest - 1):
        yield sequence.part(start, start + longest)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row with the number of its line, counted from 1. Blank lines are skipped.

    Raises:
        DataError: a line is no JSON object.
    """
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
