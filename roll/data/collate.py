"""Functions that build batches from examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from roll.core.batches import LabelledBatch, PreferenceBatch, TrainBatch
from roll.core.errors import DataError
from roll.data.chat.tokenization import TokenSequence
from roll.data.examples import Example


def text_batch(examples: Sequence[Example]) -> TrainBatch:
    """Build a batch with one row per example: its first sequence, padded with zeros at the end."""
    rows = _rows([example.sequences[0] for example in examples])
    return TrainBatch(**rows)


def pair_batch(examples: Sequence[Example]) -> PreferenceBatch:
    """Build a batch with two rows per example: the chosen response, then the rejected one; a
    missing margin becomes 0."""
    rows = _rows([each for example in examples for each in example.sequences])
    margins = [example.margin or 0.0 for example in examples for _ in example.sequences]
    return PreferenceBatch(**rows, margins=torch.tensor(margins))


def scored_pair_batch(examples: Sequence[Example]) -> PreferenceBatch:
    """Build a batch as `pair_batch` does, for a reward model.

    The loss mask is True only at the last token of each row, where its score is read.
    """
    batch = pair_batch(examples)
    last_BT = torch.arange(batch.tokens.shape[1]) == batch.lengths[:, None] - 1
    return replace(batch, loss_mask=last_BT)


def labelled_batch(examples: Sequence[Example]) -> LabelledBatch:
    """Build a batch with one row per response, labelled wanted or unwanted.

    A pair gives two rows: the chosen response is wanted, the rejected one is not.
    """
    rows = _rows([each for example in examples for each in example.sequences])
    wanted = [
        label
        for example in examples
        for label in ((True, False) if example.label is None else (example.label,))
    ]
    return LabelledBatch(**rows, desirable=torch.tensor(wanted))


def mismatched(examples: Sequence[Example], max_tokens: int) -> list[Example]:
    """Combine each prompt with the response to the previous prompt, cut to `max_tokens` tokens.

    The first prompt gets the response to the last one. Each sequence gives one example, with the
    label True. There is at least one example, and each sequence has a trained token.

    Raises:
        DataError: a picture follows a trained token.
    """
    made: list[Example] = []
    for example, before in zip(examples, [examples[-1], *examples[:-1]], strict=True):
        for j, own in enumerate(example.sequences):
            other = before.sequences[j % len(before.sequences)]
            if own.pictures is not None and own.pictures.places[-1] > own.num_before:
                raise DataError(
                    f"row {example.id}: a picture behind an answer, which kto compares with other "
                    "prompts; give such rows to another loss"
                )
            moved = own.num_before - other.num_before
            sequence = TokenSequence(
                (*own.tokens[: own.num_before], *other.tokens[other.num_before :]),
                tuple((start + moved, stop + moved) for start, stop in other.trained),
                own.pictures,
            )
            cut = sequence.without_end(max_tokens)
            made.append(Example(f"mismatched:{len(made)}", (cut,), label=True))
    return made


def _rows(sequences: Sequence[TokenSequence]) -> dict[str, Any]:
    """Return padded tokens, lengths, the mask of trained tokens and the pictures, by name of the
    column; the first token of a row is never trained."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    shape = len(sequences), int(lengths.max())
    tokens_BT = torch.zeros(shape, dtype=torch.long)
    mask_BT = torch.zeros(shape, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        tokens_BT[row, : len(sequence)] = torch.tensor(sequence.tokens)
        for start, stop in sequence.trained:
            # No model output predicts the first token, so it cannot be trained.
            mask_BT[row, max(start, 1) : stop] = True
    pictures = [sequence.pictures for sequence in sequences]
    return {
        "tokens": tokens_BT,
        "lengths": lengths,
        "loss_mask": mask_BT,
        "pictures": pictures if any(pictures) else None,
    }
