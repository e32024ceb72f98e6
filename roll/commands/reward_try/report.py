"""Tables of `roll reward try`: scores, parts, latency and failures, of rewards and of few single
responses; and confusion with labels."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, quantiles

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from roll.commands.reward_try.responses import NOTHING, OTHER, OWN
from roll.commands.reward_try.tries import RewardTry, Tried

PASS = 0.5
"""Score, or label, from which on a response counts as right."""
SHOWN = 5
"""Number of failures, and of disagreements, that are shown of each reward."""
SHOWN_CHARS = 70
SHOWN_EACH = 20
"""Largest number of responses that are listed, each with its scores."""


def score_table(tries: Sequence[RewardTry]) -> Table:
    """Return a table with a line for each reward, with scores, failures and latency, and below it a
    line for each of its parts."""
    table = Table("reward", "samples", "mean", "low", "high", "failed", "p50", "p95")
    table.columns[0].no_wrap = True
    for one in tries:
        times = [_time(one.tried, percent) for percent in (50, 95)]
        failed = str(len(one.failures)) + (", too many" if one.would_stop_a_run else "")
        cells = (one.name, str(len(one.tried)), *_span(_scores(one.tried)), failed, *times)
        table.add_row(*map(Text, cells))
        for part, values in _parts(one.tried).items():
            cells = (f"  {part}", str(len(values)), *_span(values))
            table.add_row(*map(Text, cells), style="dim")
    return table


def kinds_lines(tries: Sequence[RewardTry]) -> list[str]:
    """Return a line for each reward with its mean score of each kind of made responses."""
    lines = []
    for one in tries:
        told = []
        for kind in (OWN, OTHER, NOTHING):
            scores = _scores([each for each in one.tried if each.response.kind == kind])
            if scores:
                told.append(f"{fmean(scores):.3g} for {kind}")
        if told:
            lines.append(f"{one.name}: {', '.join(told)}")
    return lines


def response_table(tries: Sequence[RewardTry]) -> Table | None:
    """Return a table with a line for each response, with its scores; None if there are more than
    `SHOWN_EACH`."""
    found = {id(each.response): each for one in tries for each in one.tried}
    if not found or len(found) > SHOWN_EACH:
        return None
    table = Table("row", *(escape(one.name) for one in tries), "response")
    for column in table.columns[:-1]:
        column.no_wrap = True
    scores = [{id(each.response): _score_of(each) for each in one.tried} for one in tries]
    for key, each in found.items():
        row, _, text = _named(each).partition(" ")
        kind = f"{each.response.kind}: " if each.response.kind else ""
        cells = (row, *(of.get(key, "") for of in scores), f"{kind}{text}")
        table.add_row(*map(Text, cells))
    return table


def _score_of(one: Tried) -> str:
    """Return the score as text; `failed` if there is none."""
    reward = one.scored.reward if one.scored.failure is None else None
    return "failed" if reward is None else f"{reward.score:.3g}"


def confusion_table(tries: Sequence[RewardTry]) -> Table | None:
    """Return a table that compares scores with labels; None if there are no labels. From `PASS` on,
    a score or a label counts as right."""
    labelled = {one.name: [t for t in one.tried if t.response.label is not None] for one in tries}
    if not any(labelled.values()):
        return None
    table = Table(
        "reward",
        "right, passed",
        "right, refused",
        "wrong, passed",
        "wrong, refused",
        "failed",
        "agree",
    )
    for name, tried in labelled.items():
        scored = [(_passes(one), _is_right(one)) for one in tried if one.scored.reward]
        counts = [scored.count(pair) for pair in _PAIRS]
        agree = f"{(counts[0] + counts[3]) / len(scored):.1%}" if scored else "-"
        table.add_row(escape(name), *map(str, counts), str(len(tried) - len(scored)), agree)
    return table


_PAIRS = ((True, True), (False, True), (True, False), (False, False))
"""(passed, right) in the order of the columns."""


def detail_lines(tries: Sequence[RewardTry]) -> list[str]:
    """Return lines about the first failures, and the first disagreements with labels."""
    lines = []
    for one in tries:
        if one.stopped is not None:
            lines.append(f"{one.name}: stops a run: {one.stopped}")
        by_reason: dict[str, list[Tried]] = {}
        for each in one.failures:
            by_reason.setdefault(str(each.scored.failure), []).append(each)
        for reason, failed in [*by_reason.items()][:SHOWN]:
            more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
            lines.append(f"{one.name}: failed on {_named(failed[0])}{more}: {reason}")
        wrong = [
            each
            for each in one.tried
            if each.scored.reward and each.response.label is not None
            if _passes(each) != _is_right(each)
        ]
        lines += [
            f"{one.name}: scored {each.scored.reward.score:.3g}, label {each.response.label:g}, "
            f"{_named(each)}"
            for each in wrong[:SHOWN]
            if each.scored.reward
        ]
    return lines


def show(tries: Sequence[RewardTry], out: Console) -> None:
    """Print the scores of all rewards, and of the responses if they are few, their confusion with
    labels, and what failed."""
    out.print(score_table(tries))
    for line in kinds_lines(tries):
        out.print(f"  {line}", markup=False)
    listed = response_table(tries)
    if listed is not None:
        out.print(listed)
    confusion = confusion_table(tries)
    if confusion is not None:
        out.print(f"labels, from {PASS:g} on right:", confusion)
    for line in detail_lines(tries):
        out.print(line, markup=False, style="yellow")


def _scores(tried: Sequence[Tried]) -> list[float]:
    """Return the scores, without those that replace a failure."""
    good = [one for one in tried if one.scored.failure is None]
    return [one.scored.reward.score for one in good if one.scored.reward]


def _span(values: Sequence[float]) -> list[str]:
    """Return mean, lowest and highest value as text; `-` three times without values."""
    if not values:
        return ["-"] * 3
    return [f"{value:.3g}" for value in (fmean(values), min(values), max(values))]


def _parts(tried: Sequence[Tried]) -> dict[str, list[float]]:
    """Return the values of each part of the rewards, by its name; failures have none."""
    found: dict[str, list[float]] = {}
    for one in tried:
        for name, value in (one.scored.reward.parts if one.scored.reward else {}).items():
            found.setdefault(name, []).append(value)
    return found


def _time(tried: Sequence[Tried], percent: int) -> str:
    """Return a percentile of the latency as text, in ms or s; `-` without values. `percent` is from
    1 to 99."""
    if not tried:
        return "-"
    times_s = [one.latency_s for one in tried]
    # Of a single value there are no quantiles; the same values twice have the same quantiles.
    found_s = quantiles(times_s * 2, n=100, method="inclusive")[percent - 1]
    return f"{1000 * found_s:.2g} ms" if found_s < 0.1 else f"{found_s:.2g} s"


def _passes(one: Tried) -> bool:
    """Return whether the reward gave the response at least `PASS`."""
    return one.scored.reward is not None and one.scored.reward.score >= PASS


def _is_right(one: Tried) -> bool:
    """Return whether people gave the response a label of at least `PASS`."""
    return one.response.label is not None and one.response.label >= PASS


def _named(one: Tried) -> str:
    """Return id and end of a response, for people."""
    text = one.response.sample.response_text
    shown = repr(text if len(text) <= SHOWN_CHARS else f"...{text[-SHOWN_CHARS:]}")
    return f"{one.response.sample.id.removeprefix('0/')} {shown}"
