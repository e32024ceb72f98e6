"""Exact conversion of finished groups to plain values and back, for the checkpoint of the replay
buffer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from roll.core.completion import Completion, Content, FinishReason, VersionRuns
from roll.core.types import Prompt, Sample
from roll.rollout.types import Group, ScoredSample


def to_plain(group: Group) -> dict[str, Any]:
    """Return a group as JSON objects and arrays, without its timing, which no other process can
    use. In place of the tokens of a sample there is a function that returns them: they may be
    elsewhere, and to fetch them would block the event loop."""
    return {
        "prompt": group.prompt.id,
        "step": group.step,
        "samples": [_sample_to_plain(scored) for scored in group.samples],
        "baseline": None if group.baseline is None else _sample_to_plain(group.baseline),
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


def _sample_to_plain(scored: ScoredSample) -> dict[str, Any]:
    """Return a scored sample as plain values, without its prompt."""
    sample = scored.sample
    completion = sample.completion
    return {
        "id": sample.id,
        "group": sample.group,
        "written": partial(_written_to_plain, completion.content),
        "runs": completion.versions.runs,
        "finish": completion.finish.value,
        "reward": scored.reward,
        "parts": scored.parts,
        "by_name": scored.by_name,
        "failed": scored.failed,
    }


def _written_to_plain(content: Content) -> dict[str, Any]:
    """Return tokens, log-probs and text of a completion."""
    written = content.get()
    return {"tokens": written.tokens, "logprobs": written.logprobs, "text": written.text}


def _sample_from_plain(row: dict[str, Any], prompt: Prompt) -> ScoredSample:
    """Rebuild a scored sample on its prompt. Older checkpoints have no `failed`, all of the
    completion under that key, and perhaps one version per token in place of `runs`."""
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
    return ScoredSample(sample, row["reward"], row["parts"], row["by_name"], failed)
