"""What all tests on a GPU have in common."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

SWITCH = "TORCHDYNAMO_DISABLE"


@pytest.fixture(scope="module", autouse=True)
def _compiling() -> Iterator[None]:
    """Let PyTorch and vLLM compile, as in a run; all other tests switch that off."""
    before = os.environ.pop(SWITCH, None)
    yield
    if before is not None:
        os.environ[SWITCH] = before
