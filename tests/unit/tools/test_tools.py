"""Tools: made of functions, built in, or of users; every mistake of the policy is told to it."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.core.errors import ConfigError, EnvironmentFailedError, HostSpentError
from roll.envs.tools.api import Tool, ToolError
from roll.envs.tools.arguments import typed_arguments
from roll.envs.tools.built_in.calculator import calculator
from roll.envs.tools.cutting import cut_to
from roll.envs.tools.formats.api import Call, Malformed
from roll.envs.tools.functions import MAX_HUNG_THREADS, tool_of
from roll.envs.tools.loading import load_kits
from roll.envs.tools.running import Result, run_calls


def weather(city: str, unit: Literal["c", "f"] = "c", days: list[int] | None = None) -> Any:
    """Tells the weather
    of a city.

    Args:
        city: name of the city,
            in English.
        unit: scale.

    Returns:
        The weather.
    """
    if city == "nowhere":
        raise KeyError(city)
    return {"city": city, "unit": unit, "days": days}


async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


def run(*calls: Call | Malformed, timeout_s: float = 5.0) -> list[Result]:
    tools = {"weather": tool_of(weather), "wait": tool_of(wait)}
    return asyncio.run(run_calls(calls, tools, timeout_s))


def test_a_function_is_described_by_its_signature_and_docstring() -> None:
    tool = tool_of(weather)
    assert tool.name == "weather"
    assert tool.description == "Tells the weather of a city."
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "name of the city, in English."},
            "unit": {
                "type": "string",
                "enum": ["c", "f"],
                "default": "c",
                "description": "scale.",
            },
            "days": {
                "anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}],
                "default": None,
            },
        },
        "required": ["city"],
    }


def test_calls_of_a_turn_run_at_the_same_time_and_keep_their_order() -> None:
    slow, fast = Call("wait", {"seconds": 0.05}), Call("weather", {"city": "Rome", "days": ["1"]})
    first, second = run(slow, fast)
    assert first.text == "done"
    assert second.text == '{"city": "Rome", "unit": "c", "days": [1]}', "converted by the schema"
    assert not first.failed
    assert not second.failed


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            Call("wether", {}),
            "Error: there is no tool 'wether'; did you mean 'weather'? (there are",
        ),
        (Call("weather", {}), "Error: wrong arguments: city: Field required"),
        (Call("weather", {"city": 3}), "city: Input should be a valid string"),
        (Call("weather", {"city": "a", "unit": "k"}), "unit: Input should be 'c' or 'f'"),
        (Call("weather", {"city": "a", "when": "b"}), "when: Extra inputs are not permitted"),
        (Call("weather", {"city": "nowhere"}), "Error: KeyError: 'nowhere'"),
        (Call("wait", {"seconds": 9}), "Error: it took longer than 0.3 s"),
        (Malformed("oh", "the call is not valid JSON"), "Error: the call is not valid JSON"),
    ],
)
def test_a_mistake_is_told_and_costs_no_other_call(call: Call | Malformed, told: str) -> None:
    good = Call("weather", {"city": "Rome"})
    first, second, third = run(good, call, good, timeout_s=2.0 if call.name != "wait" else 0.3)
    assert told in second.text
    assert second.failed
    assert not first.failed
    assert not third.failed


def test_a_fault_of_the_machinery_is_no_mistake_of_the_policy() -> None:
    async def broken(_: Any) -> str:
        raise EnvironmentFailedError("the server is gone")

    tool = Tool("x", "", {}, broken)
    with pytest.raises(EnvironmentFailedError, match="server is gone"):
        asyncio.run(run_calls([Call("x", {})], {"x": tool}, 1.0))


async def cancelled(_: Any) -> str:
    raise asyncio.CancelledError


async def leaving(_: Any) -> str:
    raise SystemExit(3)


async def interrupted(_: Any) -> str:
    raise KeyboardInterrupt


async def exhausted(_: Any) -> Any:
    return await tool_of(end_of_a_list).call({})


def end_of_a_list() -> int:
    return next(iter([]))


async def left_by_a_thread(_: Any) -> Any:
    return await tool_of(exit_of_python).call({})


def exit_of_python() -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (cancelled, "Error: CancelledError: "),
        (leaving, "Error: SystemExit: 3"),
        (left_by_a_thread, "Error: SystemExit: 3"),
        (interrupted, "Error: KeyboardInterrupt: "),
        (exhausted, "Error: StopIteration: "),
    ],
)
def test_a_tool_that_ends_more_than_its_call_costs_no_other_call(broken: Any, told: str) -> None:
    tools = {"x": Tool("x", "", {}, broken), "wait": tool_of(wait)}
    calls = [Call("x", {}), Call("wait", {"seconds": 0.01})]
    first, second = asyncio.run(run_calls(calls, tools, 5.0))
    assert (first.text, first.failed) == (told, True)
    assert second.text == "done"


def test_calls_that_are_cancelled_from_outside_are_no_results() -> None:
    async def main() -> None:
        calls = run_calls([Call("wait", {"seconds": 9})], {"wait": tool_of(wait)}, 5.0)
        running = asyncio.ensure_future(calls)
        await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())


def test_a_plain_tool_that_hangs_again_and_again_is_a_fault_of_the_machinery() -> None:
    let_go = threading.Event()

    def hang() -> bool:
        return let_go.wait(30)

    tools = {"hang": tool_of(hang)}
    try:
        results = asyncio.run(run_calls([Call("hang", {})] * MAX_HUNG_THREADS, tools, 0.5))
        assert all("longer than 0.5 s" in each.text for each in results)
        with pytest.raises(HostSpentError, match=r"'hang' cannot run: 32 calls have not"):
            asyncio.run(run_calls([Call("hang", {})], tools, 0.5))
    finally:
        let_go.set()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            [again] = asyncio.run(run_calls([Call("hang", {})], tools, 5.0))
        except EnvironmentFailedError:  # the threads have not all returned yet
            time.sleep(0.01)
        else:
            break
    assert again.text == "true"


def test_arguments_that_are_all_text_get_their_types_from_the_schema() -> None:
    schema = tool_of(weather).parameters
    call = Call("weather", {"city": "5", "days": "[1, 2]", "other": "x"}, typed=False)
    assert typed_arguments(call, schema) == {"city": "5", "days": [1, 2], "other": "x"}


def star(*numbers: int) -> None: ...


def untyped(file: asyncio.Event) -> None: ...


@pytest.mark.parametrize(
    ("function", "why"), [(star, "'numbers' cannot be passed by name"), (untyped, "untyped")]
)
def test_a_function_that_cannot_be_a_tool_is_refused(function: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        tool_of(function)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(1+2)*-3", "-9"),
        ("6/4", "1.5"),
        ("6/3", "2"),
        ("12345678901234567890 * 98765432109876543210", "1219326311370217952237463801111263526900"),
        ("2^10", "1024"),
        ("7 \u00d7 8 \u2212 6 \u00f7 3", "54"),
        ("sqrt(16) + factorial(5)", "124"),
        ("0.1 + 0.2", "0.3"),
        ("round(2.567, 2)", "2.57"),
        ("7 // 2 + 7 % 2", "4"),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("__import__('os').system('id')", "no part of an arithmetic expression"),
        ("(1).__class__", "no part"),
        ("[i for i in range(9)]", "no part"),
        ("9**9**9**9", "too large"),
        ("(-8)**0.5", "no real number"),
        ("1/0", "division by zero"),
        ("10.0**400", "too large"),
        ("factorial(100000)", "from 0 to 400"),
        ("2 +", "is no arithmetic expression"),
        ("", "is no arithmetic expression"),
        ("sqrt(-1)", "math domain|nonnegative"),
        ("1" * 2000, "more than 1000"),
        ("(" * 900, "no arithmetic expression|too large"),
        ("True + 1", "no part"),
        ("'a' * 99", "no part"),
        ("2**-4096000000", "too large"),
    ],
)
def test_the_calculator_refuses_all_else_at_once(expression: str, told: str) -> None:
    with pytest.raises(ToolError, match=told):
        calculator(expression)


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from("+-*/"))
def test_the_calculator_is_right(a: int, b: int, sign: str) -> None:
    if sign == "/" and b == 0:
        return
    right = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else 0}[sign]
    assert math.isclose(float(calculator(f"({a}) {sign} ({b})")), right, rel_tol=1e-11)


class Words:
    """Tokenizer with one token per word."""

    def __call__(self, text: list[str], **_: Any) -> Any:
        return {"input_ids": [each.split() for each in text]}


def test_a_long_result_is_cut_in_its_middle_with_a_note() -> None:
    text = " ".join(f"w{i}" for i in range(1000))
    tokenizer: Any = Words()
    cut = cut_to(text, 40, tokenizer)
    first, note, last = cut.split("\n")
    assert text.startswith(first)
    assert text.endswith(last)
    assert len(first.split()) == 30
    assert len(last.split()) == 10
    assert note == f"[... {len(text) - len(first) - len(last)} characters left out ...]"
    assert cut_to(text, 1000, tokenizer) == text
    assert len(cut_to("x" * 10_000_000, 10, tokenizer)) < 1000
    assert (
        cut_to("x" * 100, 10, None) == "x" * 30 + "\n[... 60 characters left out ...]\n" + "x" * 10
    )
    assert cut_to("x" * 40, 10, None) == "x" * 40


@pytest.mark.parametrize(
    ("entries", "sandbox", "why"),
    [
        (["calculater"], {}, "unknown tool 'calculater'; did you mean 'calculator'"),
        ([{"calculator": {"digits": 3}}], {}, "calculator: .*digits"),
        ([{"search": {"path": "x"}}], {}, "search: .*(corpus|path)"),
        ([{"mcp": {}}], {}, "set either `command`"),
        ([{"mcp": {"command": ["a"], "url": "b"}}], {}, "set either"),
        ([{"mcp": {"command": "python x.py"}}], {}, "must be a list"),
        ([{"mcp": {"cmd": ["a"]}}], {}, "unknown setting 'cmd'"),
        ([{"python": {"level": "none"}}], {}, "set `sandbox` instead"),
        (["calculator"], {"level": "none"}, "none of the tools runs there"),
        (["python"], {"levle": "none"}, "sandbox: .*levle"),
        ([3], {}, "expected a name"),
        (["tests.unit.tools.test_tools:Words"], {}, "expected a function, a Tool, or a class"),
        (["tests.unit.tools.test_tools:nothing"], {}, "has no 'nothing'"),
    ],
)
def test_tools_that_cannot_work_are_refused(entries: Any, sandbox: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_kits(entries, sandbox)


def opened(entries: Any, use: Any, options: Any = None, sandbox: Any = None) -> Any:
    """What `use` returns with the tools of one episode, by name."""

    async def main() -> Any:
        kits = [make() for make in load_kits(entries, sandbox or {})]
        try:
            tools = {t.name: t for kit in kits for t in await kit.open(options or {})}
            return await use(tools)
        finally:
            for kit in kits:
                await kit.close()

    return asyncio.run(main())


def test_search_finds_the_passages_that_fit(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        '{"title": "Ulm", "text": "The minster of Ulm is 161 metres high."}\n'
        '{"title": "Bern", "text": "The bears of Bern live at the river."}\n'
        '{"text": "Cheese is made of milk."}\n'
    )

    async def use(tools: Any) -> Any:
        search = tools["search"].call
        found = await search({"query": "How high is the minster?"})
        with pytest.raises(ToolError, match="no passage has a word"):
            await search({"query": "zebra"})
        return found

    found = opened([{"search": {"corpus": str(corpus), "results": 2}}], use)
    assert found.startswith("[1] Ulm: The minster of Ulm is 161 metres high.")
    assert "Cheese" not in found
    with pytest.raises(ConfigError, match="cannot be read"):
        opened([{"search": {"corpus": str(tmp_path / "none.jsonl")}}], use)
    (tmp_path / "bad.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(ConfigError, match=r"bad.jsonl:1: expected a JSON object with 'text'"):
        opened([{"search": {"corpus": str(tmp_path / "bad.jsonl")}}], use)


def test_python_keeps_its_state_and_shell_and_files_share_it() -> None:
    async def use(tools: Any) -> list[Any]:
        async def say(name: str, **arguments: str) -> str:
            try:
                return str(await tools[name].call(arguments))
            except ToolError as error:
                return f"Error: {error}"

        return [
            await say("python", code="x = 20\nprint('made')"),
            await say("python", code="x + 1"),
            await say("python", code="x +"),
            await say("python", code="1 / 0"),
            await say("write_file", path="a/b.txt", content="it's\n{x}\n"),
            await say("shell", command="cat a/b.txt; exit 3"),
            await say("read_file", path="given.txt"),
            await say("list_files"),
            await say("python", code="import os; os._exit(1)"),
            await say("python", code="x"),
        ]

    said = opened(
        ["python", "shell", "files"],
        use,
        {"files": {"given.txt": "42", "empty.txt": "", "of another row": None}},
        {"level": "none"},
    )
    assert said[0] == "made"
    assert said[1] == "21"
    assert "SyntaxError" in said[2]
    assert "ZeroDivisionError" in said[3]
    assert said[4] == "9 characters written"
    assert said[5] == "it's\n{x}\n[exit code 3]"
    assert said[6] == "42"
    listed = set(said[7].split("\n"))
    assert listed >= {"a/b.txt", "given.txt", "empty.txt"}
    assert "of another row" not in listed
    assert said[8].startswith("Error")
    assert "earlier variables and files are lost" in said[9]
    assert "NameError" in said[9]


def test_the_policy_is_told_that_a_call_at_its_limit_took_the_session_with_it() -> None:
    async def use(tools: Any) -> list[Result]:
        calls = [{"code": "x = 20"}, {"code": "while True: pass"}, {"code": "print(x)"}]
        limits_s = [10.0, 0.5, 10.0]
        return [
            (await run_calls([Call("python", each)], tools, limit_s))[0]
            for each, limit_s in zip(calls, limits_s, strict=True)
        ]

    _, cut, after = opened(["python"], use, sandbox={"level": "none"})
    assert cut.text == "Error: it took longer than 0.5 s"
    assert "earlier variables and files are lost" in after.text
    assert "NameError" in after.text
