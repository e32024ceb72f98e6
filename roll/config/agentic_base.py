"""Keys of the run file of `pipeline: agentic`; the checks read them."""

from __future__ import annotations

from pydantic import Field

from roll.config.rlvr_base import RlvrBase
from roll.config.run import RoleConfig
from roll.config.sections.data import SourceConfig
from roll.config.sections.environment import EnvironmentConfig, TaskDataConfig, TaskValidation
from roll.config.sections.model import ModelConfig
from roll.config.sections.services.corpus import CorpusConfig
from roll.config.sections.services.opponent import OpponentConfig
from roll.config.sections.training import InferRole


class AgenticBase(RlvrBase):
    """Keys of `pipeline: agentic`, before the rules between keys are checked."""

    pipeline: str = "agentic"
    data: TaskDataConfig
    environments: dict[str, EnvironmentConfig] = Field(min_length=1)
    """Environments by name; the name appears in the metrics. Their rewards count by themselves;
    `rewards` are added to them."""
    opponents: dict[str, OpponentConfig] = {}
    """Opponents of the policy in environments of several players, by name; an environment names one
    in `opponent`."""
    corpora: dict[str, CorpusConfig] = {}
    """Corpora that the tool `search` of agents searches by meaning (`dense`), by name."""
    validation: TaskValidation = TaskValidation()

    @property
    def roles(self) -> dict[str, RoleConfig]:
        """Every role that uses devices; an opponent has the key `opponents.<name>`."""
        if not self.generates:
            return super().roles
        own: dict[str, RoleConfig] = {f"opponents.{n}": r for n, r in self.opponents.items()}
        return super().roles | own

    @property
    def roles_overlap(self) -> bool:
        """True if the policy trains, models judge or opponents play, while engines generate."""
        return super().roles_overlap or (self.generates and bool(self.opponents))

    @property
    def players(self) -> dict[str, InferRole]:
        """Every role whose engines follow the samplings of the run: the policy and opponents."""
        own: dict[str, InferRole] = {f"opponents.{n}": r for n, r in self.opponents.items()}
        return super().players | (own if self.generates else {})

    @property
    def models(self) -> dict[str, ModelConfig]:
        """All models that the run loads, those of opponents and corpora included, by their keys."""
        if not self.generates:
            return super().models
        opponents = {f"opponents.{n}.model": role.model for n, role in self.opponents.items()}
        corpora = {f"corpora.{n}.model": corpus.model for n, corpus in self.corpora.items()}
        own = {key: model for key, model in opponents.items() if model is not None}
        return super().models | own | corpora

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """Sources and validation sets that are read from files; those made of seeds are left
        out."""
        every = (*self.data.sources, *self.validation.sets.values()) if self.generates else ()
        return tuple(source for source in every if source.seeds is None)

    @property
    def step_rewards(self) -> dict[str, tuple[str, ...]]:
        """Tags of the episodes whose turns or steps may have rewards of their own, by the key that
        says so."""
        played = self.environments.items()
        turns = {f"environments.{n}.credit": e.tags for n, e in played if e.credit == "turns"}
        return super().step_rewards | turns

    @property
    def episode_rows(self) -> int:
        """Largest number of rows of an episode, each of at most `max_row_tokens`: one for each
        turn, if there may be several."""
        several = (each.max_turns for each in self.environments.values() if each.several_rows)
        return max(several, default=1)

    @property
    def compared_samples(self) -> int:
        """Smallest number of samples of a task that are compared with one another: those of one
        player."""
        seats = (e.seats for e in self.environments.values() if e.trained_seats == "all")
        return self.data.samples_per_prompt // max(seats, default=1)

    @property
    def max_sequence_tokens(self) -> int:
        """Largest number of tokens of an episode, its first observation included."""
        return self.data.max_episode_tokens

    @property
    def max_row_tokens(self) -> int:
        """Largest number of tokens of an episode, its first observation included."""
        return self.data.max_episode_tokens

    @property
    def longest_response(self) -> int:
        """Largest number of tokens of an episode, its first observation included."""
        return self.data.max_episode_tokens

    @property
    def max_response_tokens(self) -> int:
        """Largest number of tokens of an episode, its first observation included."""
        return self.data.max_episode_tokens

    def max_response_tokens_of(self, tag: str) -> int:
        """Return `max_response_tokens`: a limit of a tag is that of its turns."""
        return self.max_response_tokens
