"""Episodes over real engines: trained is what the policy wrote, and its log-probs computed again
are those that the engine reported, with every chat template, format of calls and environment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from roll.config.sections.model import ModelConfig
from roll.core.types import Prompt, WorkerSpec
from roll.envs.agents.api import AgentTask
from roll.envs.agents.host import AgentHost
from roll.envs.host import EnvHost
from roll.envs.loading import ENVS, load_env
from roll.envs.tools.formats.loading import FORMATS
from roll.rollout.types import GroupTask
from roll.strategy.training.group import GroupMembership
from tests.contract.backends import TRAIN_BACKENDS
from tests.contract.episode_rig import (
    TASK,
    EpisodeRig,
    Script,
    Turn,
    config_of,
    episode_rig,
)
from tests.contract.ranks import run_ranks
from tests.turns import in_groups
from tests.unit.data.test_chat_templates import NAMES
from tests.unit.data.test_turns import turns_of
from tests.unit.episodes import test_tool_episodes as with_episodes
from tests.unit.episodes.test_agent_host import ask, user
from tests.unit.episodes.test_contexts import TEMPLATES as REWRITTEN
from tests.unit.tools import test_tool_turns as with_tools

THOUGHT = ("<think>\n", 5, "\n</think>\n\nleft")
SCRIPT = (
    Turn((8,)),
    Turn(THOUGHT, push=True, role="tool"),
    Turn((12, "up 1"), push_behind=6, said="12 µ"),
    Turn((4, "cut"), ends=False),
    Turn(("left",), push=True, new_context=True),
    Turn((5,)),
)
"""Turns of every kind, written with several versions of the weights."""


@pytest.fixture(scope="module", params=in_groups(["hf"]))
def hf(
    request: pytest.FixtureRequest,
    loop: asyncio.AbstractEventLoop,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EpisodeRig]:
    with episode_rig(request.param, tmp_path_factory.mktemp("model"), loop) as rig:
        yield rig


def play(rig: EpisodeRig, name: str, script: tuple[Turn, ...], **options: Any) -> None:
    """An episode in which environment and policy follow the script."""
    turns, end = turns_of(name)
    config = config_of(**options)
    rig.play(turns, end, partial(EnvHost, "p", config, lambda: Script(script), turns), script)


@pytest.mark.parametrize("name", NAMES)
def test_log_probs_of_an_episode_are_those_of_a_forward_pass(hf: EpisodeRig, name: str) -> None:
    for history in ("keep", "fork") if name in REWRITTEN else ("keep",):
        play(hf, name, SCRIPT, history=history)
        assert len(hf.written) == len(SCRIPT)
        first = hf.versions[0]
        assert hf.versions[1].isdisjoint(first)
        assert len(hf.versions[2]) == 2, "new weights in the middle of a turn"
    play(hf, name, SCRIPT[:3], rows="turns")


FENCE = '```tool\n{"name": "add", "arguments": {"a": 17, "b": 4}}\n```'
CALLS = {name: (name, *call) for name, call in with_tools.CALLS.items()}
CALLS["fences"] = ("qwen3", "fences", FENCE)


def test_no_format_is_left_out() -> None:
    written = {id(FORMATS[format_name]) for _, format_name, _ in CALLS.values()}
    assert written == {id(FORMATS[name]) for name in FORMATS}


@pytest.mark.parametrize("case", sorted(CALLS))
def test_calls_in_every_format_are_trained_as_they_were_written(hf: EpisodeRig, case: str) -> None:
    name, format_name, call = CALLS[case]
    turns, end = with_tools.turns_of(name)
    script = (
        Turn((call,)),
        Turn((call,), push=True, push_behind=4),
        Turn((with_episodes.ANSWERS.get(name, "21"),)),
    )
    for history in ("fork", "keep") if name not in with_episodes.REFUSED else ("keep",):
        config = config_of(
            env="tools",
            kwargs={"tools": ["tests.unit.episodes.test_tool_episodes:add"], "format": format_name},
            special_tokens="show",
            history=history,
        )
        make = load_env("p", config)
        (one,) = hf.play(turns, end, partial(EnvHost, "p", config, make, turns), script)
        assert (one.reward, one.parts["p/tool_calls"], one.parts["p/malformed"]) == (1.0, 2, 0)
        assert len(hf.versions[1]) == 2, "new weights in the middle of a call"
    garbled = (Turn((call[: len(call) // 2], 20, call[len(call) // 2 :])), Turn((9,)))
    hf.play(turns, end, partial(EnvHost, "p", config, make, turns), garbled)


ROWS = {"tools": {"tools": ["calculator"], "format": "hermes"}}
"""Environments that need arguments."""
SOLVED_BY = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17+4"}}\n</tool_call>'


@pytest.mark.parametrize("env", list(ENVS))
def test_log_probs_are_exact_in_every_built_in_environment(hf: EpisodeRig, env: str) -> None:
    """A policy that writes words of a kind that the environment knows, and noise."""
    turns, end = turns_of("qwen3")
    seats = 2 if env == "self_play" else 1
    config = config_of(env=env, kwargs=ROWS.get(env, {}), seats=seats, max_turns=8)
    make = load_env("p", config)
    dice = random.Random(env)
    words = ["left", "down", "1", "5", "hit", "search: red shoes", "calculate: 2+3", "go to desk 1"]
    words += ["ls", "```python\nprint(1)\n```"]
    words = [SOLVED_BY] if env == "tools" else words
    script = tuple(
        Turn((dice.choice(words), dice.choice([0, 3])), push=number == 1) for number in range(5)
    )
    task = TASK if env == "tools" else GroupTask(Prompt("p:3", (), "", "", "p", {"seed": 3}), 0)
    host = partial(EnvHost, "p", config, make, turns)
    samples = hf.play(turns, end, host, script, task, samples_per_prompt=seats)
    assert len(samples) == seats
    if env == "tools":
        assert samples[0].parts["p/tool_calls"] == 5
    if len(hf.written) > 1:
        assert hf.versions[0].isdisjoint(hf.versions[1]), "new weights within the episode"


def test_log_probs_of_an_agent_at_the_endpoint_are_exact(hf: EpisodeRig) -> None:
    """Two conversations that alternate, the second of which is a repetition."""
    turns, end = turns_of("qwen3")
    config = config_of(env=None, agent="a:b", cut_turn="end", special_tokens="show")

    async def agent(task: AgentTask) -> float:
        first, second = [user("plan")], [user("look")]
        for conversation in (first, second, first, second):
            found = await ask(task, conversation)
            conversation += [{"role": "assistant", "content": found}, user("on")]
        await ask(task, [user("plan")])
        return 1.0

    script = tuple(Turn((9,), push=number == 1) for number in range(5))
    (one,) = hf.play(turns, end, partial(AgentHost, "p", config, agent, turns), script)
    assert one.parts["p/conversations"] == 3


PIECE = st.sampled_from([1, 4, 9, "left", "<think>\n", "\n</think>\n\n", "<tool_call>", "µ"])
TURN = st.builds(
    Turn,
    pieces=st.lists(PIECE, min_size=1, max_size=4).map(tuple),
    ends=st.sampled_from([True, True, False]),
    push=st.sampled_from([False, False, True]),
    push_behind=st.sampled_from([None, None, 0, 2]),
    said=st.sampled_from(["a wall", "12 µ", "</think>", "<|im_end|>"]),
    role=st.sampled_from(["user", "user", "tool"]),
    new_context=st.sampled_from([False, False, False, True]),
)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(NAMES),
    st.lists(TURN, min_size=1, max_size=5).map(tuple),
    st.sampled_from(["keep", "fork"]),
    st.sampled_from(["contexts", "turns"]),
    st.sampled_from(["hide", "show"]),
)
def test_any_script_of_turns_is_trained_exactly(
    hf: EpisodeRig,
    name: str,
    script: tuple[Turn, ...],
    history: str,
    rows: str,
    shown: str,
) -> None:
    history = history if name in REWRITTEN else "keep"
    play(hf, name, script, history=history, rows=rows, special_tokens=shown, thoughts=shown)


TRAINERS = ("fsdp2", "deepspeed-zero2", "megatron-dp2")


def trainers(spec: WorkerSpec, folder: Path) -> dict[tuple[str, bool], list[list[Tensor]]]:
    """Log-probs of each batch with each of two models, by trainer and whether rows are packed."""
    folders, batches = torch.load(folder.parent / "batches.pt", weights_only=False)
    group = GroupMembership(spec)
    found: dict[tuple[str, bool], list[list[Tensor]]] = {}
    for name, packing in product(TRAINERS, (False, True)):
        (backend,) = (one for one in TRAIN_BACKENDS if one.name == name)
        found[name, packing] = []
        for path in folders:
            trainer = backend.build(spec, ModelConfig(path=str(path)), packing=packing)
            scores = [trainer.score(batch).logprobs_BT for batch in batches]
            found[name, packing].append(scores)
            trainer.close()
    group.leave()
    return found


def chosen(scores: tuple[Tensor, Tensor], version: int, _: object) -> Tensor:
    """The log-probs with the weights of a version; even versions have the first ones."""
    return scores[version % 2]


@pytest.mark.slow
def test_trainers_compute_the_same_log_probs_again(hf: EpisodeRig, tmp_path: Path) -> None:
    """Each trainer, with rows that are padded and with packed ones."""
    hf.played.clear()
    for name in ("qwen3", "gpt_oss", "mistral_small_3_1"):
        play(hf, name, SCRIPT, history="fork" if name in REWRITTEN else "keep")
    assert all(len(rows.versions) >= 3 for rows in hf.played)
    torch.save((hf.folders, [rows.batch for rows in hf.played]), tmp_path / "batches.pt")
    (found,) = run_ranks(1, trainers, tmp_path / "rank", timeout_s=280)
    assert len(found) == 2 * len(TRAINERS)
    for scores in found.values():
        for number, rows in enumerate(hf.played):
            of_old, of_new = (by_weights[number] for by_weights in scores)
            rows.check(partial(chosen, (of_old, of_new)))


@pytest.mark.slow
def test_vllm_too_writes_what_is_trained_with_the_log_probs_of_a_forward_pass(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    """It chooses all of its tokens itself."""
    with episode_rig("vllm", tmp_path, loop) as rig:
        for name in NAMES:
            play(rig, name, SCRIPT)
            assert len(rig.written) == len(SCRIPT)
            assert len(set().union(*rig.versions)) >= 3
