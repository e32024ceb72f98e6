"""Answers of a model to a set of questions, kept in a folder so that nothing is generated twice.

`settings.json` says what the answers depend on: the model, the data, the sampling and the rewards.
`samples.jsonl` has a line for each question, written when all of its responses are scored.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from roll.commands.eval.votes import Vote
from roll.core.errors import ConfigError, SettingsChangedError
from roll.output_dir.config_diff import leaves
from roll.output_dir.whole_file import replace_file
from roll.rollout.types import Group, ScoredSample

SETTINGS, SAMPLES = "settings.json", "samples.jsonl"


@dataclass(frozen=True, slots=True)
class Answered:
    """Responses to one question, without their texts. Each list has an entry per response."""

    id: str
    tag: str
    rewards: list[float | None]
    """Reward of each response; None if a reward function failed on it."""
    scores: dict[str, list[float | None]]
    """Name of a reward -> its score of each response."""
    tokens: list[int]
    """Number of tokens that the model wrote."""
    truncated: list[bool]
    """Whether the response ended at the length limit."""
    votes: list[str | None] | None
    """Answer that maj@k counts; None if answers with this tag cannot be compared."""

    @classmethod
    def of(cls, group: Group, votes: Mapping[str, Vote]) -> Self:
        """Return what is kept of a group; `votes` finds the answers of each tag that has some."""
        samples, tag = group.samples, group.prompt.tag
        names = dict.fromkeys(name for one in samples for name in (*one.by_name, *one.failed))
        vote = votes.get(tag)
        return cls(
            id=group.prompt.id,
            tag=tag,
            rewards=[one.reward if one.has_reward else None for one in samples],
            scores={name: [one.by_name.get(name) for one in samples] for name in names},
            tokens=[one.sample.num_sampled_tokens for one in samples],
            truncated=[one.sample.truncated for one in samples],
            votes=None if vote is None else [_vote(vote, one) for one in samples],
        )


def _vote(vote: Vote, scored: ScoredSample) -> str | None:
    """Return the answer of a response that has a reward; None for others."""
    return vote(scored.sample) if scored.has_reward else None


class Answers:
    """Answers in a folder. `add` may be called from several threads."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Read what an earlier session has left, or begin the folder.

        Args:
            settings: what the answers depend on, as JSON objects and arrays.

        Raises:
            SettingsChangedError: the folder has answers with other settings; the text names them.
            ConfigError: a file of the folder is damaged.
        """
        self.folder = folder
        self.by_id: dict[str, Answered] = {}
        """Id of each answered question -> its answers."""
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / SETTINGS
        if file.is_file():
            _refuse_other(folder, _read(file), settings)
            self._load()
        else:
            replace_file(file, json.dumps(settings, indent=1, sort_keys=True) + "\n")

    def add(self, group: Group, votes: Mapping[str, Vote]) -> None:
        """Keep the answers to one question; `votes` finds those that maj@k counts."""
        answered, prompt = Answered.of(group, votes), group.prompt
        texts = [one.sample.response_text for one in group.samples]
        line = asdict(answered) | {"prompt": prompt.text, "target": prompt.answer, "resps": texts}
        with self._lock:
            # Half of a surrogate pair, which has no UTF-8, becomes a question mark.
            with (self.folder / SAMPLES).open("a", encoding="utf-8", errors="replace") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self.by_id[answered.id] = answered

    def _load(self) -> None:
        """Read the answers of earlier sessions; cut off a last line that was not finished.

        Raises:
            ConfigError: another line cannot be read.
        """
        file, whole = self.folder / SAMPLES, 0
        if not file.is_file():
            return
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                self._take(line, f"{file}:{number}")
                whole += len(line)
        with file.open("rb+") as lines:
            lines.truncate(whole)

    def _take(self, line: bytes, place: str) -> None:
        """Keep the answers of one line; ConfigError if it has none."""
        try:
            row = json.loads(line)
            one = Answered(**{name: row[name] for name in Answered.__slots__})
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{place}: holds no answers ({error!r}); remove the line, and they are generated "
                "again"
            ) from None
        self.by_id[one.id] = one


def _read(file: Path) -> dict[str, Any]:
    """Return the settings in a file; ConfigError if it holds none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is damaged; remove its folder, or give another --out")
    return found


def _refuse_other(folder: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise SettingsChangedError unless both settings are equal."""
    before, after = dict(leaves(then)), dict(leaves(json.loads(json.dumps(now))))
    changed = [
        f"{key}: {before.get(key, 'unset')} -> {after.get(key, 'unset')}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    if changed:
        raise SettingsChangedError(
            f"{folder} has answers with other settings:\n  "
            + "\n  ".join(changed)
            + "\nGive this evaluation another --out, or remove the folder"
        )
