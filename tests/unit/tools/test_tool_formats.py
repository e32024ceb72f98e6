"""Formats of calls: every family's own way of writing a call is read, and what is none is said."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.envs.tools.formats.api import Call, Malformed
from roll.envs.tools.formats.loading import FORMATS

ADD = Call("add", {"a": 1, "b": [2, "x"]})
OTHER = Call("look_up", {"query": 'say "hi"\nthere'})
TEXTS = {"a": "1", "b": '[2, "x"]'}
BAR = "\uff5c"


def dumped(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call.name, key: call.arguments})


def deepseek_v3(*calls: Call) -> str:
    inside = "\n".join(
        f"<{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>{call.name}\n"
        f"```json\n{json.dumps(call.arguments)}\n```<{BAR}tool▁call▁end{BAR}>"
        for call in calls
    )
    return f"<{BAR}tool▁calls▁begin{BAR}>{inside}<{BAR}tool▁calls▁end{BAR}>"


def deepseek_v31(*calls: Call) -> str:
    inside = "".join(
        f"<{BAR}tool▁call▁begin{BAR}>{call.name}<{BAR}tool▁sep{BAR}>"
        f"{json.dumps(call.arguments)}<{BAR}tool▁call▁end{BAR}>"
        for call in calls
    )
    return f"<{BAR}tool▁calls▁begin{BAR}>{inside}<{BAR}tool▁calls▁end{BAR}>"


def hermes(*calls: Call) -> str:
    return "\n".join(f"<tool_call>\n{dumped(call)}\n</tool_call>" for call in calls)


def harmony(call: Call) -> str:
    return (
        "<|channel|>analysis<|message|>I need <tool>.<|end|><|start|>assistant<|channel|>commentary"
        f" to=functions.{call.name} <|constrain|>json<|message|>{json.dumps(call.arguments)}"
    )


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", f"I look.\n{hermes(ADD)}", [ADD]),
        ("qwen", hermes(ADD, OTHER), [ADD, OTHER]),
        ("hermes", hermes(ADD).removesuffix("</tool_call>"), [ADD]),
        ("llama3", dumped(ADD, "parameters"), [ADD]),
        ("llama3", f"<|python_tag|>{dumped(ADD, 'parameters')}", [ADD]),
        ("llama3", f"{dumped(ADD, 'parameters')}; {dumped(OTHER, 'parameters')}", [ADD, OTHER]),
        (
            "llama3",
            '<|python_tag|>web.call(query="a b", n=3)',
            [Call("web", {"query": "a b", "n": 3})],
        ),
        ("mistral", f"[TOOL_CALLS][{dumped(ADD)}, {dumped(OTHER)}]", [ADD, OTHER]),
        ("mistral", f"[TOOL_CALLS] [{dumped(ADD)}]</s>", [ADD]),
        (
            "mistral",
            f"[TOOL_CALLS]add[ARGS]{json.dumps(ADD.arguments)}"
            f"[TOOL_CALLS]look_up[CALL_ID]a1b2c3d4e[ARGS]{json.dumps(OTHER.arguments)}",
            [ADD, OTHER],
        ),
        ("mistral", f"[TOOL_CALLS]add{json.dumps(ADD.arguments)}", [ADD]),
        ("harmony", harmony(ADD), [ADD]),
        ("gpt_oss", harmony(ADD) + "<|call|>", [ADD]),
        (
            "harmony",
            f" to=functions.add<|channel|>commentary json<|message|>{json.dumps(ADD.arguments)}",
            [ADD],
        ),
        (
            "harmony",
            "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
            [Call("python", {"code": "print(1)"})],
        ),
        ("deepseek", deepseek_v3(ADD, OTHER), [ADD, OTHER]),
        ("deepseek", f"I look.{deepseek_v31(ADD, OTHER)}", [ADD, OTHER]),
        (
            "deepseek",
            f'<{BAR}DSML{BAR}function_calls>\n<{BAR}DSML{BAR}invoke name="add">\n'
            f'<{BAR}DSML{BAR}parameter name="a" string="false">1</{BAR}DSML{BAR}parameter>\n'
            f'<{BAR}DSML{BAR}parameter name="b" string="true">two</{BAR}DSML{BAR}parameter>\n'
            f"</{BAR}DSML{BAR}invoke>\n</{BAR}DSML{BAR}function_calls>",
            [Call("add", {"a": 1, "b": "two"})],
        ),
        (
            "glm",
            "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
            '<arg_key>b</arg_key>\n<arg_value>[2, "x"]</arg_value>\n</tool_call><|observation|>',
            [Call("add", TEXTS, typed=False)],
        ),
        ("glm", "<tool_call>now\n</tool_call>", [Call("now", {}, typed=False)]),
        (
            "qwen_coder",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n"
            '[2, "x"]\n</parameter>\n</function>\n</tool_call>',
            [Call("add", TEXTS, typed=False)],
        ),
        (
            "fences",
            f"First\n```python\nx = 1\nx\n```\nthen\n```bash\nls\n```\n```tool\n{dumped(ADD)}\n```",
            [Call("python", {"code": "x = 1\nx\n"}), Call("shell", {"command": "ls\n"}), ADD],
        ),
    ],
)
def test_calls_are_read_as_the_family_writes_them(name: str, text: str, calls: list[Call]) -> None:
    parsed = FORMATS[name].parse(text)
    assert list(parsed.calls) == calls
    assert not any(mark in parsed.text for mark in FORMATS[name].marks)


@pytest.mark.parametrize(
    ("name", "text", "reason", "tool"),
    [
        ("hermes", "<tool_call>add 1 2</tool_call>", "not valid JSON", ""),
        ("hermes", "<tool_call>{'name': 'add'}</tool_call>", "not valid JSON", ""),
        ("hermes", "<tool_call>[1]</tool_call>", "must be a JSON object, found a list", ""),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'must have a "name"', ""),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', 'has no "arguments"', "add"),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": 3}</tool_call>',
            "must be an object, found a number",
            "add",
        ),
        ("hermes", '<tool_call>{"name": "add", "argu', "not valid JSON", ""),
        ("llama3", '{"name": "add", "parameters": {', "not valid JSON", ""),
        ("llama3", "<|python_tag|>add(1)", "expected", ""),
        ("mistral", '[TOOL_CALLS][{"name": "add", ', "not valid JSON", ""),
        ("mistral", "[TOOL_CALLS]add(1)", "expected a list of calls", ""),
        ("mistral", "[TOOL_CALLS][]", "empty", ""),
        (
            "harmony",
            "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{a: 1}",
            "arguments of 'add' are not valid JSON",
            "add",
        ),
        ("harmony", "<|channel|>commentary to=functions.add", "a message must have", ""),
        (
            "deepseek",
            f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>add {{}}",
            "expected NAME",
            "",
        ),
        ("deepseek", f"<{BAR}tool▁calls▁begin{BAR}>add", "expected", ""),
        ("glm", "<tool_call>add two numbers</tool_call>", "must begin with the name", ""),
        ("glm", "<tool_call>add<arg_key>a</arg_key>1</tool_call>", "expected only", "add"),
        ("qwen_coder", "<tool_call>add</tool_call>", "expected <function=NAME>", ""),
        ("fences", "```python\nprint(1)", "not closed", ""),
        ("fences", "```tool\nadd\n```", "not valid JSON", ""),
    ],
)
def test_a_malformed_call_says_what_is_wrong(name: str, text: str, reason: str, tool: str) -> None:
    (found,) = FORMATS[name].parse(text).calls
    assert isinstance(found, Malformed)
    assert reason in found.reason
    assert found.name == tool


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("llama3", '{"answer": 3}', '{"answer": 3}'),
        ("llama3", " 42 ", "42"),
        (
            "harmony",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
            "<|message|>42<|return|>",
            "42",
        ),
        ("fences", "```json\n{}\n```", "```json\n{}\n```"),
    ]
    + [(name, "The answer is 42.", "The answer is 42.") for name in FORMATS],
)
def test_a_turn_without_a_call_is_text(name: str, text: str, answer: str) -> None:
    parsed = FORMATS[name].parse(text)
    assert (parsed.text, parsed.calls) == (answer, ())


def test_a_fence_may_be_closed_behind_its_last_line() -> None:
    for text in ("```python\nprint(1)```", "```python\nprint(1)\n```"):
        (found,) = FORMATS["fences"].parse(text).calls
        assert isinstance(found, Call)
        assert found.arguments["code"].strip() == "print(1)"


def test_calls_keep_their_order_around_a_malformed_one() -> None:
    text = f"{hermes(ADD)}<tool_call>oh</tool_call>{hermes(OTHER)}"
    kinds = [type(call) for call in FORMATS["hermes"].parse(text).calls]
    assert kinds == [Call, Malformed, Call]


MARKS = sorted({mark for name in FORMATS for mark in FORMATS[name].marks})
WORDS = ["{", "}", '"name"', ":", '"add"', "[", "]", ",", "\n", "```", "python", "```tool\n", "add"]
WORDS += ['"arguments"', "function", "<function=", ">", "</function>", "to=functions.x", "a" * 40]
PIECES = st.sampled_from([*WORDS, *MARKS])


@given(st.lists(PIECES, max_size=30), st.sampled_from(sorted(FORMATS)))
def test_no_text_breaks_a_parser(pieces: list[str], name: str) -> None:
    parsed = FORMATS[name].parse("".join(pieces))
    for call in parsed.calls:
        assert isinstance(call, Malformed) or (call.name and isinstance(call.arguments, dict))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_deep_and_long_text_is_read_in_a_moment(name: str) -> None:
    FORMATS[name].parse("<tool_call>" + "[" * 100_000)
    FORMATS[name].parse('{"name": ' + "[" * 100_000 + '"parameters"')
    FORMATS[name].parse("[TOOL_CALLS]" + '{"a":' * 100_000)
    FORMATS[name].parse("<|python_tag|>" + "(" * 100_000)
    for mark in FORMATS[name].marks:
        FORMATS[name].parse(mark * 3_000)
