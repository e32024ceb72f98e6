"""Samples as HTML: prompt, response, reward and parts; turns of agents; pictures; differences."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from roll.report.markup import Markup, element, join, text
from roll.report.samples import Choice, Kept, over_training, siblings_apart, worth_reading

MAX_TEXT = 3000
"""Number of characters of a text that are shown."""
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass
class Pictures:
    """Pictures in a page, up to a number of bytes; each file is embedded once for each use."""

    left: int
    """Number of bytes that may still be used."""

    def shown(self, path: Path) -> Markup:
        """Return a picture, or a sentence that says why it is not shown."""
        try:
            data = path.read_bytes()
        except OSError:
            return element("em", f"[{path.name} is missing]")
        if not data.startswith(_PNG):
            return element("em", f"[{path.name} is no picture]")
        size = 4 * len(data) // 3
        if size > self.left:
            return element("em", f"[picture {path.parent.name}/{path.name}]")
        self.left -= size
        coded = base64.b64encode(data).decode()
        return element("img", src=f"data:image/png;base64,{coded}", alt=path.name)


def cut(value: str, limit: int = MAX_TEXT) -> str:
    """Return a text without its middle if it is longer than `limit`."""
    if len(value) <= limit:
        return value
    half = limit // 2
    end = value[len(value) - half :]
    return f"{value[:half]}\n[... {len(value) - 2 * half} characters ...]\n{end}"


def samples_section(
    steps: Mapping[int, Sequence[Kept]], pictures: Pictures, *, limit: int
) -> Markup:
    """Return the samples of a run that are worth reading.

    Args:
        steps: kept samples by step.
        pictures: gets the pictures.
        limit: number of characters of a text that are shown.
    """
    if not steps:
        return element("p", "The run kept no samples (track.rollouts_every).")
    order = sorted(steps)
    shown = list(dict.fromkeys([order[-1], order[0], order[len(order) // 2]]))
    parts = []
    for step in shown:
        cards = [_card(choice, pictures, limit) for choice in worth_reading(steps[step])]
        parts.append(
            element(
                "details",
                element("summary", f"Step {step}: best, worst, surprising"),
                element("div", *cards, class_="cards"),
                **({"open": ""} if step == order[-1] else {}),
            )
        )
    pair = siblings_apart(steps[order[-1]])
    if pair is not None:
        parts.append(_difference(*pair, limit))
    same = over_training(steps, prompts=4)
    if same:
        parts.append(_side_by_side(same, limit))
    return join(parts)


def _card(choice: Choice, pictures: Pictures, limit: int) -> Markup:
    row = choice.sample
    return element(
        "article",
        element("h4", choice.why, " ", _reward_mark(row)),
        element("div", f"{row.id} · {row.tag} · {row.tokens} tokens · {row.finish}", class_="dim"),
        element("pre", cut(row.prompt, limit), class_="prompt"),
        *(pictures.shown(path) for path in row.pictures),
        _turns(row, limit) if row.turns else element("pre", cut(row.response, limit)),
        element("div", f"answer: {cut(row.answer, 300)}", class_="dim"),
        _parts(row),
    )


def _turns(row: Kept, limit: int) -> Markup:
    """Return an episode turn by turn."""
    said = []
    for turn in row.turns:
        mine = turn.get("by") == "policy"
        reward = turn.get("reward")
        paid = f" · reward {reward:g}" if isinstance(reward, int | float) and reward else ""
        said.append(
            element(
                "div",
                element("b", ("policy" if mine else "environment") + paid),
                element("pre", cut(str(turn.get("text", "")), limit)),
                class_="turn mine" if mine else "turn",
            )
        )
    return join(said)


def _reward_mark(row: Kept) -> Markup:
    if row.reward is None:
        return element("span", "no reward", class_="mark")
    return element("span", f"reward {row.reward:.4g}", class_="mark")


def _parts(row: Kept) -> Markup:
    told = [f"{name} {value:.4g}" for name, value in row.parts.items()]
    if row.logprob is not None:
        told.append(f"log-prob {row.logprob:.3g} a token")
    return element("div", " · ".join(told), class_="dim")


def _difference(better: Kept, worse: Kept, limit: int) -> Markup:
    """Return two siblings, with the words marked that only one of them has."""
    mine, other = (cut(row.response, limit).split(" ") for row in (better, worse))
    left: list[Markup] = []
    right: list[Markup] = []
    matcher = SequenceMatcher(None, mine, other, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        one, two = " ".join(mine[a:b]), " ".join(other[c:d])
        same = kind == "equal"
        left.append(text(one) if same else element("ins", one))
        right.append(text(two) if same else element("del", two))
    space = Markup(" ")
    return element(
        "details",
        element("summary", f"Step {better.step}: two siblings whose rewards differ most"),
        element("pre", cut(better.prompt, limit), class_="prompt"),
        element(
            "div",
            *(
                element(
                    "article",
                    element("h4", _reward_mark(row)),
                    element("pre", Markup(space.join(said))),
                )
                for row, said in ((better, left), (worse, right))
            ),
            class_="cards",
        ),
    )


def _side_by_side(prompts: Sequence[Sequence[Kept]], limit: int) -> Markup:
    """Return the same prompts at several steps, one column for each of up to four steps."""
    rows = []
    for found in prompts:
        places = sorted({round(i * (len(found) - 1) / 3) for i in range(4)})
        cells = [
            element(
                "article",
                element("h4", f"step {found[place].step} ", _reward_mark(found[place])),
                element("pre", cut(found[place].response, limit)),
            )
            for place in places
        ]
        rows.append(element("pre", cut(found[0].prompt, limit), class_="prompt"))
        rows.append(element("div", *cells, class_="cards"))
    return element("details", element("summary", "The same prompts over training"), *rows)
