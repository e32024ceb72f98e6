"""Rows that are longer than the limit: cut, left out or refused, as configured."""

from __future__ import annotations

from roll.config.sections.data import RowsConfig
from roll.core.errors import RowError
from roll.data.chat.tokenization import TokenSequence
from roll.data.store.tally import DroppedRows


def fitted(
    sequences: tuple[TokenSequence, ...], data: RowsConfig, place: str, losses: DroppedRows
) -> tuple[TokenSequence, ...] | None:
    """Cut the sequences of a row to `data.max_tokens` as configured, and note it in `losses`; None
    if the row is left out.

    Raises:
        DataError: a sequence is too long and `data.too_long` is `refuse`.
    """
    limit, longest = data.max_tokens, max(map(len, sequences))
    if longest <= limit:
        return sequences
    what = f"more than {limit} tokens"
    if data.too_long == "refuse":
        raise RowError(
            f"{place}: {longest} tokens are more than data.max_tokens = {limit}; raise it, or let "
            "data.too_long say what becomes of such rows: drop, cut_start or cut_end"
        )
    cut: list[TokenSequence] = []
    if any(sequence.pictures for sequence in sequences):
        losses.note(f"{what} and pictures, which are never cut", place)
        return None
    if data.too_long == "cut_start":
        surplus = longest - limit
        if all(surplus < sequence.num_before for sequence in sequences):
            # Both sequences of a pair lose equally many tokens, so they still share their prompt.
            cut = [sequence.without_start(surplus) for sequence in sequences]
    elif data.too_long == "cut_end":
        cut = [sequence.without_end(limit) for sequence in sequences]
    if not cut or not all(sequence.trained for sequence in cut):
        losses.note(what, place)
        return None
    if len(cut) == 2 and cut[0].tokens == cut[1].tokens:
        losses.note("equal answers after the cut", place)
        return None
    losses.note(f"{what}, which were cut,", place, stays=True)
    return tuple(cut)
