"""Parcels hold what was packed, whoever shares an object with whom."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from roll.distributed.remote_values import SHARED_BYTES, fetch, store


@given(st.lists(st.integers(0, 2 * SHARED_BYTES), max_size=30), st.randoms())
def test_what_is_unpacked_is_what_was_packed(sizes: list[int], rng: Random) -> None:
    values = [f"value {i}" for i in range(len(sizes))]
    remote_values = store(values, sizes)
    assert fetch(remote_values, timeout_s=1, what="values") == values
    order = rng.sample(range(len(values)), len(values))
    some = fetch([remote_values[i] for i in order], timeout_s=1, what="values")
    assert some == [values[i] for i in order]
    size_of = dict(zip(values, sizes, strict=True))
    for remote_value in remote_values:
        together = remote_value.content
        assert isinstance(together, list)
        assert len(together) == 1 or sum(map(size_of.__getitem__, together)) <= SHARED_BYTES


def test_small_values_share_an_object() -> None:
    remote_values = store(["a", "b", "c"], [10, 10, SHARED_BYTES])
    assert remote_values[0].content is remote_values[1].content
    assert remote_values[1].content is not remote_values[2].content
