"""Episodes in several rows: each turn is trained once, behind what the engine was given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from roll.config import load_config
from roll.config.sections.environment import EnvironmentConfig
from roll.core.completion import NOBODY, FinishReason
from roll.core.errors import ConfigError
from roll.core.types import GenerateRequest, Message, Prompt
from roll.data.chat.turns import Turns
from roll.envs.contexts import rewrites_turns
from roll.envs.host import EnvHost
from roll.rewards.thinking import opened_thought
from roll.rollout.assemble import assemble
from roll.rollout.dense import dense
from roll.rollout.rows import with_rows_of_branches
from roll.rollout.serialization import from_plain, to_plain
from roll.rollout.types import Group, GroupTask, ScoredSample
from tests.episodes import Writer, played
from tests.pipelines.test_agentic import task as task_file
from tests.unit.data.test_chat_templates import NAMES
from tests.unit.data.test_turns import turns_of

TEMPLATES = ["deepseek_v3_1", "glm_4_5", "qwen3", "qwen3_thinking_2507"]
TASK = GroupTask(Prompt("p:0", (), "", "", "p"), step=0)


@dataclass(frozen=True)
class Play:
    """A turn of the policy, and what the environment says to it."""

    thought: str | None = None
    word: str = "left"
    spelled: bool = False
    """Whether the marks of thoughts are written as letters, as no tokenizer would."""
    ends: bool = True
    said: str = "a wall"
    role: str = "user"
    new_context: bool = False
    seat: int = 0
    """Player of the next turn."""
    reward: float = 0.5


@dataclass
class Script:
    """Environment that says what a test wrote down."""

    plays: Sequence[Play]
    turn: int = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return "begin", {}

    def step(self, action: str) -> Any:
        play = self.plays[self.turn]
        self.turn += 1
        info = {"seat": play.seat, "new_context": play.new_context}
        said = Message(play.role, play.said)
        return said, play.reward, self.turn == len(self.plays), False, info

    def close(self) -> None: ...


@dataclass
class Told:
    """What the engine was asked, and wrote."""

    turns: Turns
    end: int
    contexts: list[tuple[int, ...]] = field(default_factory=list)
    written: list[list[int]] = field(default_factory=list)


def encoded(turns: Turns, text: str) -> list[int]:
    return list(turns.tokenizer([text], add_special_tokens=False)["input_ids"][0])


def words_of(name: str, play: Play) -> list[str]:
    """The text of a turn, in pieces that are tokenized one by one."""
    if play.thought is None:
        return [play.word]
    opens = [] if name == "qwen3_thinking_2507" else ["<think>\n"]
    pieces = [*opens, play.thought, "\n</think>\n\n", play.word]
    return list("".join(pieces)) if play.spelled else pieces


def play(name: str, plays: Sequence[Play], **options: Any) -> tuple[list[ScoredSample], Told]:
    """The samples of an episode in which the policy writes these turns."""
    turns, end = turns_of(name)
    told = Told(turns, end)
    max_tokens = options.pop("max_tokens", 100_000)
    settings = {"env": "x", "tags": ("p",), "cut_turn": "go_on", **options}
    config = EnvironmentConfig.model_validate({"max_turns": 99, **settings})

    def answer(request: GenerateRequest) -> tuple[list[int], FinishReason]:
        number = int(request.id.rpartition(".")[2])
        made = plays[number]
        tokens = [token for piece in words_of(name, made) for token in encoded(turns, piece)]
        tokens += [end] if made.ends else []
        room = request.sampling.max_new_tokens
        cut = len(tokens) > room or not made.ends
        told.contexts.append(tuple(request.prompt_tokens))
        told.written.append(tokens[:room])
        return tokens[:room], FinishReason.LENGTH if cut else FinishReason.STOP

    async def run() -> Group:
        host = EnvHost("p", config, lambda: Script(plays), turns)
        samples = config.seats
        return await played(
            Writer(answer), host, TASK, max_tokens=max_tokens, samples_per_prompt=samples
        )

    return list(asyncio.run(run()).samples), told


def rows_of(one: ScoredSample) -> list[list[int]]:
    return [[*row.prompt.tokens, *row.completion.tokens] for row in one.rows]


def check_rows(samples: list[ScoredSample], told: Told) -> None:
    """Each turn stands once in a row, behind what the engine was given, and nothing else is
    trained."""
    found = []
    for one in samples:
        rows, trained = rows_of(one), set()
        for turn in one.turns:
            start = len(one.rows[turn.row].prompt.tokens)
            begin, end = start + turn.begin, start + turn.end
            found.append((tuple(rows[turn.row][:begin]), rows[turn.row][begin:end]))
            trained |= {(turn.row, place) for place in range(begin, end)}
        assert len(trained) == sum(turn.end - turn.begin for turn in one.turns), "no token twice"
        sampled = {
            (number, len(row.prompt.tokens) + place)
            for number, row in enumerate(one.rows)
            for place, version in enumerate(row.completion.versions)
            if version != NOBODY
        }
        assert sampled == trained
        table = with_rows_of_branches(assemble([Group(TASK.prompt, (one,), 0)]), 3)
        batch = dense(table)
        masked = {(row, place) for row, place in batch.loss_mask.nonzero().tolist()}
        assert masked == trained, "and in the batch, too"
        for number, row in enumerate(rows):
            assert batch.tokens[number, : len(row)].tolist() == row
        assert len({row.id for row in one.rows}) == len({row.group for row in one.rows}) == 1
    asked = list(zip(told.contexts, told.written, strict=True))
    assert sorted(found) == sorted(asked), "each turn once, behind what the engine was given"


def rendered(name: str, told: Told, said: list[dict[str, str]]) -> str:
    text = told.turns.tokenizer.apply_chat_template(
        said, tokenize=False, add_generation_prompt=True
    )
    return str(text)


def text(told: Told, tokens: Sequence[int]) -> str:
    return str(told.turns.tokenizer.decode(list(tokens), skip_special_tokens=False))


def contexts_by_template(
    name: str, plays: Sequence[Play], told: Told, *, forget: bool = False
) -> tuple[list[str], list[int]]:
    """What the template makes of the conversation before each turn, and in which turns this is not
    what the same player saw and wrote before, with what the template puts behind an answer."""
    said: dict[int, list[dict[str, str]]] = {0: [{"role": "user", "content": "begin"}]}
    kept: dict[int, str] = {}
    seen: dict[int, str] = {}
    seat, contexts, begun = 0, [], []
    for number, written in enumerate(told.written):
        writer = seat
        context = rendered(name, told, said[seat])
        contexts.append(context)
        if context != seen.get(seat):
            begun.append(number)
        wrote = text(told, [token for token in written if token != told.end])
        opened = "<think>\n" if name == "qwen3_thinking_2507" else ""
        said[seat].append({"role": "assistant", "content": opened + wrote})
        before, made = context + wrote, plays[number]
        seat = made.seat
        content = made.said
        if made.role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        message = {"role": "user", "content": content}
        kept[writer] = before
        if forget or made.new_context or seat not in said:
            said[seat] = []
            kept.pop(seat, None)
        said[seat].append(message)
        plain = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "zz"}, message]
        behind = rendered(name, told, plain).partition("zz")[2]
        seen = {seat: kept[seat] + behind} if seat in kept else {}
    return contexts, begun


PLAY = st.builds(
    Play,
    thought=st.sampled_from([None, None, "why", "a\n\nb", ""]),
    word=st.sampled_from(["left", "up 1", " so ", "x</think>y", ""]),
    spelled=st.booleans(),
    ends=st.sampled_from([True, True, False]),
    said=st.sampled_from(["a wall", "12 µ", "left"]),
    role=st.sampled_from(["user", "user", "tool"]),
    new_context=st.sampled_from([False, False, False, True]),
    seat=st.integers(0, 1),
    reward=st.sampled_from([0.0, 0.5, -1.0]),
)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(TEMPLATES),
    st.lists(PLAY, min_size=1, max_size=5),
    st.sampled_from(["keep", "fork", "forget"]),
    st.sampled_from(["contexts", "turns"]),
    st.sampled_from([1, 2]),
    st.sampled_from([300, 100_000]),
)
def test_every_sampled_token_is_trained_once_behind_what_the_engine_was_given(
    name: str, plays: list[Play], history: str, rows: str, seats: int, max_tokens: int
) -> None:
    plays = [replace(made, seat=made.seat % seats) for made in plays]
    samples, told = play(
        name, plays, history=history, rows=rows, seats=seats, max_tokens=max_tokens
    )
    played = [one for one in samples if one.has_reward]
    check_rows(played, told)
    assert all(len(row) <= max_tokens for one in played for row in rows_of(one))
    heard = plays[: len(told.written)]
    if max_tokens == 100_000:
        assert len(told.written) == len(plays)
        assert sum(one.reward for one in played) == sum(made.reward for made in heard)
    if rows == "turns":
        assert sum(len(one.rows) for one in played) == len(told.written)
    contexts, begun = contexts_by_template(name, plays, told, forget=history == "forget")
    if history != "keep":
        assert [text(told, context) for context in told.contexts] == contexts
        if rows == "contexts":
            assert sum(len(one.rows) for one in played) == len(begun)
    elif rows == "contexts" and seats == 1:
        cuts = sum(made.new_context for made in heard[: len(told.written) - 1])
        assert [len(one.rows) for one in played] == [1 + cuts]


def test_a_row_ends_where_the_template_drops_a_thought() -> None:
    plays = [Play("why"), Play(None, said="a door"), Play("and")]
    (one,), told = play("qwen3", plays, history="fork")
    assert [turn.row for turn in one.turns] == [0, 1, 1]
    assert text(told, one.rows[1].prompt.tokens) == (
        "<|im_start|>user\nbegin<|im_end|>\n<|im_start|>assistant\nleft<|im_end|>\n"
        "<|im_start|>user\na wall<|im_end|>\n<|im_start|>assistant\n"
    )
    assert one.parts["p/rows"] == 2
    (one,), told = play("qwen3", plays, history="keep")
    assert not one.branches
    assert "<think>\nwhy\n</think>\n\nleft" in text(told, told.contexts[2])


def test_thoughts_between_calls_of_tools_stay_in_one_row_as_the_template_keeps_them() -> None:
    plays = [Play("why", role="tool"), Play("so", role="tool"), Play("done"), Play(None)]
    (one,), told = play("qwen3", plays, history="fork")
    assert [turn.row for turn in one.turns] == [0, 0, 0, 1]
    assert "why" in text(told, told.contexts[2])
    assert "why" not in text(told, told.contexts[3])


def test_a_context_that_begins_anew_holds_what_the_environment_says_alone() -> None:
    plays = [Play(said="so far: left", new_context=True), Play(said="on"), Play()]
    for history in ("keep", "fork"):
        (one,), told = play("qwen3", plays, history=history)
        assert [turn.row for turn in one.turns] == [0, 1, 1]
        assert text(told, told.contexts[1]) == (
            "<|im_start|>user\nso far: left<|im_end|>\n<|im_start|>assistant\n"
        )
        assert one.reward == 1.5
        wrote = " ".join(map(str, told.written[0]))  # the text that this engine gives
        assert one.sample.response_text == f"{wrote}\nso far: left\n{wrote}\non\n{wrote}"
        assert "p/new_context" not in one.parts


def test_an_episode_that_forgets_has_a_row_for_each_observation_alone() -> None:
    plays = [Play("why", said="a door"), Play(None, said="on"), Play()]
    (one,), told = play("qwen3", plays, history="forget")
    assert [turn.row for turn in one.turns] == [0, 1, 2]
    assert [text(told, context) for context in told.contexts] == [
        f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
        for said in ("begin", "a door", "on")
    ]
    assert (one.reward, one.parts["p/rows"]) == (1.5, 3)


def test_a_new_row_without_room_truncates_the_episode() -> None:
    plays = [Play("why" * 20, said="so " * 30), Play()]
    _, told = play("qwen3", plays, history="fork")
    limit = len(told.contexts[1])
    (one,), told = play("qwen3", plays, history="fork", max_tokens=limit)
    assert one.sample.truncated
    assert (one.reward, len(told.contexts)) == (0.5, 1)
    (one,), told = play("qwen3", plays, history="fork", max_tokens=limit + 1)
    assert len(told.contexts) == 2


def test_rewards_of_turns_reach_the_last_token_of_each_in_its_row() -> None:
    plays = [Play("why", reward=0.25), Play("so", reward=0.5), Play(None, reward=1.0)]
    (one,), told = play("qwen3", plays, history="fork", credit="turns")
    assert (one.reward, one.total) == (0.0, 1.75)
    assert one.steps is not None
    ends = [sum(map(len, told.written[: i + 1])) for i in range(3)]
    between = len(one.rows[0].completion) - len(told.written[0])
    assert between == 0, "each turn has a row of its own here"
    assert one.steps.pairs == tuple(zip(ends, (0.25, 0.5, 1.0), strict=True))


def test_rows_survive_a_checkpoint() -> None:
    plays = [Play("why"), Play(None, said="a door"), Play("and")]
    (one,), _ = play("qwen3", plays, history="fork")
    group = Group(TASK.prompt, (one,), 0)

    def written(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: written(each) for key, each in value.items()}
        if isinstance(value, list):
            return [written(each) for each in value]
        return value() if callable(value) else value

    (again,) = from_plain(written(to_plain(group)), lambda _: TASK.prompt).samples
    assert again.turns == one.turns
    assert rows_of(again) == rows_of(one)


def test_templates_that_drop_earlier_thoughts_are_recognised() -> None:
    dropping = {name for name in NAMES if rewrites_turns(turns_of(name)[0])}
    assert dropping == {
        "deepseek_r1_distill_first",
        "deepseek_v3_1",
        "glm_4_5",
        "gpt_oss",
        "qwen3",
        "qwen3_thinking_2507",
    }


def test_a_template_that_takes_thoughts_apart_is_refused() -> None:
    turns, _ = turns_of("gpt_oss")
    config = EnvironmentConfig.model_validate({"env": "x", "history": "fork"})
    with pytest.raises(ConfigError, match=r"environments\.p\.history.*channels"):
        EnvHost("p", config, lambda: Script([]), turns)


def test_an_agent_sends_what_the_policy_is_to_know() -> None:
    with pytest.raises(ValidationError, match="`history: forget` is for `env`"):
        EnvironmentConfig.model_validate({"agent": "a:b", "history": "forget"})


@pytest.mark.parametrize("key", ["history: fork", "history: forget", "rows: turns"])
def test_rewards_of_steps_of_a_text_are_refused_where_it_has_several_rows(
    key: str, tmp_path: Path
) -> None:
    rewards = {"steps": {"fn": "test_run_rewards:steps", "process": True, "tags": ["words"]}}
    name, _, value = key.partition(": ")
    assert load_config(task_file(tmp_path / "one", rewards=rewards)).config
    with pytest.raises(ConfigError, match=r"rewards\.steps\.process.*`history`, `rows`"):
        load_config(task_file(tmp_path / "two", rewards=rewards, environment={name: value}))


def test_a_prompt_opens_a_thought_only_at_its_end() -> None:
    assert opened_thought("Which way?<think>\n") == "<think>\n"
    assert opened_thought("<think>\n</think>\n") == ""
    assert opened_thought("") == ""
