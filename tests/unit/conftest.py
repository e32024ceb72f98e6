"""Fixtures of unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rlvr_file import RUN


@pytest.fixture
def run_file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """File with the text `RUN` of the test's module, or that of `tests/rlvr_file.py`."""
    path = tmp_path / "run.yaml"
    path.write_text(vars(request.module).get("RUN", RUN))
    return path
