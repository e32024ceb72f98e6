"""`JudgeReward`: asks a model about samples, or about groups (`judge` in the config)."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll.config.sections.reward import RewardConfig
from roll.config.sections.services.judge import ClusterJudgeConfig, UrlJudgeConfig
from roll.core.completion import Completion
from roll.core.threads.mailbox import Mailbox
from roll.core.types import GenerateRequest, Sample, WorkerSpec
from roll.rewards.api import Reward, RewardContext
from roll.rewards.judge.cluster import ClusterJudge
from roll.rewards.judge.question import Judge
from roll.rewards.judge.scoring import JudgeScoring, check_judged
from roll.rewards.judge.url import UrlJudge
from roll.rewards.loading import Work
from roll.rewards.service.client import JsonClient
from roll.workers.services.base import ServiceReward

TAKE_S = 10.0
"""Longest wait of the driver's call for questions, in seconds; then it calls again."""


@dataclass(frozen=True, slots=True)
class JudgeAccess:
    """A judge of the run, and what a reward worker needs to ask it."""

    config: UrlJudgeConfig | ClusterJudgeConfig
    sharers: int = 1
    """Number of reward workers that share the limits of the judge."""
    key: str | None = field(default=None, repr=False)
    """Key of the user for the server."""


class JudgeReward(ServiceReward):
    """A reward that one of the `judges` decides. The limits of the judge hold for all rewards that
    ask it.

    The driver takes the questions to a judge on devices of the run, and brings the answers: it
    alone knows which engines live.

    Args:
        name: name of the reward in the config.
        access: the judge that `config.judge` names.
    """

    def __init__(
        self, spec: WorkerSpec, name: str, config: RewardConfig, access: JudgeAccess
    ) -> None:
        super().__init__(spec, name, config)
        assert config.judge is not None
        self._mailbox: Mailbox[GenerateRequest, Completion] = Mailbox()
        self._judge = self._make_judge(access)
        check_judged(name, config)
        self._scoring = JudgeScoring(config.judge, self._judge, groups=config.per == "group")

    async def setup(self, ctx: RewardContext) -> None:
        """Open the connections to the judge."""
        await self._judge.open()

    async def teardown(self) -> None:
        """Close the connections to the judge."""
        await self._judge.close()

    async def take_questions(self) -> list[GenerateRequest]:
        """Return the questions to a judge on devices of the run since the last call; wait a while
        for the first."""
        return await self._mailbox.take(TAKE_S)

    async def bring_answers(self, answers: list[tuple[str, Completion | str]]) -> None:
        """Pass on the answers to questions, by the ids of these. A text says why there is none."""
        for request_id, answer in answers:
            self._mailbox.give(request_id, answer)

    async def verdict(self, work: Work) -> Reward | list[Reward]:
        if isinstance(work, Sample):
            return await self._scoring.score(work)
        return await self._scoring.score_group(work)

    def _make_judge(self, access: JudgeAccess) -> Judge:
        """Return the judge of this reward, not opened."""
        asked = self.config.judge
        assert asked is not None
        if isinstance(access.config, ClusterJudgeConfig):
            return ClusterJudge(self.spec.name, access.config, asked, self._mailbox)
        client = JsonClient(access.config, access.key, sharers=access.sharers)
        return UrlJudge(access.config, asked, client)
