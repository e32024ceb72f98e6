"""The text of a response that a stop string has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from roll.core.completion import Completion, FinishReason
from roll.core.types import SamplingParams

PIECES = ["a", "b", "ab", "ba", "aab", "c"]
"""Text of each token."""


def decode(tokens: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in tokens)


def ended(tokens: Sequence[int], finish: FinishReason = FinishReason.STOP) -> Completion:
    return Completion.of(tokens, [0.0] * len(tokens), [0] * len(tokens), finish)


@given(
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
)
def test_the_text_ends_before_its_first_stop_string_or_with_it(
    tokens: list[int], stops: list[str]
) -> None:
    stopping = SamplingParams(1.0, 12, stop=tuple(stops))
    cutting = replace(stopping, stop_in_text=False)
    ends = (n for n in range(1, len(tokens) + 1) if any(s in decode(tokens[:n]) for s in stops))
    tokens = tokens[: next(ends, len(tokens))]
    whole = decode(tokens)
    assert stopping.text_of(ended(tokens), decode) == whole
    places = [place for place in map(whole.find, stops) if place >= 0]
    assert cutting.text_of(ended(tokens), decode) == whole[: min(places, default=len(whole))]
    assert cutting.text_of(ended(tokens, FinishReason.LENGTH), decode) == whole


def test_what_the_engine_did_not_take_for_a_stop_string_stays() -> None:
    cutting = SamplingParams(1.0, 12, stop=("c",), stop_in_text=False)
    assert cutting.text_of(ended([0, 5, 1]), decode) == "acb", "another token has ended it"
