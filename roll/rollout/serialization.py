"""Exact conversion of finished groups to plain values and back, for the checkpoint of the replay
buffer."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from roll.core.completion import TOKEN_TYPE, Completion, Content, FinishReason, VersionRuns
from roll.core.step_rewards import StepRewards
from roll.core.types import Prompt, Sample, Turn
from roll.rollout.types import Group, ScoredSample


def to_plain(group: Group) -> dict[str, Any]:
    """Return a group as JSON objects and arrays, without its timing, which no other process can
    use. In place of the tokens of a sample there is a function that returns them: they may be
    elsewhere, and to fetch them would block the event loop."""
    return {
        "prompt": group.prompt.id,
        "step": group.step,
        "samples": [_sample_to_plain(scored, group.prompt) for scored in group.samples],
        "baseline": None
        if group.baseline is None
        else _sample_to_plain(group.baseline, group.prompt),
    }


def from_plain(row: dict[str, Any], find: Callable[[str], Prompt]) -> Group:
    """Return the group that `to_plain` turned into `row`, without timing.

    `find` returns the prompt of an id; its errors are passed on.
    """
    prompt = find(row["prompt"])
    baseline = row["baseline"]
    return Group(
        prompt,
        tuple(_sample_from_plain(sample, prompt) for sample in row["samples"]),
        row["step"],
        baseline=None if baseline is None else _sample_from_plain(baseline, prompt),
    )


def _sample_to_plain(scored: ScoredSample, prompt: Prompt) -> dict[str, Any]:
    """Return a scored sample as plain values. Of its own prompt, it has what differs from the
    prompt of the group: the words of the environment with which an episode began."""
    sample = scored.sample
    completion = sample.completion
    own = {} if sample.prompt is prompt else _opening_to_plain(sample.prompt)
    return own | {
        "id": sample.id,
        "group": sample.group,
        "written": partial(_written_to_plain, completion.content),
        "runs": completion.versions.runs,
        "finish": completion.finish.value,
        "reward": scored.reward,
        "turn_reward": scored.turn_reward,
        "parts": scored.parts,
        "by_name": scored.by_name,
        "failed": scored.failed,
        "branches": [_sample_to_plain(ScoredSample(one, 0.0), prompt) for one in scored.branches],
        "seat": scored.seat,
        "shared_tokens": scored.shared_tokens,
        "turns": [[t.begin, t.end, t.reward, t.state, t.row] for t in scored.turns],
        "steps": None
        if scored.steps is None
        else {"ends": scored.steps.ends, "values": scored.steps.values},
    }


def _opening_to_plain(prompt: Prompt) -> dict[str, Any]:
    """Return tokens and text with which an episode began, under the keys that `_sample_from_plain`
    reads."""
    return {"prompt_tokens": array(TOKEN_TYPE, prompt.tokens), "prompt_text": prompt.text}


def _written_to_plain(content: Content) -> dict[str, Any]:
    """Return tokens, log-probs and text of a completion."""
    written = content.get()
    return {"tokens": written.tokens, "logprobs": written.logprobs, "text": written.text}


def _sample_from_plain(row: dict[str, Any], prompt: Prompt) -> ScoredSample:
    """Rebuild a scored sample on its prompt. Older checkpoints have no `failed` and `steps`, all of
    the completion under that key, and perhaps one version per token in place of `runs`."""
    if "prompt_tokens" in row:
        prompt = replace(prompt, tokens=tuple(row["prompt_tokens"]), text=row["prompt_text"])
    old = row.get("completion", {})
    written, about = row.get("written", old), {**row, **old}
    completion = Completion.of(
        written["tokens"],
        written["logprobs"],
        VersionRuns(tuple((version, count) for version, count in about["runs"]))
        if "runs" in about
        else about["versions"],
        FinishReason(about["finish"]),
    )
    sample = Sample(row["id"], row["group"], prompt, completion, {**row, **written}["text"])
    failed = tuple(row["failed"]) if "failed" in row else ()
    turns = tuple(Turn(*turn) for turn in row.get("turns", ()))
    steps = row.get("steps")
    if steps is not None:
        steps = StepRewards.of(zip(steps["ends"], steps["values"], strict=True))
    return ScoredSample(
        sample,
        row["reward"],
        row["parts"],
        row["by_name"],
        failed,
        turns=turns,
        branches=tuple(_sample_from_plain(one, prompt).sample for one in row.get("branches", ())),
        seat=row.get("seat", 0),
        shared_tokens=row.get("shared_tokens", 0),
        steps=steps,
        turn_reward=row.get("turn_reward", 0.0),
    )
