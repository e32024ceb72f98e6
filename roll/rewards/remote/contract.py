"""The contract with a server of rewards, written down in `docs/remote_reward.openapi.yaml`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from roll.core.types import Sample
from roll.rewards.api import Reward
from roll.rewards.loading import normalise
from roll.rewards.service.client import ServiceError

CONTRACT = 1
"""Version of the contract."""


class RemoteFailure(Exception):
    """Error: the server could not score one sample."""


def request_of(
    samples: Sequence[Sample], *, reward: str, per: str, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the JSON object that asks for the rewards of samples.

    Args:
        samples: samples to score; with `per` equal to `group`, all samples of each group.
        reward: name of the reward in the config.
        per: `sample` or `group`.
        kwargs: `kwargs` of the reward.
    """
    return {
        "contract": CONTRACT,
        "reward": reward,
        "per": per,
        "kwargs": _plain(kwargs),
        "samples": [
            {
                "id": sample.id,
                "group": sample.group,
                "tag": sample.tag,
                "prompt": sample.prompt.text,
                "response": sample.response_text,
                "answer": sample.answer,
                "truncated": sample.truncated,
                "num_response_tokens": sample.num_response_tokens,
                "extra": _plain(sample.extra),
            }
            for sample in samples
        ],
    }


def read_rewards(answer: Any, asked: Sequence[Sample]) -> dict[str, Reward | RemoteFailure]:
    """Return the reward, or the failure, of each sample that the answer names, by its id.

    Raises:
        ServiceError: the answer has another form, names a sample that was not asked for, or one
            twice.
    """
    entries = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        raise ServiceError(f'the answer is {answer!r:.120}; expected {{"rewards": [...]}}')
    known = {sample.id for sample in asked}
    found: dict[str, Reward | RemoteFailure] = {}
    for entry in entries:
        name = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in known:
            raise ServiceError(f"a reward is {entry!r:.120}; expected the `id` of a sample in it")
        if name in found:
            raise ServiceError(f"the answer has two rewards for sample {name}")
        found[name] = _read_one(entry)
    return found


def _read_one(entry: Mapping[str, Any]) -> Reward | RemoteFailure:
    """Return the reward of an entry, or a failure if it has an `error` or no number."""
    if entry.get("error") is not None:
        return RemoteFailure(f"the server says: {entry['error']!s:.300}")
    parts = entry.get("parts") or {}
    if not isinstance(parts, dict):
        return RemoteFailure(f"`parts` is {parts!r:.120}; expected an object of numbers")
    try:
        return normalise(Reward(entry.get("score"), parts))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        return RemoteFailure(f"the server gave a wrong reward: {error}")


def _plain(value: Any) -> Any:
    """Return a value as JSON values: what JSON does not know becomes text, and NaN null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)
