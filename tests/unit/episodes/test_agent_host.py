"""Agents of other frameworks in their host: real clients over HTTP, scripted answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from roll.config.sections.environment import EnvironmentConfig
from roll.core.errors import EnvironmentFailedError
from roll.core.types import Message
from roll.data.chat.turns import Turns
from roll.envs.agents.answers import Answer
from roll.envs.agents.api import AgentTask
from roll.envs.agents.conversations import Conversations
from roll.envs.agents.host import AgentHost
from roll.envs.agents.requests import ChatRequest, RequestError
from roll.envs.agents.responses import request_of
from roll.envs.observed import Observed
from tests.tiny import char_tokenizer
from tests.unit.data.test_chat_templates import settings_of

END = 1
Body = dict[str, Any]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def client(task: AgentTask) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)


async def ask(task: AgentTask, messages: list[Any], **more: Any) -> str:
    made = await client(task).chat.completions.create(model=task.model, messages=messages, **more)
    return str(made.choices[0].message.content)


def played(agent: Callable[[AgentTask], Any], *answers: str, **config: Any) -> list[Observed]:
    """What the agent says, turn by turn; the policy gives these answers."""

    tokenizer = char_tokenizer()
    refusal = "{% if messages[0].role == 'nobody' %}{{ raise_exception('who?') }}{% endif %}"
    tokenizer.chat_template = f"{refusal}{tokenizer.chat_template}"

    async def main() -> list[Observed]:
        host = AgentHost(
            "helper",
            EnvironmentConfig(agent="a:b", **config),
            agent,
            Turns(tokenizer, settings_of(), frozenset({END})),
        )
        try:
            seen = [await host.open("e", 7, {"question": "2+2"})]
            for answer in answers:
                last = None if answer.endswith("~") else END
                seen.append(await host.act("e", answer.rstrip("~"), last))
            await host.close("e")
            return seen
        finally:
            await host.shut()

    return asyncio.run(asyncio.wait_for(main(), 30))


def text(observed: Observed) -> str:
    return str(char_tokenizer().decode(list(observed.tokens)))


def test_requests_are_turns_and_what_follows_an_answer_continues_it() -> None:
    async def agent(task: AgentTask) -> dict[str, Any]:
        messages = [user(task.options["question"])]
        first = await ask(task, messages)
        messages += [{"role": "assistant", "content": first}, user("sure?")]
        second = await ask(task, messages)
        return {"reward": float(second == "yes"), "asked": 2, "mean": 3, "name": "x"}

    first, second, last = played(agent, "4", "yes")
    assert (text(first), first.row) == ("<user>2+2<assistant>", 0)
    assert (text(second), second.row) == ("<user>sure?<assistant>", 0)
    assert (last.reward, last.terminated) == (1.0, True)
    assert dict(last.info) == {"asked": 2.0, "info_mean": 3.0}  # `mean` is that of the rewards


def test_a_plain_function_and_the_plain_client_do_as_well() -> None:
    def agent(task: AgentTask) -> float:
        made = OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)
        found = made.chat.completions.create(model="any", messages=[user("go")])  # type: ignore[list-item]
        assert found.choices[0].finish_reason == "length"
        return 0.5 if found.choices[0].message.content == "half" else 0.0

    assert played(agent, "half~")[-1].reward == 0.5


def test_what_extends_no_conversation_begins_another() -> None:
    async def agent(task: AgentTask) -> float:
        messages = [user("plan")]
        plan = await ask(task, messages)
        await ask(task, [user("sub-task")])
        await ask(task, [*messages, {"role": "assistant", "content": plan}, user("go on")])
        await ask(task, [*messages, {"role": "assistant", "content": "rewritten"}, user("go on")])
        await ask(task, messages)  # once more
        return 1.0

    seen = played(agent, "a", "b", "c", "d", "e")
    assert [one.row for one in seen[:-1]] == [0, 1, 0, 2, 3]
    assert text(seen[2]) == "<user>go on<assistant>"
    assert text(seen[3]) == "<user>plan<assistant>rewritten<user>go on<assistant>"


def test_requests_at_the_same_time_wait_for_each_other() -> None:
    async def agent(task: AgentTask) -> float:
        found = await asyncio.gather(*(ask(task, [user(f"q{i}")]) for i in range(3)))
        return float(sorted(found) == ["a", "b", "c"])

    assert played(agent, "a", "b", "c")[-1].reward == 1.0


def test_stop_strings_and_limits_reach_the_engine_and_are_cut_from_the_answer() -> None:
    async def agent(task: AgentTask) -> float:
        found = await ask(task, [user("go")], stop=["END"], max_tokens=5)
        return float(found == "so ")

    first, last = played(agent, "so END")
    assert (first.stop, first.max_new_tokens) == (("END",), 5)
    assert last.reward == 1.0


def test_what_the_endpoint_does_not_have_is_said() -> None:
    async def agent(task: AgentTask) -> float:
        with pytest.raises(NotFoundError, match="POST /v1/embeddings is not supported; there are"):
            await client(task).embeddings.create(model="m", input="x")
        return float(await ask(task, [user("go")]) == "yes")

    assert played(agent, "yes")[-1].reward == 1.0


def test_a_stream_has_the_whole_answer() -> None:
    async def agent(task: AgentTask) -> float:
        body: Body = {"model": task.model, "messages": [user("go")], "stream": True}
        stream: Any = await client(task).chat.completions.create(**body)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return float("".join(pieces) == "all of it")

    assert played(agent, "all of it")[-1].reward == 1.0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"n": 2}, "`n` = 2 is not supported"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        ({"max_tokens": -1}, "`max_tokens` must be a whole number above 0"),
        ({"max_completion_tokens": 0}, "`max_completion_tokens` must be a whole number above 0"),
        ({"stop": 3}, "`stop` must be a text or a list of texts, found 3"),
        ({"stop": ["a", None]}, "`stop` must be a text or a list of texts, found "),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_the_agent_goes_on(
    more: Body, message: str
) -> None:
    async def agent(task: AgentTask) -> float:
        body: Body = {"model": "m", "messages": [user("go")], **more}
        with pytest.raises(BadRequestError, match=message):
            await client(task).chat.completions.create(**body)
        return float(await ask(task, [user("go")]) == "yes")

    assert played(agent, "yes")[-1].reward == 1.0


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"{", ""),
        (b"[" * 100_000, ""),
        (b'{"messages": [{"role": "user", "content": "go"}], "stop": 3}', ""),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', ""),
        (b'{"messages": [], "n": 1' + b"0" * 5000 + b"}", ""),
        (b"\xff", ""),
        (b"{}", "; charset=none"),
    ],
    ids=["no end", "nested", "a number", "half a pair", "a long number", "no text", "charset"],
)
def test_whatever_the_body_is_the_status_is_no_error_of_the_server(body: bytes, kind: str) -> None:
    def agent(task: AgentTask) -> float:
        headers = {"Authorization": f"Bearer {task.api_key}"}
        headers["Content-Type"] = f"application/json{kind}"
        url = f"{task.base_url}/chat/completions"
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10)
        made = OpenAI(base_url=task.base_url, api_key=task.api_key)
        made.chat.completions.create(model="any", messages=[user("go")])  # type: ignore[list-item]
        return float(caught.value.code == 400)

    assert played(agent, "x")[-1].reward == 1.0


def test_a_stranger_without_the_key_gets_nothing() -> None:
    codes = []

    def agent(task: AgentTask) -> float:
        for key in ("", "other"):
            request = urllib.request.Request(
                f"{task.base_url}/chat/completions",
                json.dumps({"messages": [user("go")]}).encode(),
                {"Authorization": f"Bearer {key}"},
            )
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request, timeout=10)
            codes.append(caught.value.code)
        made = OpenAI(base_url=task.base_url, api_key=task.api_key)
        made.chat.completions.create(model="any", messages=[user("go")])  # type: ignore[list-item]
        return 1.0

    assert played(agent, "x")[-1].reward == 1.0
    assert codes == [401, 401]


async def raises(task: AgentTask) -> float:
    await ask(task, [user("go")])
    raise ValueError("lost its way")


async def leaves(task: AgentTask) -> float:
    await ask(task, [user("go")])
    raise SystemExit(2)


class PanicError(BaseException):
    """What libraries in Rust raise."""


async def panics(task: AgentTask) -> float:
    await ask(task, [user("go")])
    raise PanicError("index")


def runs_out(task: AgentTask) -> float:
    plain = OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)
    plain.chat.completions.create(model="any", messages=[user("go")])  # type: ignore[list-item]
    return float(next(iter([])))


async def forgets(task: AgentTask) -> Any:
    await ask(task, [user("go")])


async def sleeps(task: AgentTask) -> float:
    await ask(task, [user("go")])
    await asyncio.sleep(60)
    return 1.0


async def boasts(task: AgentTask) -> int:
    await ask(task, [user("go")])
    return 10**400


async def boasts_more(task: AgentTask) -> dict[str, int]:
    await ask(task, [user("go")])
    return {"reward": 10**5000}


async def mumbles(task: AgentTask) -> float:
    await ask(task, [user("go")])
    await ask(task, [{"role": "nobody", "content": "go"}])
    return 1.0


async def silent(task: AgentTask) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (raises, "the agent raised ValueError: lost its way"),
        (leaves, "the agent raised SystemExit: 2"),
        (panics, "the agent raised PanicError: index"),
        (runs_out, "the agent raised StopIteration: "),
        (forgets, "must return a finite number, or a dict with `reward`; found None"),
        (boasts, "must return a finite number, or a dict with `reward`; found 1000000"),
        (boasts_more, "must return a finite number, or a dict with `reward`; Exceeds the limit"),
        (mumbles, "chat template of the model does not render what the agent sends: .*who"),
        (silent, "the agent ended without a request to the policy"),
    ],
)
def test_what_an_agent_does_wrong_is_said(agent: Any, message: str) -> None:
    with pytest.raises(EnvironmentFailedError, match=message):
        played(agent, "x")


def test_an_agent_that_neither_asks_nor_ends_is_given_up() -> None:
    message = "the agent neither asked nor ended within 0.3 s"
    with pytest.raises(EnvironmentFailedError, match=message):
        played(sleeps, "x", step_timeout_s=0.3)


def test_an_episode_that_is_ended_refuses_what_its_agent_still_asks() -> None:
    told: list[str] = []
    heard = threading.Event()

    def agent(task: AgentTask) -> float:
        made = OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)
        try:
            made.chat.completions.create(model="any", messages=[user("go")])  # type: ignore[list-item]
        except APIError as error:
            told.append(str(error))
        heard.set()
        return 1.0

    assert len(played(agent)) == 1
    assert heard.wait(10)
    assert "the episode has ended" in told[0]


def test_an_episode_that_ends_while_a_request_comes_refuses_it() -> None:
    found: list[bytes] = []
    heard = threading.Event()

    def agent(task: AgentTask) -> float:
        body = json.dumps({"model": "any", "messages": [user("late")]}).encode()
        address = urllib.parse.urlsplit(task.base_url)
        with socket.create_connection((address.hostname, address.port), timeout=10) as slow:
            head = [
                "POST /v1/chat/completions HTTP/1.1",
                "Host: here",
                f"Content-Length: {len(body)}",
                "Content-Type: application/json",
                f"Authorization: Bearer {task.api_key}",
            ]
            slow.sendall("\r\n".join([*head, "", ""]).encode())
            made = OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)
            with contextlib.suppress(APIError):  # until the episode is over
                made.chat.completions.create(model="any", messages=[user("go")])  # type: ignore[list-item]
            slow.sendall(body)
            found.append(slow.recv(1 << 16))
        heard.set()
        return 1.0

    async def main() -> None:
        config = EnvironmentConfig(agent="a:b")
        turns = Turns(char_tokenizer(), settings_of(), frozenset({END}))
        host = AgentHost("helper", config, agent, turns)
        await host.open("e", 7, {})
        await host.close("e")
        assert await asyncio.to_thread(heard.wait, 30)
        await host.shut()

    asyncio.run(main())
    assert found[0].startswith(b"HTTP/1.1 410")


def request_with(messages: list[Message]) -> ChatRequest:
    return ChatRequest(tuple(messages), (), None, stream=False)


MESSAGES = st.lists(
    st.builds(Message, st.sampled_from(["user", "assistant"]), st.sampled_from("ab")),
    min_size=1,
    max_size=5,
)


@given(st.lists(st.tuples(MESSAGES, st.sampled_from("ab")), max_size=6))
def test_a_request_continues_the_longest_conversation_that_it_begins_with(
    requests: list[tuple[list[Message], str]],
) -> None:
    """All that was said in a conversation is what the request says, whatever came before."""
    book, texts = Conversations(), dict[int, list[Message]]()
    for messages, answer in requests:
        number, new, begins = book.place(request_with(messages))
        prefixes = [n for n, known in texts.items() if messages[: len(known)] == known]
        longest = max((len(texts[n]) for n in prefixes if len(texts[n]) < len(messages)), default=0)
        assert begins == (longest == 0)
        assert list(new) == messages[longest:]
        texts[number] = [*(texts[number] if not begins else ()), *new]
        assert texts[number] == list(messages)
        book.answered(number, Answer(answer), answer)
        texts[number] = [*messages, Message("assistant", answer)]


@pytest.mark.parametrize("again", ["go", " go\n", "goEND", "go END "])
def test_an_answer_is_the_same_without_its_white_space_and_with_what_stopped_it(again: str) -> None:
    book, begin = Conversations(), Message("user", "x")
    book.place(request_with([begin]))
    book.answered(0, Answer("go "), "go END" if " " in again.strip() else "goEND")
    more = [begin, Message("assistant", again), Message("user", "y")]
    assert book.place(request_with(more)) == (0, (Message("user", "y"),), False)
    other = [begin, Message("assistant", "went"), Message("user", "y")]
    assert book.place(request_with(other))[2]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=1), inner),
    max_leaves=3,
)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": JSON}) | JSON, max_size=2)
SAID = st.fixed_dictionaries({"role": st.just("user") | JSON, "content": PARTS | JSON})
KEYS = (
    *("stop", "max_tokens", "max_completion_tokens", "stream", "n", "logprobs", "tools"),
    *("response_format", "parallel_tool_calls", "stream_options"),
)
BODIES = st.fixed_dictionaries(
    {"messages": st.just([user("go")]) | st.lists(SAID, max_size=2) | JSON},
    optional=dict.fromkeys(KEYS, JSON),
)


CALLS = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": JSON}) | JSON}
)
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output"]) | JSON,
        "role": st.just("user") | JSON,
        "content": PARTS | JSON,
        "name": JSON,
        "arguments": JSON,
        "output": JSON,
    },
)
RESPONSES = st.fixed_dictionaries(
    {"input": st.just("go") | st.lists(ITEMS, max_size=2) | JSON},
    optional=dict.fromkeys(("instructions", "max_output_tokens", "stream", "text"), JSON)
    | {"tools": st.lists(CALLS, max_size=2) | JSON},
)
WITH_CALLS = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.just("assistant"), "tool_calls": st.lists(CALLS, max_size=2) | JSON}
            ),
            max_size=2,
        ),
        "tools": st.lists(CALLS, max_size=2) | JSON,
    }
)


@pytest.mark.parametrize("read", [ChatRequest.of, request_of])
@given(BODIES | RESPONSES | WITH_CALLS | JSON)
def test_any_body_of_json_is_a_request_or_is_refused(
    read: Callable[[Any], ChatRequest], body: Any
) -> None:
    try:
        request = read(body)
    except RequestError:
        return
    texts = [*request.stop, *(text for m in request.messages for text in (m.role, m.content))]
    assert all(isinstance(text, str) and text.encode() is not None for text in texts)
    assert all(request.stop), "engines refuse an empty text"
    assert request.max_new_tokens is None or request.max_new_tokens > 0


@pytest.mark.parametrize("body", [None, [], {}, {"messages": "x"}, {"messages": [3]}])
def test_a_body_that_is_no_request_is_refused(body: Any) -> None:
    with pytest.raises(RequestError):
        ChatRequest.of(body)
