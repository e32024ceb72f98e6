"""Checks of a manifest before any tensor is sent, by the receivers and between the senders."""

from __future__ import annotations

from collections.abc import Mapping

from roll.core.errors import WeightSyncError
from roll.weight_sync.manifest import Manifest


def check_shapes(
    manifest: Manifest,
    expected: Mapping[str, tuple[int, ...]],
    *,
    optional: frozenset[str],
    held: frozenset[str] = frozenset(),
) -> None:
    """Refuse a push that does not fit the model `expected`.

    Args:
        expected: tensor name -> shape, for every tensor of the engine's checkpoint.
        optional: names of tensors that may be left out, such as a head tied to the embedding.
        held: names of tensors that this receiver got in earlier pushes. Only these may be left out
            as unchanged.

    Raises:
        WeightSyncError: a tensor is missing, unknown or of another shape; the message names it.
    """
    given = {meta.name: meta.shape for meta in manifest.tensors}
    problems = []
    if missing := sorted(expected.keys() - given.keys() - optional - manifest.unchanged):
        problems.append(f"{len(missing)} tensors are missing, e.g. {missing[0]!r}")
    if unknown := sorted((given.keys() | manifest.unchanged) - expected.keys() - optional):
        problems.append(f"{len(unknown)} tensors are unknown, e.g. {unknown[0]!r}")
    problems += [
        f"{name!r} has shape {list(given[name])}, expected {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in given and given[name] != shape
    ][:3]
    if problems:
        raise WeightSyncError(
            "the pushed weights do not fit the engine's model: "
            + "; ".join(problems)
            + "; trainer and engine must start from the same checkpoint"
        )
    if never_sent := sorted(manifest.unchanged - held):
        raise WeightSyncError(
            f"{len(never_sent)} tensors stay away as unchanged, e.g. {never_sent[0]!r}, but this "
            "engine never received them; push all tensors to it first"
        )


def check_same(own: Manifest, leaders: Manifest, sender: int) -> None:
    """Refuse to take part in a push whose manifest differs from this sender's own.

    Raises:
        WeightSyncError: the leading sender's manifest differs.
    """
    if own != leaders:
        raise WeightSyncError(
            f"sender {sender} has another manifest than the leading sender; all ranks of the "
            "trainer must hold the same model"
        )
