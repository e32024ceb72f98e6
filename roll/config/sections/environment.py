"""Settings of environments, which are built in or have an import path, and of their tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from roll.config.base import Config
from roll.config.column_texts import TurnConfig
from roll.config.sections.data import DataConfig, SourceConfig
from roll.config.sections.lifecycle import ValidationConfig


class BranchingConfig(Config):
    """Branching of the episodes of a task at uncertain turns (ARPO, arXiv 2507.19849).

    When the first episodes of a task have ended, the others leave them before the turns in which
    the policy was most uncertain: the environment is replayed up to there, and the policy writes
    this turn and the next ones anew."""

    whole: int = Field(ge=1)
    """Number of episodes of a task that are played from the beginning; the others of
    data.samples_per_prompt branch off. Those for which there is no uncertain turn are played from
    the beginning, too."""
    tokens: int = Field(default=20, ge=1)
    """Number of tokens, from the first of a turn on, whose negative log-probs tell how uncertain
    the policy is there."""
    min_rise: float = 0.0
    """Mean of these, in nats per token, minus that of the first turn of the episode, above which a
    turn is uncertain."""
    width: int = Field(default=1, ge=1)
    """Largest number of episodes that branch off before the same turn."""


class EnvironmentConfig(Config):
    """Environment, and the workers that host its episodes."""

    env: str | None = None
    """Name of a built-in environment such as `frozen_lake`; of another package or a server, with
    its prefix (`gymnasium:FrozenLake-v1`, `http://host:port`); or `package.module:Class` of your
    own: an object with `reset`, `step` and `close` as in gymnasium. Set either this or `agent`."""
    agent: str | None = None
    """`package.module:function` that runs an agent of any framework. The agent asks the policy at
    an OpenAI-compatible endpoint, and each of its requests is a turn."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments for the environment."""
    adapter: dict[str, Any] = {}
    """Settings of the adapter that a prefix names, such as `{actions: [left, right]}`."""
    process: bool | None = None
    """Whether each episode has a process of its own, so that a crash, a leak or a hang ends this
    episode alone. If left out: where `python` is set, and for packages whose environments share
    one random state in a process."""
    python: str | None = None
    """Interpreter of these processes, for packages that cannot be installed beside roll. It needs
    nothing of roll. If left out: roll's own."""
    memory_gb: float | None = Field(default=2.0, gt=0)
    """Memory that the process of an episode may take for itself, in GiB; null sets no limit. Other
    environments have no limit of their own."""
    tags: tuple[str, ...] = Field(default=("default",), min_length=1)
    """Tags of the tasks that are played in this environment."""
    max_turns: int = Field(default=16, ge=1)
    """Largest number of turns of the policy in an episode. A longer episode is truncated."""
    tool_format: str = "hermes"
    """Format in which the policy writes calls of the tools that an `agent` offers it, as `format`
    of `env: tools`."""
    last_word: str = ""
    """Text that is added to what the environment says before the last turn that `max_turns` allows,
    such as `Answer now.`"""
    episode_timeout_s: float | None = Field(default=None, gt=0)
    """Time limit for one episode, in seconds: the turn in which it passes is the last one, and the
    episode is truncated. null: no limit."""
    seats: int = Field(default=1, ge=1)
    """Number of players of an episode, all of whom are the policy (self-play), unless there is an
    `opponent`. The environment says in `info["seat"]` which of them has the next turn. Each has a
    conversation of its own."""
    trained_seats: Literal["all", "one"] = "all"
    """Players that are trained. `all`: an episode gives a sample for each of them, compared with
    those of the same player. `one`: the seed of the task names one; the others are the policy, too,
    as it is, or the `opponent`, and are not trained."""
    opponent: str | None = None
    """Name of one of the `opponents`, which plays the players that are not trained; needs
    `trained_seats: one`. If left out: the policy plays all of them."""
    cut_turn: Literal["end", "go_on"] = "end"
    """What follows a turn that reaches `sampling.max_new_tokens`. `end`: the episode is truncated,
    and the environment does not see the turn. `go_on`: the environment sees it, and the turn gets
    an end mark that is not trained."""
    thoughts: Literal["hide", "show"] = "hide"
    """Whether the environment sees the thoughts in a turn."""
    special_tokens: Literal["hide", "show"] = "hide"
    """Whether the environment sees the special tokens in a turn, without the one that ends it. Some
    models mark calls of tools by them."""
    history: Literal["keep", "fork", "forget"] = "keep"
    """Earlier turns in the context of the next one. `keep`: the tokens that the policy wrote, also
    where the chat template would rewrite them, as many drop the thoughts of earlier turns. `fork`:
    what the template makes of them; where this differs from what was written, the episode goes on
    in a new row. `forget`: none; each observation begins a new context, in a new row, for
    environments whose observations show all that matters, such as a board."""
    rows: Literal["contexts", "turns"] = "contexts"
    """Rows that an episode is trained in. `contexts`: one for each context, that is a single one
    unless the context begins anew. `turns`: one for each turn, behind the context in which it was
    written. All rows of an episode share its reward."""
    credit: Literal["episode", "turns"] = "episode"
    """Place of the rewards of turns. `episode`: their sum is the reward of the sample. `turns`:
    each belongs to the last token of its turn, as a process reward."""
    replay: bool = False
    """Whether the environment answers the same turns of the same seed in the same way, so that an
    episode can be replayed from its tokens. An episode whose environment fails then goes on behind
    its last answer, and need not begin again. An environment that answers in another way than
    before has failed."""
    branching: BranchingConfig | None = None
    """Branching of episodes at uncertain turns, in training. Needs `replay: true`."""
    reset_timeout_s: float = Field(default=60.0, gt=0)
    """Time limit for making and resetting an environment, in seconds."""
    step_timeout_s: float = Field(default=30.0, gt=0)
    """Time limit for one step, in seconds. Searches in `corpora` of the run do not count."""
    max_episodes: int | None = Field(default=None, ge=1)
    """Number of episodes that run at once in environments of this name, over all workers, in
    training and validation: as many as a server behind them bears, or as memory holds. Further
    ones begin, in order, when others have ended. null: no limit."""
    concurrency: int = Field(default=64, ge=1)
    """Number of calls to environments that run at once in one worker. Episodes that wait for the
    policy do not count."""
    workers: int = Field(default=1, ge=1)
    """Number of workers that host episodes. A worker that dies is replaced; its episodes begin
    again on another one."""
    max_memory_gb: float | None = Field(default=None, gt=0)
    """Memory of one worker with its child processes, in GiB, above which it is killed and replaced;
    its episodes begin again. null: no limit."""
    pool: str | None = None
    """Pool on whose nodes the workers run. If left out: the pool of actor_infer."""
    max_tries: int = Field(default=3, ge=1)
    """Number of times that an episode is begun before it counts as failed: after an error, a time
    limit or the death of a worker, it begins again."""
    max_error_rate: float = Field(default=0.1, ge=0, le=1)
    """Largest share of failed episodes among those of a step. A larger share stops the run."""

    @property
    def what(self) -> str:
        """Name or import path of the environment or agent, for messages."""
        return self.env or self.agent or ""

    @property
    def several_rows(self) -> bool:
        """True if an episode may be trained in several rows. An agent may hold several
        conversations, and an environment of the user's may begin a new context."""
        own = self.agent is not None or ":" in (self.env or "")
        return own or self.history != "keep" or self.rows == "turns"

    @model_validator(mode="after")
    def _one_of_env_and_agent(self) -> Self:
        """Require exactly one of `env` and `agent`; refuse, with `agent`, the settings that are for
        `env`."""
        if (self.env is None) == (self.agent is None):
            raise ValueError("set exactly one of `env` (an environment) and `agent` (a function)")
        if self.agent is not None and self.credit == "turns":
            raise ValueError("an agent reports one reward at its end; drop `credit: turns`")
        if self.agent is not None and self.last_word:
            raise ValueError("`last_word` is for `env`: an agent writes its own requests; drop it")
        if self.agent is None and self.changed("tool_format"):
            raise ValueError("`tool_format` is for `agent`; an environment has its own: drop it")
        if self.agent is not None and self.history == "forget":
            raise ValueError(
                "`history: forget` is for `env`: an agent sends what the policy is to know; drop it"
            )
        if self.agent is not None and self.replay:
            raise ValueError("`replay` is for `env`: an agent may ask otherwise each time; drop it")
        if self.agent is not None and self.seats > 1:
            raise ValueError("`seats` is for `env`, whose `info` says whose turn it is; drop it")
        if self.trained_seats == "one" and self.seats == 1:
            raise ValueError("`trained_seats: one` goes with several `seats`; drop it")
        if self.opponent is not None and self.trained_seats == "all":
            raise ValueError(
                "`opponent` plays the players that are not trained; set `seats` and "
                "`trained_seats: one`, or drop it"
            )
        own_process = self.adapter or self.process or self.python or self.changed("memory_gb")
        if self.agent is not None and own_process:
            raise ValueError(
                "`adapter`, `process`, `python` and `memory_gb` are for `env`; drop them"
            )
        if self.agent is not None and self.changed("concurrency"):
            raise ValueError(
                "`concurrency` is for `env`: an agent runs from its first request to its last, and "
                "no number of them is held back; drop it"
            )
        return self

    @model_validator(mode="after")
    def _branches_are_replayed(self) -> Self:
        """Require `replay` for `branching`, and a single player."""
        if self.branching is not None and not self.replay:
            raise ValueError(
                "`branching` replays the environment up to a turn: set `replay: true` if the same "
                "turns of the same seed get the same answers, or drop `branching`"
            )
        if self.branching is not None and self.seats > 1:
            raise ValueError(
                "`branching` compares episodes of one player, and `seats` are several; drop one of "
                "them"
            )
        return self

    @model_validator(mode="after")
    def _python_runs_processes(self) -> Self:
        """Refuse another interpreter without processes."""
        if self.python is not None and self.process is False:
            raise ValueError("`python` needs processes; drop `process: false`")
        return self


MAX_SEED = 2**31 - 1
"""Largest seed of a task; gymnasium takes no more."""


class TaskSource(SourceConfig):
    """Source of tasks: numbers from which an environment makes a task, or rows of a file."""

    path: str = ""
    """File with one task per row, as for other sources. The environment gets the columns of a row
    as `options`; a column `seed` is the seed of the task instead. Set either this or `seeds`."""
    seeds: int | None = Field(default=None, ge=1)
    """Number of tasks that the environment makes of seeds."""
    first_seed: int = Field(default=0, ge=0)
    """First of these seeds. Sources for training and validation need different ones."""

    @property
    def mapped(self) -> tuple[str | tuple[TurnConfig, ...], ...]:
        """Values of `columns`; none for tasks made of seeds."""
        return () if self.seeds is not None else super().mapped

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        """Require either `path` or `seeds`, each with its own settings, and no `system`."""
        if (self.seeds is None) == (not self.path):
            raise ValueError(
                "set exactly one of `seeds` (tasks that the environment makes) and `path` (a file "
                "of tasks)"
            )
        if self.first_seed and self.seeds is None:
            raise ValueError("`first_seed` goes with `seeds`; drop it")
        if self.system is not None:
            raise ValueError(
                "`system` is put before prompts, and in an episode the environment says all that "
                "the policy reads; let it say this, too, and drop `system`"
            )
        if self.columns.images is not None:
            raise ValueError("`columns.images`: tasks of environments take no pictures; drop it")
        set_too = self.changed(
            "format", "subset", "split", "limit", "made_by", "columns", "fn", "part"
        )
        if self.seeds is not None and set_too:
            raise ValueError(f"`{set_too[0]}` is for a file of tasks, not for `seeds`; drop it")
        last = self.first_seed + (self.seeds or 1) - 1
        if last > MAX_SEED:
            raise ValueError(
                f"the last seed would be {last}, and seeds end at {MAX_SEED}; lower `first_seed` "
                "or `seeds`"
            )
        return self


class TaskDataConfig(DataConfig):
    """Data of an agentic run: sources of tasks, and tasks and episodes per step."""

    sources: tuple[TaskSource, ...] = Field(min_length=1)
    prompts_per_step: int = Field(ge=1)
    """Number of tasks of one step."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Number of episodes of each task, which begin with the same seed."""
    max_episode_tokens: int = Field(default=4096, ge=2)
    """Largest number of tokens of an episode: of what the environment and the policy say together.
    A longer episode is truncated."""


class TaskValidation(ValidationConfig):
    """Validation on held-out tasks."""

    sets: Mapping[str, TaskSource] = {}
    """Validation sets by name. Without sets there is no validation."""
