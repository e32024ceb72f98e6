"""docs/rewards.md names every built-in reward, and every config on it works."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from roll.config.sections.data import CurriculumConfig
from roll.config.sections.domain import DomainConfig
from roll.config.sections.reward import RewardConfig
from roll.config.sections.roles import Role
from roll.config.sections.services.judge import JudgeConfig, VerdictConfig
from roll.core.types import WorkerSpec
from roll.rewards.api import Reward, RewardContext
from roll.rewards.built_in import REWARDS
from roll.rewards.contract import check_reward, sample_of
from roll.rewards.execution.counters import Scored
from roll.rewards.judge.scoring import check_judged
from roll.rewards.judge.verdict import check_verdict
from roll.rewards.loading import load_reward
from roll.workers.services.remote import RemoteReward
from tests.services import serving

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
LINES = re.findall(r"^\| `(\{(?:fn|judge|remote).*\})` \|", PAGE, re.MULTILINE)
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def _load(name: str, settings: dict[str, Any]) -> str:
    config = RewardConfig.model_validate_json(json.dumps(settings))
    if config.judge is not None:
        check_judged(name, config)
    if config.fn is None or ":" in config.fn:
        return ""
    load_reward(config.fn, config.kwargs, RewardContext(name, seed=0))
    return config.fn


def test_the_table_has_a_line_for_every_built_in_reward() -> None:
    named = {_load("line", yaml.safe_load(line)) for line in LINES}
    assert named - {""} == set(REWARDS)


def test_every_function_of_the_page_keeps_the_contract() -> None:
    made: dict[str, Any] = {}
    for code in CODE:
        exec(compile(code, "docs/rewards.md", "exec"), made)
    check_reward(made["right_and_brief"], kwargs={"limit": 100}, answer="4")
    check_reward(made["diverse"], kwargs={"share": 0.5}, per="group")
    check_reward(made["lines"], answer="7", responses=["3 + 4 = 7\nso 1 + 1 = 3\n7"])
    found = made["lines"](sample_of("3 + 4 = 7\n1 + 1 = 3\n7", answer="7"))
    assert found == Reward(True, steps=[(9, 1.0), (19, 0.0), (21, 1.0)])
    group = [sample_of(text, answer="") for text in ("so\n4", "4", "5")]
    assert [each.score for each in made["diverse"](group)] == pytest.approx([1 / 3, 1 / 3, 2 / 3])


def test_the_server_of_the_page_fits_the_contract() -> None:
    [code] = [code for code in CODE if "web.Application" in code]
    made: dict[str, Any] = {}
    exec(compile(code, "docs/rewards.md", "exec"), made)
    samples = [sample_of(text, answer="42") for text in ("it is 42", "43")]
    samples = [replace(one, id=f"g/{i}") for i, one in enumerate(samples)]

    async def run() -> list[Scored]:
        async with serving(made["score"]) as url:
            config = RewardConfig.model_validate({"remote": {"url": f"{url}/score"}})
            spec = WorkerSpec(Role.REWARD, 0, 1, (), (), 0, "127.0.0.1:1", 0, "cpu")
            worker = RemoteReward(spec, "house_rules", config)
            await worker.start()
            await worker.begin_step(2)
            scored = await worker.score_samples(samples)
            await worker.close()
            return scored

    found = [one.reward for one in asyncio.run(run())]
    assert found == [Reward(1.0, {"chars": 8.0}), Reward(0.0, {"chars": 2.0})]


def test_every_domain_and_curriculum_of_the_page_is_valid() -> None:
    loaded = [yaml.safe_load(block) for block in BLOCKS]
    domains = [one for block in loaded for one in block.get("domains", {}).values()]
    curricula = [block["data"]["curriculum"] for block in loaded if "data" in block]
    assert len(domains) == 2
    assert len(curricula) == 1
    for settings in domains:
        DomainConfig.model_validate_json(json.dumps(settings))
    CurriculumConfig.model_validate_json(json.dumps(curricula[0]))


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if re.search("^rewards:", block, re.M)]
)
def test_every_config_of_the_page_is_valid(block: str) -> None:
    config = yaml.safe_load(block)
    assert config["rewards"]
    for name, settings in config["rewards"].items():
        _load(name, settings)
    for settings in config.get("judges", {}).values():
        judges: TypeAdapter[JudgeConfig] = TypeAdapter(JudgeConfig)
        judges.validate_json(json.dumps(settings))


def test_every_verdict_of_the_page_is_valid() -> None:
    found = re.findall(r"^\| `(\{kind: .*?\})`", PAGE, re.MULTILINE)
    adapter: TypeAdapter[VerdictConfig] = TypeAdapter(VerdictConfig)
    verdicts = [adapter.validate_json(json.dumps(yaml.safe_load(line))) for line in found]
    for verdict in verdicts:
        check_verdict(verdict)
    assert {each.kind for each in verdicts} == {"json", "number", "class", "preference", "ranking"}
