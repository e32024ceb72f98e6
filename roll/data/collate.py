"""Examples -> batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from roll.core.batches import LabelledBatch, PreferenceBatch, TrainBatch
from roll.data.chat.tokenization import TokenSequence
from roll.data.examples import Example


def text_batch(examples: Sequence[Example]) -> TrainBatch:
    """One row each."""
    tokens, lengths, mask = _rows([example.sequences[0] for example in examples])
    return TrainBatch(tokens=tokens, lengths=lengths, loss_mask=mask)


def pair_batch(examples: Sequence[Example]) -> PreferenceBatch:
    """Two rows each: the chosen one, then the rejected one."""
    tokens, lengths, mask = _rows([each for example in examples for each in example.sequences])
    margins = [example.margin or 0.0 for example in examples for _ in example.sequences]
    return PreferenceBatch(
        tokens=tokens, lengths=lengths, loss_mask=mask, margins=torch.tensor(margins)
    )


def scored_pair_batch(examples: Sequence[Example]) -> PreferenceBatch:
    """As `pair_batch`, with the last token of each row as the one that its score is read at."""
    batch = pair_batch(examples)
    last_BT = torch.arange(batch.tokens.shape[1]) == batch.lengths[:, None] - 1
    return replace(batch, loss_mask=last_BT)


def labelled_batch(examples: Sequence[Example]) -> LabelledBatch:
    """One row for each response, wanted or not; a pair has one of each."""
    tokens, lengths, mask = _rows([each for example in examples for each in example.sequences])
    wanted = [
        label
        for example in examples
        for label in ((True, False) if example.label is None else (example.label,))
    ]
    return LabelledBatch(
        tokens=tokens, lengths=lengths, loss_mask=mask, desirable=torch.tensor(wanted)
    )


def _rows(sequences: Sequence[TokenSequence]) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    shape = len(sequences), int(lengths.max())
    tokens_BT = torch.zeros(shape, dtype=torch.long)
    mask_BT = torch.zeros(shape, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        tokens_BT[row, : len(sequence)] = torch.tensor(sequence.tokens)
        for start, stop in sequence.trained:
            # Nothing comes before the first token, so there is no distribution to learn it from.
            mask_BT[row, max(start, 1) : stop] = True
    return tokens_BT, lengths, mask_BT
