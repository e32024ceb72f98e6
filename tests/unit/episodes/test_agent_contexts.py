"""Conversations of agents that the chat template rewrites: the endpoint renders what they send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.config.sections.environment import EnvironmentConfig
from roll.core.completion import FinishReason
from roll.core.types import GenerateRequest
from roll.envs.agents.api import AgentTask
from roll.envs.agents.host import AgentHost
from roll.rollout.types import Group, ScoredSample
from tests.episodes import Writer, played
from tests.unit.data.test_turns import turns_of
from tests.unit.episodes.test_agent_host import ask, client, user
from tests.unit.episodes.test_contexts import TASK, Told, check_rows, encoded, rendered, text


def play(
    agent: Callable[[AgentTask], Any], answers: list[str], **options: Any
) -> tuple[ScoredSample, Told]:
    """The sample of an episode of an agent, to which the policy gives these answers."""
    turns, end = turns_of("qwen3")
    told = Told(turns, end)
    config = EnvironmentConfig.model_validate(
        {"agent": "a:b", "tags": ("p",), "special_tokens": "show", **options}
    )

    def answer(request: GenerateRequest) -> tuple[list[int], FinishReason]:
        written = [*encoded(turns, answers[len(told.written)]), end]
        told.contexts.append(tuple(request.prompt_tokens))
        told.written.append(written)
        return written, FinishReason.STOP

    async def run() -> Group:
        return await played(Writer(answer), AgentHost("p", config, agent, turns), TASK)

    (one,) = asyncio.run(asyncio.wait_for(run(), 30)).samples
    return one, told


ANSWER = st.sampled_from(["left", "<think>\nwhy\n</think>\n\nleft", " so "])


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), ANSWER), min_size=1, max_size=6),
    st.sampled_from(["keep", "fork"]),
    st.sampled_from(["contexts", "turns"]),
    st.sampled_from(["hide", "show"]),
)
def test_every_turn_of_an_agent_is_trained_once_behind_what_the_engine_was_given(
    script: list[tuple[int, str]], history: str, rows: str, thoughts: str
) -> None:
    """Three conversations that alternate, each of which the agent continues as it got it."""
    sent: list[list[dict[str, str]]] = []

    async def agent(task: AgentTask) -> float:
        conversations = [[user(f"begin {number}")] for number in range(3)]
        for chosen, _ in script:
            messages = conversations[chosen]
            sent.append(list(messages))
            found = await ask(task, messages)
            messages += [{"role": "assistant", "content": found}, user("on")]
        return 0.5

    answers = [answer for _, answer in script]
    one, told = play(agent, answers, history=history, rows=rows, thoughts=thoughts)
    check_rows([one], told)
    assert one.reward == 0.5
    assert one.parts["p/turns"] == len(script)
    assert one.parts["p/conversations"] == len({chosen for chosen, _ in script})
    if history == "fork":
        contexts = [text(told, context) for context in told.contexts]
        assert contexts == [rendered("qwen3", told, messages) for messages in sent]
    elif rows == "contexts":
        assert len(one.rows) == one.parts["p/conversations"]


def test_the_text_of_a_sample_is_its_first_conversation_in_all_rows() -> None:
    async def agent(task: AgentTask) -> float:
        messages = [user("plan")]
        found = await ask(task, messages)
        await ask(task, [user("other")])
        await ask(task, [*messages, {"role": "assistant", "content": found}, user("on")])
        return 1.0

    one, told = play(agent, ["<think>\nwhy\n</think>\n\na", "b", "c"], history="fork")
    assert [turn.row for turn in one.turns] == [0, 1, 2]
    first, _, last = (" ".join(map(str, written)) for written in told.written)
    assert one.sample.response_text == f"{first}\non\n{last}"


@pytest.mark.parametrize("history", ["keep", "fork"])
def test_an_agent_is_told_the_numbers_of_tokens_that_the_engine_saw_and_wrote(history: str) -> None:
    seen: list[tuple[int, int, int]] = []

    async def agent(task: AgentTask) -> float:
        made = client(task)
        messages: list[Any] = [user("go")]
        model: Any = {"model": task.model}
        for _ in range(3):
            whole: Any = await made.chat.completions.create(**model, messages=messages)
            used = whole.usage
            seen.append((used.prompt_tokens, used.completion_tokens, used.total_tokens))
            said = whole.choices[0].message.content
            messages += [{"role": "assistant", "content": said}, user("on")]
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        stream: Any = await made.chat.completions.create(**model, messages=messages, **options)
        *pieces, end = [chunk async for chunk in stream]
        assert not end.choices
        assert all(each.usage is None for each in pieces)
        used = end.usage
        seen.append((used.prompt_tokens, used.completion_tokens, used.total_tokens))
        response: Any = await made.responses.create(**model, input="new")
        used = response.usage
        seen.append((used.input_tokens, used.output_tokens, used.total_tokens))
        return 1.0

    answers = ["a", "<think>\nwhy\n</think>\n\nleft", "so", "b", "c"]
    one, told = play(agent, answers, history=history, thoughts="show")
    assert one.reward == 1.0
    sizes = zip(map(len, told.contexts), map(len, told.written), strict=True)
    assert seen == [(before, wrote, before + wrote) for before, wrote in sizes]
