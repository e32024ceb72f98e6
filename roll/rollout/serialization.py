"""Exact conversion of finished groups to JSON and back, for the checkpoint of the replay buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from roll.core.types import Completion, FinishReason, Prompt, Sample
from roll.rollout.types import Group, ScoredSample

COMPLETION = fields(Completion)


def to_json(group: Group) -> dict[str, Any]:
    """Return a group as a JSON object, without its timing, which no other process can use."""
    return {
        "prompt": group.prompt.id,
        "step": group.step,
        "samples": [_sample_to_json(scored) for scored in group.samples],
        "baseline": None if group.baseline is None else _sample_to_json(group.baseline),
    }


def from_json(row: dict[str, Any], find: Callable[[str], Prompt]) -> Group:
    """Return the group that `to_json` turned into `row`, without timing.

    `find` returns the prompt of an id; its errors are passed on.
    """
    prompt = find(row["prompt"])
    baseline = row["baseline"]
    return Group(
        prompt,
        tuple(_sample_from_json(sample, prompt) for sample in row["samples"]),
        row["step"],
        baseline=None if baseline is None else _sample_from_json(baseline, prompt),
    )


def _sample_to_json(scored: ScoredSample) -> dict[str, Any]:
    """Return a scored sample as a JSON object that shares its tokens with the sample and leaves its
    prompt out."""
    sample = scored.sample
    return {
        "id": sample.id,
        "group": sample.group,
        "text": sample.response_text,
        # The tuples are not copied: to copy every token would block the event loop for a minute.
        "completion": {each.name: getattr(sample.completion, each.name) for each in COMPLETION},
        "reward": scored.reward,
        "parts": scored.parts,
        "by_name": scored.by_name,
        "failed": scored.failed,
    }


def _sample_from_json(row: dict[str, Any], prompt: Prompt) -> ScoredSample:
    """Rebuild a scored sample on its prompt; without `failed` (older checkpoints) it is ()."""
    written = row["completion"]
    completion = Completion(
        tuple(written["tokens"]),
        tuple(written["logprobs"]),
        tuple(written["versions"]),
        FinishReason(written["finish"]),
    )
    sample = Sample(row["id"], row["group"], prompt, completion, row["text"])
    failed = tuple(row["failed"]) if "failed" in row else ()
    return ScoredSample(sample, row["reward"], row["parts"], row["by_name"], failed)
