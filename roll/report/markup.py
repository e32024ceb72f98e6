"""HTML as a type of its own: every other text is escaped where it enters."""

from __future__ import annotations

import html
import re

_UNSHOWN = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]"
)
"""Characters that HTML forbids, or that turn the direction of what stands after them."""


class Markup(str):
    """Finished HTML, which is not escaped again."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Return a text as HTML that shows exactly its characters; those that cannot be shown become
    U+FFFD."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(_UNSHOWN.sub("\ufffd", str(value))))


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element with children, which are escaped unless they are `Markup`.

    Args:
        name: name of the element.
        children: its content.
        attributes: its attributes; a `_` at the end of a name is dropped, another one becomes `-`.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items()
    )
    if name in ("img", "meta", "br"):
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{''.join(map(text, children))}</{name}>")


def join(parts: list[Markup]) -> Markup:
    """Return the parts one behind another."""
    return Markup("".join(parts))
