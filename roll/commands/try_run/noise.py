"""`noise`: a reward that differs between siblings, so that a policy which cannot do its task has
something to learn from."""

from __future__ import annotations

from zlib import crc32

from roll.core.types import Sample


def noise(sample: Sample) -> float:
    """Return a number from 0 to 1 that depends on the id of the sample only."""
    return crc32(sample.id.encode()) % 1001 / 1000
