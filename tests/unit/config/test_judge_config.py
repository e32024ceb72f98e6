"""Judges in a run file: what is checked before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.commands.preflight import inspect
from roll.commands.trials.result import Trial
from roll.commands.trials.rewards import try_rewards
from roll.config import load_config
from roll.config.errors import ConfigError
from roll.config.rlvr import RlvrConfig
from roll.core.types import Prompt
from tests.runs import write_task
from tests.services import ScriptedJudge, serving_beside

JUDGE = {"url": "http://127.0.0.1:1/v1", "model": "m"}
ON_GPUS = {
    "pool": "all",
    "model": {"path": "m"},
    "strategy": {"kind": "vllm", "sleep_level": 2},
}
ASKED = {"by": "strong", "template": "{{ response }}"}
PAIRS = {"by": "strong", "template": "{{ responses }}", "verdict": {"kind": "preference"}}


def _load(folder: Path, rewards: dict[str, Any], judge: Any = JUDGE, **changes: Any) -> RlvrConfig:
    judges = {"judges": {"strong": judge}}
    path = write_task(folder, rewards=rewards, **{**judges, "validation": {}, **changes})
    config = load_config(path).config
    assert isinstance(config, RlvrConfig)
    return config


@pytest.mark.parametrize(
    ("rewards", "changes", "why"),
    [
        (
            {"r": {"judge": {**ASKED, "by": "strung"}}},
            {},
            "rewards.r.judge.by: no judge 'strung'; did you mean 'strong'",
        ),
        ({"r": {"fn": "exact"}}, {}, "judges.strong: no reward asks it"),
        (
            {"r": {"judge": ASKED, "workers": 3}},
            {"judges": {"strong": {**JUDGE, "concurrency": 2}}},
            "judges.strong.concurrency: 2 calls at once cannot be shared by 3",
        ),
        ({"r": {"judge": ASKED, "fn": "exact"}}, {}, "set exactly one of"),
        ({"r": {"judge": PAIRS}}, {}, "set `per: group`"),
        ({"r": {"judge": ASKED, "per": "group"}}, {}, "drop `per`"),
        ({"r": {"judge": ASKED, "timeout_s": 3}}, {}, "the limits of a judge are in `judges`"),
        ({"r": {"judge": ASKED, "kwargs": {"a": 1}}}, {}, "`judge` has settings of its own"),
        ({"r": {"judge": {**ASKED, "votes": 3}}}, {}, "all equal; raise `temperature`"),
        (
            {
                "r": {
                    "judge": {
                        **ASKED,
                        "verdict": {"kind": "json", "classes": {"a": 1.0, "b": 0.0}, "high": 5.0},
                    }
                }
            },
            {},
            "high: `classes` have scores of their own",
        ),
        (
            {"r": {"judge": {**ASKED, "verdict": {"kind": "json", "criteria": ["cost"]}}}},
            {},
            "'cost' is taken",
        ),
        (
            {"r": {"judge": {**ASKED, "verdict": {"kind": "number", "low": 3, "high": 3}}}},
            {},
            "low = 3 must lie below high = 3",
        ),
        ({"r": {"judge": {**ASKED, "verdict": {"kind": "jsn"}}}}, {}, "did you mean 'json'"),
        ({"r": {"judge": ASKED}}, {"judges": {"strong": {**JUDGE, "modl": 1}}}, "'model'"),
        (
            {"r": {"judge": ASKED}},
            {"judges": {"strong": ON_GPUS}},
            "judges.strong.strategy.sleep_level: 2 drops the weights in each step, and only",
        ),
        (
            {"r": {"judge": PAIRS, "per": "group"}},
            {"validation": {"every": 1, "sets": {"v": {"path": "held_out.jsonl"}}}},
            "validation.samples_per_prompt: rewards.r compares",
        ),
    ],
)
def test_mistakes_are_told_with_their_key(
    tmp_path: Path, rewards: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError) as error:
        _load(tmp_path, rewards, **changes)
    assert why in str(error.value)
    assert "run.yaml:" in str(error.value)


def test_templates_patterns_and_keys_are_checked_before_the_run(tmp_path: Path) -> None:
    pattern = {"kind": "class", "pattern": "(", "scores": {"a": 1}}
    path = write_task(
        tmp_path,
        judges={"strong": {**JUDGE, "api_key_env": "NO_SUCH_KEY_HERE"}},
        rewards={
            "a": {"judge": {**ASKED, "template": "{{ respnse }}"}},
            "b": {"judge": {**ASKED, "verdict": pattern}},
        },
    )
    found = {str(one.error): one.only_here for one in inspect(load_config(path), environ={})}
    [template] = [text for text in found if text.startswith("rewards.a.judge.template: no value")]
    [wrong] = [text for text in found if text.startswith("rewards.b.judge.verdict.pattern: ")]
    [key] = [text for text in found if "NO_SUCH_KEY_HERE is not set" in text]
    assert (found[template], found[wrong], found[key]) == (False, False, True)


def test_check_asks_each_judge_once(tmp_path: Path) -> None:
    server = ScriptedJudge(
        lambda message: (
            '{"reason": "", "better": "A"}'
            if "<<<response A" in message
            else '{"reason": "", "score": 7}'
        )
    )
    keyed = {"remote": {"url": "http://127.0.0.1:1", "api_key_env": "NO_SUCH_KEY_HERE"}}
    rewards = {"one": {"judge": ASKED}, "pairs": {"judge": PAIRS, "per": "group"}, "keyed": keyed}
    row = Prompt("s:0", (1,), "2+2?", "so it is\n4", "default", {"level": 3})
    with serving_beside(server.answer) as url:
        config = _load(tmp_path, rewards, judge={**JUDGE, "url": f"{url}/v1"})
        trial = Trial(rows={"default": row})
        try_rewards(config.rewards, tmp_path, trial, config.judges)
    assert trial.wrong == []
    assert trial.untried == ["rewards.keyed (no NO_SUCH_KEY_HERE)"]
    assert len(server.bodies) == 1 + 2, "pairs are compared in both orders"
    assert trial.told[0].startswith(
        "rewards.one: 0.7 for the response '4' to row s:0 (input_tokens"
    )
    assert trial.told[1].startswith("rewards.pairs: 0.5 for the response '4' to row s:0")
