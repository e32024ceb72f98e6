"""What the math reward's child processes run: equivalence of two answers through math-verify.

Nothing here protects itself: huge powers, deep nesting and endless simplification end with the
process, whose time and memory are bounded from outside (see child.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable


def make_checker() -> Callable[[tuple[str, str]], bool]:
    """Import math-verify (about a second) and return the check of one (truth, answer) pair."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # It warns once that its timeouts are off, which is on purpose.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def parsed(text: str) -> list[object]:
        # A box makes math-verify take the text as a whole, and not the first number in it.
        return list(parse(f"\\boxed{{{text}}}", targets, parsing_timeout=None))

    def equivalent(pair: tuple[str, str]) -> bool:
        truth, answer = pair
        return bool(verify(parsed(truth), parsed(answer), timeout_seconds=None))

    # The first parse builds the grammar's tables; the first sample must not pay for it.
    equivalent(("\\frac{1}{2}", "x^2"))
    return equivalent
