"""`KeptSums`: the file of a checkpoint with the log-probs of the reference that are known."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from roll.core.errors import CheckpointError

logger = logging.getLogger(__name__)

FILE = "reference_sums.parquet"
_MADE_OF = b"made_of"
"""Key of `KeptSums.made_of` in the file's metadata."""


@dataclass(frozen=True)
class KeptSums:
    """Reader and writer of the summed log-probs of the responses of each row, by its id."""

    made_of: str
    """Text that describes the model that computes them, and the rows: those that have changed may
    have the ids of others."""

    def write(self, folder: Path, sums: Mapping[str, list[float]]) -> None:
        """Write the sums into a checkpoint that is not complete yet."""
        import pyarrow as pa  # at its first use, as in `roll/data/readers.py`
        import pyarrow.parquet as pq

        ids = pa.array(list(sums), pa.string())
        values = pa.array(list(sums.values()), pa.list_(pa.float64()))
        table = pa.table([ids, values], ["id", "sums"])
        pq.write_table(table.replace_schema_metadata({_MADE_OF: self.made_of}), folder / FILE)

    def read(self, checkpoint: Path) -> dict[str, list[float]]:
        """Return the sums of a checkpoint; nothing, with a warning, if they are of another model or
        of other rows. An older checkpoint has none.

        Raises:
            CheckpointError: the file is damaged.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not (checkpoint / FILE).is_file():
            return {}
        try:
            table = pq.read_table(checkpoint / FILE)
            found = table["id"].to_pylist(), table["sums"].to_pylist()
        except (OSError, KeyError, pa.ArrowException) as error:
            raise CheckpointError(f"{checkpoint / FILE} cannot be read: {error}") from None
        if (table.schema.metadata or {}).get(_MADE_OF) != self.made_of.encode():
            logger.warning(
                "%s: the reference of this run or a row of its validation is another, so the "
                "reference scores all rows anew",
                checkpoint,
            )
            return {}
        return dict(zip(*found, strict=True))
