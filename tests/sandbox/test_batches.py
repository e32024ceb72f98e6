"""Batches of the sandbox, jobs that are cancelled at odd moments, and limits that are none."""

from __future__ import annotations

from typing import Any

import pytest

from roll.sandbox import Limits


@pytest.mark.parametrize("name", ["processes", "output_bytes", "files"])
@pytest.mark.parametrize("value", [0, 3.5, 8.0, True, "3"])
def test_a_limit_that_counts_is_a_whole_number(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected a whole number above 0, got"):
        Limits(**{name: value})
