"""Whole runs whose rewards a judge decides."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from roll.config import load_config
from tests.runs import run_local, write_task
from tests.services import ScriptedJudge, serving_beside
from tests.tiny import save_tiny_judge
from tests.unit.rewards.test_judge_messages import FENCE
from tests.unit.rewards.test_remote_reward import Server


def _digits(text: str) -> int:
    return round(10 * sum(c.isdigit() for c in text) / max(1, len(text)))


def _judge(message: str) -> str:
    """Likes digits, and of two texts that with more of them."""
    found = {name: _digits(text) for name, _, text in FENCE.findall(message)}
    if "response A" in found:
        a, b = found["response A"], found["response B"]
        return json.dumps({"reason": "", "better": "A" if a > b else "B" if b > a else "tie"})
    return json.dumps({"reason": "", "score": found["response"]})


def _task(folder: Path, url: str, **judge: Any) -> Path:
    return write_task(
        folder,
        max_steps=2,
        validation={},
        checkpoint={"export_hf": False},
        judges={"strong": {"url": f"{url}/v1", "model": "m", "concurrency": 4, **judge}},
        rewards={
            "points": {"judge": {"by": "strong", "template": "Rate {{ response }}"}, "workers": 2},
            "better": {
                "judge": {
                    "by": "strong",
                    "template": "Compare {{ responses }}",
                    "verdict": {"kind": "preference", "opponents": 1},
                },
                "per": "group",
                "weight": 0.5,
            },
        },
    )


def test_two_rewards_share_a_judge(tmp_path: Path) -> None:
    server = ScriptedJudge(_judge)
    with serving_beside(server.answer) as url:
        path = _task(tmp_path, url)
        records = run_local(path)
    steps = [one for one in records if "reward/mean" in one]
    assert len(steps) == 2
    for step in steps:
        assert 0 <= step["reward/points/mean"] <= 1
        # Shares of wins: each comparison hands out one point. Empty answers score 0.
        assert step["reward/better/mean"] <= 0.5
        assert step["reward/points/error_rate"] == step["reward/better/error_rate"] == 0
        assert step["reward/points/tries"] > 0
    kinds = {re.sub(r"\W.*", "", message.split("\n\n")[1]) for message in server.messages}
    assert kinds == {"Rate", "Compare"}
    assert load_config(path).config.sharers("strong") == 3  # type: ignore[attr-defined]


def test_a_server_of_rewards_takes_part_in_a_run(tmp_path: Path) -> None:
    def score(call: dict[str, Any]) -> dict[str, Any]:
        rewards = [{"id": s["id"], "score": _digits(s["response"])} for s in call["samples"]]
        return {"rewards": rewards}

    server = Server(score)
    with serving_beside(server) as url:
        rewards = {"digits": {"remote": {"url": f"{url}/score"}, "workers": 2}}
        path = write_task(
            tmp_path, max_steps=1, validation={}, checkpoint={"export_hf": False}, rewards=rewards
        )
        [step] = [one for one in run_local(path) if "reward/mean" in one]
    assert step["reward/digits/mean"] == step["reward/mean"]
    assert sum(server.sizes) == 16


def test_two_rewards_share_a_judge_of_the_run(tmp_path: Path) -> None:
    judge = {
        "pool": "all",
        "model": {"path": str(save_tiny_judge(tmp_path / "judge"))},
        "strategy": {"kind": "hf"},
        "max_question_tokens": 2000,
    }
    asked = {"by": "own", "max_new_tokens": 30}
    no_reason = {"kind": "json", "reason": False}
    classes = {**no_reason, "classes": {"good": 1.0, "bad": -1.0}}
    rewards = {
        "points": {"judge": {**asked, "template": "Rate {{ response }}", "verdict": no_reason}},
        "class": {
            "judge": {**asked, "template": "Good? {{ response }}", "verdict": classes},
            "workers": 2,
        },
    }
    path = write_task(
        tmp_path,
        max_steps=2,
        validation={},
        checkpoint={"export_hf": False},
        judges={"own": judge},
        rewards=rewards,
    )
    steps = [one for one in run_local(path) if "reward/mean" in one]
    assert len(steps) == 2
    for step in steps:
        assert step["reward/points/error_rate"] == step["reward/class/error_rate"] == 0
        assert 0 <= step["reward/points/mean"] <= 1
        assert step["reward/points/output_tokens"] > 0
        assert step["judges/own/lost_replicas"] == 0
