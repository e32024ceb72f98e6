"""Samples that a run has kept in `rollouts/`, and the choice of those that are worth reading."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from roll.output_dir.sample_files import DUMPS, dump_files

MAX_BYTES = 64 * 2**20
"""Number of bytes of rollouts that are read; of longer runs, some steps."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A sample that the run has written down."""

    step: int
    id: str
    tag: str
    prompt: str
    response: str
    answer: str
    """Ground truth."""
    reward: float | None
    """None if a reward failed on the sample."""
    parts: Mapping[str, float]
    finish: str
    """`stop`, `length` or `abort`."""
    tokens: int
    """Number of tokens of the response."""
    logprob: float | None
    """Mean log-prob of the tokens that the policy wrote, in nats; None if the run did not write
    it."""
    pictures: tuple[Path, ...]
    turns: tuple[Mapping[str, Any], ...]
    """Turns of an episode: `by` is `policy` or `environment`, then `text` and, of the policy,
    `reward`."""

    @property
    def group(self) -> str:
        """Id of its group: the same for all samples of its prompt in a step."""
        return self.id.rpartition("/")[0]

    @property
    def prompt_id(self) -> str:
        """Id of its prompt: the same in all steps."""
        return self.group.partition("/")[2].partition("+")[0] or self.group


def read_samples(folder: Path, remarks: list[str]) -> dict[int, list[Kept]]:
    """Return the kept samples of a run by step, in order. If there are more than `MAX_BYTES`, some
    steps are left out, but never the first or the last.

    Args:
        folder: folder of the run.
        remarks: gets sentences about what is left out.
    """
    files = dump_files(folder)
    steps = list(files)
    chosen = _affordable(steps, {step: files[step].stat().st_size for step in steps})
    if len(chosen) < len(steps):
        remarks.append(f"samples of {len(chosen)} of {len(steps)} steps in rollouts/ were read")
    found: dict[int, list[Kept]] = {}
    broken = 0
    for step in chosen:
        rows = []
        for line in files[step].read_bytes().decode(errors="replace").split("\n"):
            if line.strip():
                row = _row(line, step, folder / DUMPS)
                rows += [] if row is None else [row]
                broken += row is None
        if rows:
            found[step] = rows
    if broken:
        remarks.append(f"{broken} lines in rollouts/ hold no sample; they are left out")
    return found


def _affordable(steps: Sequence[int], sizes: Mapping[int, int]) -> list[int]:
    """Return equally spaced steps whose files have at most `MAX_BYTES` in all."""
    count = len(steps)
    while count > 2:
        chosen = [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]
        if sum(sizes[step] for step in chosen) <= MAX_BYTES:
            return chosen
        count = max(2, count // 2)
    return [*steps[:1], *steps[1:][-1:]]


def _row(line: str, step: int, rollouts: Path) -> Kept | None:
    """Return the sample in a line of a file; None if it holds none."""
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            return None
        reward, logprob = row["reward"], row.get("logprob_mean")
        return Kept(
            step=step,
            id=str(row["id"]),
            tag=str(row["tag"]),
            prompt=str(row["prompt"]),
            response=str(row["response"]),
            answer=str(row["ground_truth"]),
            reward=None if reward is None else float(reward),
            parts={str(name): float(value) for name, value in row["parts"].items()},
            finish=str(row["finish_reason"]),
            tokens=int(row["response_tokens"]),
            logprob=None if logprob is None else float(logprob),
            pictures=tuple(_inside(rollouts, row.get("pictures", []))),
            turns=tuple(turn for turn in row.get("turns", []) if isinstance(turn, dict)),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _inside(rollouts: Path, names: Sequence[str]) -> list[Path]:
    """Return the files of a sample's pictures. A line that names files elsewhere gets none."""
    folder = rollouts.resolve()
    paths = [(rollouts / str(name)).resolve() for name in names]
    return [path for path in paths if path.is_relative_to(folder) and path.suffix == ".png"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A sample, and why it is worth reading."""

    why: str
    sample: Kept


def worth_reading(rows: Sequence[Kept]) -> list[Choice]:
    """Return the samples of a step to show: best, worst, and surprising ones, each once."""
    scored = [row for row in rows if row.reward is not None]
    failed = [row for row in rows if row.reward is None]
    if not scored:
        return [Choice("no reward: a reward failed", row) for row in failed[:1]]
    best, worst = max(scored, key=_reward), min(scored, key=_reward)
    found = [Choice("best", best)]
    if worst.reward != best.reward:
        found.append(Choice("worst", worst))
        lucky = [row for row in scored if row.logprob is not None and row.reward == best.reward]
        if lucky:
            unlikely = min(lucky, key=lambda row: row.logprob or 0.0)
            found.append(Choice("surprising: high reward, low probability", unlikely))
        wrong = [row for row in scored if row.reward == worst.reward]
        longest = max(wrong, key=lambda row: row.tokens)
        if longest.tokens > 1.5 * median(row.tokens for row in scored):
            found.append(Choice("surprising: long and wrong", longest))
    cut = [row for row in scored if row.finish == "length"]
    found += [Choice("truncated", row) for row in cut[:1]]
    found += [Choice("no reward: a reward failed", row) for row in failed[:1]]
    seen: dict[str, Choice] = {}
    for choice in found:
        seen.setdefault(choice.sample.id, choice)
    return list(seen.values())


def siblings_apart(rows: Sequence[Kept]) -> tuple[Kept, Kept] | None:
    """Return the better and the worse one of two siblings whose rewards differ most; None if no
    siblings differ."""
    groups: dict[str, list[Kept]] = defaultdict(list)
    for row in rows:
        if row.reward is not None:
            groups[row.group].append(row)
    pairs = [
        (max(group, key=_reward), min(group, key=_reward)) for group in groups.values() if group
    ]
    apart = [pair for pair in pairs if _reward(pair[0]) > _reward(pair[1])]
    return max(apart, key=lambda pair: _reward(pair[0]) - _reward(pair[1]), default=None)


def _reward(row: Kept) -> float:
    """Return the reward of a sample that has one."""
    assert row.reward is not None
    return row.reward


def over_training(steps: Mapping[int, Sequence[Kept]], *, prompts: int) -> list[list[Kept]]:
    """Return prompts of which several steps kept a sample: for each, one sample of each such step.

    Args:
        steps: kept samples by step.
        prompts: largest number of prompts; those with most steps come first.
    """
    by_prompt: dict[tuple[str, str], dict[int, Kept]] = defaultdict(dict)
    for step, rows in steps.items():
        for row in rows:
            by_prompt[row.prompt_id, row.prompt].setdefault(step, row)
    several = [list(found.values()) for found in by_prompt.values() if len(found) > 1]
    return sorted(several, key=len, reverse=True)[:prompts]
