"""Numbers that a run file does not say: mean lengths, and numbers of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roll.config.agentic_base import AgenticBase
from roll.config.errors import ConfigError, nearest
from roll.config.offline_base import OfflineConfig
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig

_ROUNDED = 1 + 1e-6
"""Factor by which a measured mean may be above a limit that every row has reached."""
SAMPLED = ("prompt", "response", "validation_rows")
GIVEN = ("row", "train_rows", "validation_rows")
"""Names that `--expect` takes, for runs on samples and for runs on existing rows."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Numbers of the rows of a run, as far as they are known."""

    prompt: float | None = None
    """Mean tokens of a prompt."""
    response: float | None = None
    """Mean tokens of a sample behind its prompt."""
    row: float | None = None
    """Mean tokens of a sequence of existing rows; a pair has two."""
    generated: float | None = None
    """Tokens that engines write for each sample that is trained on, those of samples that are not
    trained on included; only measured."""
    train_rows: int | None = None
    validation_rows: int | None = None
    """Rows of all validation sets together."""

    def above(self, config: RunConfig) -> list[str]:
        """Return the names of the lengths that are above what the run allows, with its limits."""
        limits = _limits(config)
        own = {name: getattr(self, name) for name in limits}
        return [
            f"{name}={own[name]:g} (at most {limit})"
            for name, limit in limits.items()
            if own[name] is not None and own[name] > limit * _ROUNDED
        ]

    def over(self, other: Expected) -> Expected:
        """Return the other's numbers, but these where there are any. Where the length of responses
        is these, what the other run has generated does not count."""
        own = {name: value for name in _NAMES if (value := getattr(self, name)) is not None}
        forgotten = {"generated": None} if "response" in own else {}
        return replace(other, **{**forgotten, **own})


_NAMES = ("prompt", "response", "row", "generated", "train_rows", "validation_rows")


def parse_expected(text: str, config: RunConfig) -> Expected:
    """Return the numbers of `prompt=200,response=600`.

    Raises:
        ConfigError: a name or a number cannot be, or a length is above what the run allows.
    """
    known = SAMPLED if isinstance(config, RlvrBase) else GIVEN
    found = parse_numbers("--expect", text, known)
    rows = {name: int(value) for name, value in found.items() if name.endswith("_rows")}
    expected = replace(Expected(**found), **rows)  # type: ignore[arg-type]
    if above := expected.above(config):
        raise ConfigError(f"--expect: longer than the run file allows: {', '.join(above)}")
    return expected


def _limits(config: RunConfig) -> dict[str, int]:
    """Return the largest length of each kind of row that the run file allows. What is left of a row
    of `spin` without a response is no prompt where the answer in every other row is longer; and an
    episode in several rows has no limit as a whole."""
    if isinstance(config, RlvrBase) and config.algorithm.trains_answers:
        return {"response": config.longest_response}
    if isinstance(config, AgenticBase):
        if config.episode_rows > 1:
            return {}
        return {"prompt": config.max_row_tokens, "response": config.max_row_tokens}
    if isinstance(config, RlvrBase):
        return {"prompt": config.data.max_prompt_tokens, "response": config.longest_response}
    assert isinstance(config, OfflineConfig)
    return {"row": config.data.max_tokens}


def parse_numbers(option: str, text: str, known: tuple[str, ...]) -> dict[str, float]:
    """Return name -> number of a list such as `a=1,b=2`.

    Raises:
        ConfigError: a name is not known, or stands twice; a number is not above 0.
    """
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in known or name in found:
            why = "stands twice" if name in found else f"is not known{nearest(name, known)}"
            raise ConfigError(f"{option} {text}: {name!r} {why} (known: {', '.join(known)})")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        whole = not name.endswith("_rows") or found[name].is_integer()
        if not (0 < found[name] < float("inf") and whole):
            raise ConfigError(f"{option} {part}: expected a number above 0, such as {name}=200")
    return found
