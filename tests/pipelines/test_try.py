"""`roll try`: tiny steps of a run on this machine, and the mistakes that they find."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from roll.commands.try_run.command import try_run
from roll.commands.try_run.small_run import small_run
from roll.config import load_config
from roll.config.sections.engines import HfEngineConfig
from roll.core.errors import RollError
from roll.core.types import Message
from roll.data.preparation.parts import lies_in
from tests.pipelines.test_rows import TEXTS, split
from tests.runs import ROOT, run_config, write_rows_task, write_task

OWN = '''

def not_whole(group):
    """A filter that reads what groups do not have."""
    return group.rewards_of_the_group > 0

def no_bool(group):
    return 0.5

def forgetful(sample):
    """A reward that gives nothing back for most responses."""
    if sample.response_text.startswith("42"):
        return 1.0

def other_answer(sample):
    return float(sample.answer["result"] == sample.response_text)
'''


def tried(path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The command, as a user starts it."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'mcore_adapter/src'}"}
    return subprocess.run(
        [sys.executable, "-m", "roll.cli", "try", str(path), *more],
        capture_output=True,
        text=True,
        timeout=300,
        env=env,
        check=False,
    )


def tried_here(path: Path) -> list[str]:
    """The same in this process, without Ray; returns the lines that it prints."""
    said: list[str] = []
    try:
        try_run(
            load_config(path),
            said.append,
            steps=3,
            keep=None,
            own_engine=False,
            run=lambda small: run_config(small.config, path.parent),
        )
    finally:
        sys.modules.pop("test_run_rewards", None)
    return said


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a run file."""
    values = yaml.safe_load(path.read_text())
    change(values)
    path.write_text(yaml.safe_dump(values))


def a_task(folder: Path, **changes: Any) -> Path:
    """A run of two GPUs with vLLM, as its user would write it."""
    path = write_task(
        folder,
        cluster={"platform": "cuda", "devices_per_node": 8},
        pools={"train": "0-3", "infer": "4-7"},
        actor_train={"pool": "train", "strategy": {"kind": "fsdp2", "tp": 2}},
        actor_infer={"pool": "infer", "strategy": {"kind": "vllm", "tp": 2}},
        reference={"pool": "train"},
        rollout={"filters": [{"kind": "equal_rewards"}]},
        max_steps=500,
        **changes,
    )
    with (folder / "test_run_rewards.py").open("a") as file:
        file.write(OWN)
    return path


def test_a_run_for_gpus_does_three_tiny_steps_here(tmp_path: Path) -> None:
    path = a_task(tmp_path)
    done = tried(path, "--keep", str(tmp_path / "kept"))
    assert done.returncode == 0, done.stderr
    assert re.search(r"ok: 3 steps in \d+ s; output and models are in \S+/kept/", done.stdout)
    assert "everything is in" not in done.stdout + done.stderr, "that is told of the run itself"
    assert "vllm" in done.stdout
    assert "the filter equal_rewards" in done.stdout
    assert "<user>" in done.stdout, "the prompt as the model sees it"
    assert not (tmp_path / "out").exists(), "the folder of the run itself is not touched"
    lines = (tmp_path / "kept/out/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert all(record["grad_norm"] > 0 for record in records[:3])
    assert all("reward/digits/mean" in record for record in records[:3])
    assert all(record["mismatch/logprob_abs_max"] < 1e-4 for record in records[:3])
    small = yaml.safe_load((tmp_path / "kept/out/config.yaml").read_text())
    assert small["actor_train"]["strategy"]["kind"] == "fsdp2"
    assert small["cluster"]["platform"] == "cpu"


def test_pairs_are_tried_too(tmp_path: Path) -> None:
    pairs = [{"prompt": f"{i}", "chosen": f"{i}{i}", "rejected": "no"} for i in range(30)]
    path = write_rows_task(
        tmp_path,
        "dpo",
        {"train": pairs, "held_out": pairs[:9]},
        reference={"pool": "all"},
        max_steps=100,
    )
    assert any(line.startswith("ok: 3 steps in") for line in tried_here(path))


def planted(kind: str) -> tuple[Callable[[dict[str, Any]], object], str]:
    """A mistake in the run file, and what the error says of it."""

    def set_of(*keys: str | int, to: Any) -> Callable[[dict[str, Any]], object]:
        def change(values: dict[str, Any]) -> None:
            for key in keys[:-1]:
                values = values[key]  # type: ignore[index]
            values[keys[-1]] = to  # type: ignore[index]

        return change

    reward = ("rewards", "digits", "fn")
    own = "test_run_rewards:"
    return {
        "column": (set_of("data", "sources", 0, "columns", to={"prompt": "question"}), "question"),
        "fn": (set_of(*reward, to=f"{own}digit"), "digit"),
        "reward raises": (set_of(*reward, to=f"{own}raising"), "the grader is broken"),
        "reward forgets": (set_of(*reward, to=f"{own}forgetful"), "None"),
        "reward and answer": (set_of(*reward, to=f"{own}other_answer"), "TypeError"),
        "tag": (set_of("data", "sources", 0, "tag", to="sums"), "sums"),
        "too short": (set_of("data", "max_prompt_tokens", to=3), "max_prompt_tokens"),
        "filter": (
            set_of("rollout", "filters", to=[{"kind": "custom", "fn": f"{own}not_whole"}]),
            "rewards_of_the_group",
        ),
        "filter gives no bool": (
            set_of("rollout", "filters", to=[{"kind": "custom", "fn": f"{own}no_bool"}]),
            "returned 0.5",
        ),
        "template": (set_of("data", "chat_template_kwargs", to={"thinking": {}}), "template"),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "column",
        "fn",
        "reward raises",
        "reward forgets",
        "reward and answer",
        "tag",
        "too short",
        "filter",
        "filter gives no bool",
        "template",
    ],
)
def test_a_planted_mistake_is_found(kind: str, tmp_path: Path) -> None:
    path = a_task(tmp_path)
    change, told = planted(kind)
    edit(path, change)
    if kind == "template":
        file = tmp_path / "model" / "chat_template.jinja"
        file.write_text(file.read_text() + "{{ thinking.level.name }}")
    with pytest.raises(RollError, match=re.escape(told)):
        tried_here(path)


def test_the_small_run_keeps_the_settings_that_decide_what_is_computed(tmp_path: Path) -> None:
    path = a_task(tmp_path, algorithm={"preset": "gspo"})
    config = load_config(path).config
    small = small_run(config, tmp_path / "o", lambda model: tmp_path / "small", steps=2)
    found = small.config.model_dump()
    assert found["algorithm"] == config.model_dump()["algorithm"]
    assert found["model"]["path"] == str(tmp_path / "small")
    assert found["actor_infer"]["strategy"] == HfEngineConfig().model_dump()
    assert found["actor_train"]["strategy"]["tp"] == 1
    assert found["data"]["max_prompt_tokens"] == 32
    assert found["rewards"]["digits"] == config.model_dump()["rewards"]["digits"]
    own = small_run(config, tmp_path / "o", lambda m: tmp_path, steps=2, own_engine=True).config
    assert own.model_dump()["actor_infer"]["strategy"]["kind"] == "vllm"


@pytest.mark.parametrize(
    ("family", "kernel"), [("gemma2", "eager"), ("gpt_oss", "eager"), ("qwen3", "sdpa")]
)
def test_the_small_run_has_an_attention_kernel_that_computes_its_model(
    tmp_path: Path, family: str, kernel: str
) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path / "small")
    model = {"path": "large", "attention": "flash_attention_2"}
    config = load_config(write_rows_task(tmp_path, "sft", split(TEXTS), model=model)).config
    small = small_run(config, tmp_path / "o", lambda model: tmp_path / "small", steps=2)
    assert small.config.model_dump()["model"]["attention"] == kernel


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*/*.yaml")), ids=lambda p: f"{p.parent.name}/{p.stem}"
)
def test_every_example_has_a_small_run(path: Path, tmp_path: Path) -> None:
    config = load_config(path).config
    small = small_run(config, tmp_path / "o", lambda model: tmp_path / "small", steps=3).config
    assert small.max_steps == 3
    assert all(model.path == str(tmp_path / "small") for model in small.models.values())
    assert small.cluster.address == "local"
    assert small.cluster.call_timeout_s == config.cluster.call_timeout_s


SIZES: dict[str, dict[str, Any]] = {
    "warm-up": {"critic": {"pool": "train", "warmup_steps": 20}, "algorithm": {"preset": "ppo"}},
    "buffer": {
        "sampling": {"max_new_tokens": 256},
        "algorithm": {"reward_shaping": [{"kind": "overlong_penalty", "buffer_tokens": 64}]},
    },
    "longest": {
        "sampling": {"max_new_tokens": 256},
        "algorithm": {"reward_shaping": [{"kind": "overlong_penalty", "max_tokens": 256}]},
    },
    "adapter": {
        "model": {"path": "m", "lora": {"serve": "adapter"}},
        "actor_infer": {"pool": "infer", "strategy": {"kind": "vllm", "max_lora_rank": 16}},
    },
    "chunks": {
        "actor_train": {
            "pool": "train",
            "strategy": {"kind": "megatron", "pp": 2, "tp": 2, "layers": [1, 1]},
        }
    },
    "sequence parallel": {
        "actor_train": {
            "pool": "train",
            "strategy": {"kind": "megatron", "tp": 2, "sequence_parallel": True},
        }
    },
    "pass_k": {
        "data": {
            "sources": [{"path": "train.jsonl"}],
            "prompts_per_step": 8,
            "samples_per_prompt": 16,
            "max_prompt_tokens": 32,
        },
        "algorithm": {"advantage": {"kind": "pass_k", "k": 8}},
    },
    "noise": {"rewards": {"noise": {"fn": "test_run_rewards:digits", "weight": 2.0}}},
    "tokenizer": {"model": {"path": "m", "tokenizer": "other"}},
}


@pytest.mark.parametrize("kind", SIZES)
def test_settings_that_depend_on_sizes_fit_the_small_ones(kind: str, tmp_path: Path) -> None:
    path = write_task(
        tmp_path,
        **{
            "cluster": {"platform": "cuda", "devices_per_node": 8},
            "pools": {"train": "0-3", "infer": "4-7"},
            "actor_train": {"pool": "train"},
            "actor_infer": {"pool": "infer", "strategy": {"kind": "vllm"}},
            "reference": {"pool": "train"},
            "max_steps": 500,
            **SIZES[kind],
        },
    )
    config = load_config(path).config
    small = small_run(config, tmp_path / "o", lambda model: tmp_path / "small", steps=3).config
    found = small.model_dump()
    assert sum(each["fn"].endswith(":noise") for each in found["rewards"].values()) == 1
    for name, reward in config.model_dump()["rewards"].items():
        assert found["rewards"][name] == reward
    assert found["model"]["tokenizer"] == config.model.tokenizer


def test_judges_behind_servers_answer_in_full_and_small_judges_may_fail(tmp_path: Path) -> None:
    asked = {"template": "Rate {{ response }}"}
    own = {"pool": "infer", "model": {"path": "judge"}, "strategy": {"kind": "vllm"}}
    path = a_task(
        tmp_path,
        judges={"far": {"url": "http://127.0.0.1:1/v1", "model": "m"}, "own": own},
        rewards={
            "far": {"judge": {**asked, "by": "far"}},
            "near": {"judge": {**asked, "by": "own"}},
            "strict": {"judge": {**asked, "by": "own"}, "on_error": -1.0},
        },
    )
    config = load_config(path).config
    small = small_run(config, tmp_path / "o", lambda model: tmp_path / "small", steps=3)
    found, before = small.config.model_dump()["rewards"], config.model_dump()["rewards"]
    assert found["far"] == before["far"]
    assert before["far"]["judge"]["max_new_tokens"] == 1024
    assert found["near"]["max_error_rate"] == found["strict"]["max_error_rate"] == 1.0
    assert (found["near"]["on_error"], found["strict"]["on_error"]) == (0.0, -1.0)
    assert found["near"]["judge"]["max_new_tokens"] == 32
    assert any("the judge own" in each for each in small.told)
    assert not any("the judge far" in each for each in small.told)


def test_a_part_of_a_source_has_rows_in_the_small_run(tmp_path: Path) -> None:
    def limit_of(**settings: Any) -> int:
        source = {"path": "train.jsonl", **settings}
        path = a_task(tmp_path, validation={"every": 2, "sets": {"held_out": source}})
        config = load_config(path).config
        small = small_run(config, tmp_path / "o", lambda model: tmp_path / "small", steps=3).config
        found: int = small.model_dump()["validation"]["sets"]["held_out"]["limit"]
        return found

    assert limit_of() == 20
    assert limit_of(limit=7) == 7
    assert limit_of(part=[0.75, 1]) == 80
    assert limit_of(part=[0.75, 1], limit=90) == 80
    assert limit_of(part=[0.75, 1], limit=50) == 50
    rows = [(Message("user", f"question {number}"),) for number in range(limit_of(part=[0.98, 1]))]
    assert 10 <= sum(lies_in((0.98, 1), row) for row in rows) <= 30
