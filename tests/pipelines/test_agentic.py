"""Agentic runs with real engines: exact tokens and log-probs, faults, and a resume to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from roll.core.errors import EnvironmentFailedError
from tests.runs import Command, run_local, without_times, write_task

ENVS = '''
"""Environments of the tests."""
import os, random, signal, threading, time

SIGNALS = {"die": signal.SIGKILL, "stop": signal.SIGSTOP}
LEAK = []
ONCE = threading.Lock()

class Words:
    """Asks for digits, three times; answers at random length."""
    def __init__(self, trouble=None, mark=None, wait_s=0.0):
        self.wait_s = wait_s
        self.trouble = trouble
        self.mark = mark
    def reset(self, *, seed=None, options=None):
        self.dice = random.Random(seed)
        self.left = 3
        if self.mark:
            self.strike()
        return f"say {self.dice.randrange(100)}", {}
    def strike(self):
        """Lose a worker by each of the troubles, one by one each."""
        if not ONCE.acquire(blocking=False):
            return
        for trouble in self.trouble.split():
            try:
                open(f"{self.mark}_{trouble}", "x").close()
            except FileExistsError:
                continue
            if trouble != "leak":
                os.kill(os.getpid(), SIGNALS[trouble])
            LEAK.append(bytearray(os.urandom(1 << 20) * 2000))
            time.sleep(60)
    def step(self, action):
        time.sleep(self.wait_s)
        self.left -= 1
        if self.trouble == "raise":
            raise ValueError("the board is broken")
        digits = sum(c.isdigit() for c in action) / max(1, len(action))
        text = "more " * self.dice.randrange(1, 4)
        return text, digits, self.left == 0, False, {"success": digits > 0.5}
    def close(self):
        pass

class Duel:
    """Two players write digits in turn; whoever wrote more wins."""
    def reset(self, *, seed=None, options=None):
        self.digits = [0, 0]
        self.turn = 0
        return f"begin {seed}", {"seat": 0}
    def step(self, action):
        player = self.turn % 2
        self.digits[player] += sum(c.isdigit() for c in action)
        self.turn += 1
        own = self.digits[1] - self.digits[0]
        info = {"seat": self.turn % 2}
        if self.turn == 4:
            return "", float(own), True, False, {"rewards": {0: -own}}
        return "go on", 0.0, False, False, info
    def close(self):
        pass
'''


AGENT = """
import json, urllib.request

def ask(task, messages):
    body = json.dumps({"messages": messages, "model": task.model}).encode()
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{task.base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def run(task):
    messages = [{"role": "user", "content": f"add {task.seed}"}]
    first = ask(task, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "sure?"}]
    second = ask(task, messages)
    if task.seed % 2:
        ask(task, [{"role": "user", "content": "say it in short"}])
    digits = sum(c.isdigit() for c in first + second)
    return {"reward": digits / 12, "digits": digits}
"""


def task(folder: Path, **changes: Any) -> Path:
    (folder / "test_run_envs.py").parent.mkdir(parents=True, exist_ok=True)
    (folder / "test_run_envs.py").write_text(ENVS)
    (folder / "test_run_agent.py").write_text(AGENT)
    environment = {"env": "test_run_envs:Words", "tags": ["words"], "max_turns": 5}
    environment |= changes.pop("environment", {})
    config = {
        "pipeline": "agentic",
        "environments": {"words": {k: v for k, v in environment.items() if v is not None}},
        "data": {
            "sources": [{"seeds": 50, "tag": "words"}],
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "max_episode_tokens": 120,
        },
        "sampling": {"max_new_tokens": 6},
        "rewards": {},
        "algorithm": {"loss": [{"kind": "ppo_clip"}]},
        "validation": {
            "every": 2,
            "sets": {"held_out": {"seeds": 4, "first_seed": 1000, "tag": "words"}},
        },
    }
    return write_task(folder, **(config | changes))


def test_the_trainers_log_probs_are_the_engines_and_a_run_resumes_to_the_bit(
    tmp_path: Path,
) -> None:
    path = task(tmp_path, environment={"cut_turn": "go_on"})
    whole = run_local(path)
    steps = [record for record in whole if "loss/total" in record]
    assert len(steps) == 4
    for record in steps:
        assert record["mismatch/logprob_abs_max"] < 1e-5
        assert record["reward/words/turns"] == 3
        assert 0 <= record["reward/words/mean"] <= 3
    assert "val/held_out/mean@1" in whole[0]
    row = json.loads((tmp_path / "out/rollouts/step_000000.jsonl").read_text().splitlines()[0])
    assert row["prompt"].startswith("<user>say ")
    assert "more" in row["response"]

    first, second = tmp_path / "two/first", tmp_path / "two/second"
    path = task(tmp_path / "two", environment={"cut_turn": "go_on"}, output_dir=str(first))
    run_local(path, ["max_steps=2"])
    shutil.copytree(first, second)
    again = run_local(path, [f"output_dir={second}", "max_steps=4"])
    assert [without_times(r) for r in again[2:4]] == [without_times(r) for r in whole[2:4]]


def test_turns_have_advantages_of_their_own_with_gigpo(tmp_path: Path) -> None:
    path = task(
        tmp_path,
        environment={"cut_turn": "go_on"},
        algorithm={"preset": "gigpo"},
        reference={"pool": "all"},
        validation={},
    )
    for record in run_local(path, ["max_steps=2", "actor_train.samples_per_update=4"]):
        if "loss/total" in record:
            assert record["advantage/abs_mean"] > 0
            assert record["mismatch/logprob_abs_max"] < 1e-5


def test_an_agent_behind_an_endpoint_is_trained_on_all_of_its_conversations(
    tmp_path: Path,
) -> None:
    agent = {"env": None, "agent": "test_run_agent:run", "cut_turn": "go_on"}
    path = task(tmp_path, environment=agent, actor_train={"pool": "all", "optimizer": {"lr": 0.01}})
    records = run_local(path, ["max_steps=3", "actor_train.samples_per_update=4"])
    steps = [record for record in records if "loss/total" in record]
    assert len(steps) == 3
    assert {1.0, 2.0} >= {round(r["reward/words/conversations"]) for r in steps}
    assert any(r["reward/words/conversations"] > 1 for r in steps)
    for record in steps:
        assert record["reward/words/turns"] == record["reward/words/conversations"] + 1
        assert record["mismatch/logprob_abs_max"] < 1e-5
        assert record["samples/left_out"] == 0


def test_an_environment_that_fails_too_often_ends_the_run_with_its_words(tmp_path: Path) -> None:
    path = task(tmp_path, environment={"kwargs": {"trouble": "raise"}, "cut_turn": "go_on"})
    with pytest.raises(EnvironmentFailedError, match="step raised ValueError: the board is broken"):
        run_local(path)


@pytest.mark.slow
@pytest.mark.parametrize("troubles", [("die", "stop"), ("leak",)], ids="-".join)
def test_workers_that_are_lost_cost_no_episode(tmp_path: Path, troubles: tuple[str, ...]) -> None:
    """An episode that is lost a third time has failed, so a run has two of the troubles."""
    kwargs = {"trouble": " ".join(troubles), "mark": str(tmp_path / "lost")}
    environment = {"kwargs": kwargs, "workers": 2, "max_memory_gb": 2.0}
    path = task(tmp_path, environment=environment, validation={})
    code, output = Command("run", str(path), "max_steps=2").wait()
    assert code == 0, output
    assert {path.name for path in tmp_path.glob("lost_*")} == {f"lost_{each}" for each in troubles}
    assert output.count(" is replaced") == len(troubles), output
    records = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").open()]
    assert [record["samples/left_out"] for record in records if "loss/total" in record] == [0, 0]


def test_a_run_resumes_in_the_middle_of_episodes_without_losing_or_repeating_one(
    tmp_path: Path,
) -> None:
    ahead = {
        "pools": {"all": "0", "infer": "1"},
        "actor_infer": {"pool": "infer", "strategy": {"kind": "hf"}},
        "rollout": {"max_staleness": 2},
        "algorithm": {"loss": [{"kind": "ppo_clip"}], "correction": {"weight": {"upper": 2.0}}},
        "checkpoint": {"every": 2, "export_hf": False},
        "validation": {},
    }
    slow = {"cut_turn": "go_on", "kwargs": {"wait_s": 0.2}}
    path = task(tmp_path, environment=slow, track={"rollouts_every": 1}, **ahead)
    run_local(path, ["max_steps=2"])
    saved = json.loads((tmp_path / "out/checkpoints/step_000002/state.json").read_text())
    drawn = saved["sampler"]["scheduler"]
    assert drawn["running"], "no episode was under way"
    run_local(path, ["max_steps=5"])
    rows = [
        json.loads(line)
        for step in range(5)
        for line in (tmp_path / f"out/rollouts/step_{step:06d}.jsonl").open()
    ]
    tasks = [row["id"].split("/")[1] for row in rows]
    assert len(rows) == len({row["id"] for row in rows}) == 5 * 8
    assert all(tasks.count(each) == 2 for each in tasks), "each task once, with two episodes"
    whole = task(tmp_path / "whole", environment=slow, track={"rollouts_every": 1}, **ahead)
    run_local(whole, ["max_steps=5"])
    others = [
        json.loads(line)["id"].split("/")[1]
        for step in range(5)
        for line in (tmp_path / f"whole/out/rollouts/step_{step:06d}.jsonl").open()
    ]
    assert set(tasks) == set(others), "the same tasks as without a break"


def test_both_players_of_a_game_are_trained(tmp_path: Path) -> None:
    pair = {"env": "test_run_envs:Duel", "seats": 2, "cut_turn": "go_on"}
    path = task(tmp_path, environment=pair, validation={})
    for record in run_local(path, ["max_steps=2", "data.samples_per_prompt=8"]):
        if "loss/total" in record:
            assert record["reward/words/turns"] == 2
            assert record["mismatch/logprob_abs_max"] < 1e-5
            assert abs(record["reward/mean"]) < 1e-6, "what one wins, the other loses"
            assert record["advantage/abs_mean"] > 0
            assert record["samples/left_out"] == 0


REWRITING = (
    "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}"
    "{% if m.role == 'user' or c not in '0123456789xyzwvt' %}{{ c }}{% endif %}{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Chat template that leaves out some characters of earlier turns."""


def rewriting(folder: Path) -> None:
    """Give the model of a run a chat template that rewrites earlier turns."""
    (folder / "model/chat_template.jinja").write_text(REWRITING)


def test_what_a_template_rewrites_is_trained_as_the_engine_saw_it(tmp_path: Path) -> None:
    path = task(
        tmp_path,
        environment={"cut_turn": "go_on", "history": "fork"},
        algorithm={"preset": "gigpo"},
        reference={"pool": "all"},
    )
    rewriting(tmp_path)
    records = run_local(path, ["max_steps=2", "actor_train.samples_per_update=4"])
    steps = [record for record in records if "loss/total" in record]
    assert len(steps) == 2
    for record in steps:
        assert record["reward/words/rows"] > 1.5
        assert record["mismatch/logprob_abs_max"] < 1e-5
        assert record["advantage/abs_mean"] > 0


@pytest.mark.parametrize(
    ("kind", "role"), [("gae", "critic"), ("prime", "process_reward")], ids=lambda value: value
)
def test_a_row_for_each_turn_is_trained_beside_a_second_model_and_with_a_correction(
    tmp_path: Path, kind: str, role: str
) -> None:
    beside = {role: {"pool": "all", "optimizer": {"lr": 1e-3}}}
    if kind == "prime":
        beside["reference"] = {"pool": "all"}
    environment = {"cut_turn": "go_on", "rows": "turns", "credit": "turns"}
    path = task(
        tmp_path,
        environment=environment,
        algorithm={
            "advantage": {"kind": kind},
            "loss": [{"kind": "ppo_clip"}],
            "correction": {"weight": {"upper": 2.0}},
        },
        validation={},
        **beside,
    )
    for record in run_local(path, ["max_steps=2"]):
        if "loss/total" in record:
            assert record["reward/words/rows"] == record["reward/words/turns"] == 3
            assert record["mismatch/logprob_abs_max"] < 1e-5
            assert record[f"{role}/loss/total"] > 0


def test_rewards_of_turns_are_learned_from_with_one_advantage_per_sample(tmp_path: Path) -> None:
    environment = {"cut_turn": "go_on", "credit": "turns"}
    path = task(tmp_path, environment=environment)
    whole = run_local(task(tmp_path / "whole", environment={"cut_turn": "go_on"}), ["max_steps=1"])
    records = run_local(path, ["max_steps=1"])
    for record in records:
        if "loss/total" in record:
            assert record["advantage/abs_mean"] > 0
    # Before the first update, validation and rewards are the same, wherever the rewards belong.
    for key in {key for key in whole[0] if key.startswith("val/")} | {"reward/mean"}:
        assert records[0][key] == whole[0][key], key
    assert any(value > 0 for key, value in records[0].items() if key.startswith("val/"))
