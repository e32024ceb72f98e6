"""Files of a few samples of a step, for people to read."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from roll.core.errors import PictureError
from roll.core.types import Prompt, Sample
from roll.data.pictures.decoding import decoded, png
from roll.data.pictures.picture import encoded_pictures
from roll.rollout.episodes.turn_texts import turn_texts
from roll.rollout.types import Group, ScoredSample

logger = logging.getLogger(__name__)


def dump_rollouts(
    path: Path,
    groups: Sequence[Group],
    *,
    limit: int,
    read: Callable[[Sequence[int]], str],
    find: Callable[[str], Prompt],
) -> None:
    """Write the first `limit` samples as JSONL, for people to read, and the pictures of their
    prompts into a folder of the same name. If a file cannot be written, log a warning.

    Args:
        path: file to write; its folder is created.
        groups: groups of samples.
        limit: largest number of samples to write.
        read: function that decodes token ids to text.
        find: function that returns the prompt of an id, with its pictures as they were read.
    """
    samples = [scored for group in groups for scored in group.samples][:limit]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        seen = _write_pictures(path.with_suffix(""), samples, find)
        rows = [
            _readable(scored, read) | seen.get(scored.sample.prompt.id, {}) for scored in samples
        ]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        # Half of a surrogate pair, which has no UTF-8, becomes a question mark.
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:  # the file is only for people: a full disk must not end the run
        logger.warning("%s could not be written (%s); the run goes on", path, error.strerror)
        with suppress(OSError):
            path.unlink()


def _write_pictures(
    folder: Path, samples: Sequence[ScoredSample], find: Callable[[str], Prompt]
) -> dict[str, dict[str, object]]:
    """Write the pictures of the prompts of samples as PNG files; return id of the prompt -> their
    paths, under the key that `dump_rollouts` adds. OSError if a file cannot be written."""
    found: dict[str, dict[str, object]] = {}
    prompts = (scored.sample.prompt for scored in samples)
    for name in dict.fromkeys(prompt.id for prompt in prompts if prompt.pictures):
        folder.mkdir(exist_ok=True)
        pictures = find(name).pictures
        assert pictures is not None
        files = []
        for number, picture in enumerate(encoded_pictures(pictures)):
            file = f"prompt_{len(found)}_{number}.png"
            with suppress(PictureError):  # its file is gone since the patches were made
                (folder / file).write_bytes(png(decoded(picture.read())))
                files.append(f"{folder.name}/{file}")
        found[name] = {"pictures": files}
    return found


def _readable(scored: ScoredSample, read: Callable[[Sequence[int]], str]) -> dict[str, object]:
    """Return a sample as plain JSON. Its prompt is decoded from the tokens, to show what the model
    reads: the text differs if the tokenizer does not know all of its characters. But each picture
    is shown as one placeholder."""
    sample = scored.sample
    prompt = sample.prompt
    versions = sample.completion.versions
    return {
        "id": sample.id,
        "tag": sample.tag,
        "prompt": prompt.text if prompt.pictures else read(prompt.tokens),
        "response": sample.response_text,
        "ground_truth": sample.answer,
        "reward": scored.reward if scored.has_reward else None,
        "turn_reward": scored.turn_reward,
        "rewards": scored.by_name,
        "failed_rewards": scored.failed,
        "parts": scored.parts,
        **({} if scored.steps is None else {"steps": scored.steps.pairs}),
        **({"turns": turn_texts(scored, read)} if scored.turns else {}),
        "logprob_mean": _logprob_mean(sample),
        "weight_version": [versions.oldest, versions.newest] if len(versions) else None,
        "finish_reason": sample.completion.finish.value,
        "prompt_tokens": len(prompt.tokens),
        "response_tokens": sample.num_response_tokens,
    }


def _logprob_mean(sample: Sample) -> float | None:
    """Return the mean log-prob of the tokens that the policy wrote; None if there are none."""
    sampled = sample.num_sampled_tokens
    return math.fsum(sample.completion.logprobs) / sampled if sampled else None
