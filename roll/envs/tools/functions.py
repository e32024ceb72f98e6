"""Tools made of Python functions: the schema from the signature, the description from the
docstring."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pydantic import ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from roll.core.errors import ConfigError, HostSpentError
from roll.core.threads.daemon_threads import DaemonThreads, TooManyHungError
from roll.envs.tools.api import Tool, ToolError

_SECTION = re.compile(
    r"^\s*(Args|Arguments|Parameters|Returns|Raises|Example|Examples|Yields):\s*$"
)
_ARGUMENT = re.compile(r"^(\s*)\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
MAX_HUNG_THREADS = 32
"""Number of calls of plain functions that may hang; once this many hang, every call fails."""
_threads = DaemonThreads("tools", max_hung=MAX_HUNG_THREADS)
"""Threads of plain functions; one that hangs does not keep the process alive."""


class _Schema(GenerateJsonSchema):
    """Schemas without titles, which cost tokens and say nothing."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def tool_of(function: Callable[..., Any], *, name: str = "", ends: bool = False) -> Tool:
    """Return the tool that a function is.

    The schema comes from the annotations of its parameters, the descriptions from its docstring
    (with a section `Args:`). Arguments are checked and converted by pydantic before the call. A
    plain function runs in a thread, an `async` one on the event loop.

    Args:
        function: function to call.
        name: name of the tool; by default that of the function.
        ends: whether its result ends the episode as the answer.

    Raises:
        ConfigError: a parameter cannot be passed by name, or its type has no JSON schema.
    """
    called = name or function.__name__
    summary, descriptions = _documented(inspect.getdoc(function) or "")
    model = _model(function, called, descriptions)
    try:
        schema = model.model_json_schema(schema_generator=_Schema)
    except PydanticUserError as error:
        raise ConfigError(f"tool {called!r}: a parameter has no JSON schema: {error}") from None
    for unneeded in ("title", "additionalProperties", "description"):
        schema.pop(unneeded, None)

    async def call(arguments: Mapping[str, Any]) -> Any:
        """Call the function with checked arguments; ToolError if they do not fit its types."""
        try:
            checked = model.model_validate(dict(arguments))
        except ValidationError as error:
            raise ToolError(_told(error)) from None
        values = {key: getattr(checked, key) for key in checked.model_fields_set}
        if inspect.iscoroutinefunction(function):
            return await function(**values)
        try:
            # The caller has the time limit, and cancels; the thread of a call that hangs stays.
            return await _threads.run(partial(function, **values), None, count_cancelled=True)
        except TooManyHungError as error:
            raise HostSpentError(
                f"tool {called!r} cannot run: {error} and hold a thread each, which nothing can "
                "kill; give what they wait for a time limit below `limits.call_s`"
            ) from None

    return Tool(called, summary, schema, call, ends)


def _model(function: Callable[..., Any], name: str, descriptions: Mapping[str, str]) -> Any:
    """Return a pydantic model with a field for each parameter of a function.

    ConfigError if a parameter cannot be passed by name, or its type is unknown.
    """
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(f"tool {name!r}: its annotations name an unknown type: {error}") from None
    fields: dict[str, Any] = {}
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"tool {name!r}: parameter {key!r} cannot be passed by name; give every parameter "
                "a name of its own"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        described = Field(default, description=descriptions.get(key))
        fields[key] = (hints.get(key, str), described)
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except (PydanticUserError, NameError) as error:
        raise ConfigError(f"tool {name!r}: {error}") from None


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """Return the text of a docstring before its first section, and the descriptions of arguments
    in its section `Args:`."""
    before: list[str] = []
    described: dict[str, str] = {}
    section, latest, depth = "", "", None
    for line in text.splitlines():
        begins = _SECTION.match(line)
        if begins is not None:
            section, latest, depth = begins[1], "", None
        elif not section:
            before.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            found = _ARGUMENT.match(line)
            indent = len(line) - len(line.lstrip())
            if found is not None and (depth is None or indent <= depth):
                latest, depth = found[2], indent
                described[latest] = found[3]
            elif latest:
                described[latest] = f"{described[latest]} {line.strip()}".strip()
    return " ".join("\n".join(before).split()), described


def _told(error: ValidationError) -> str:
    """Return what is wrong with arguments, for the policy to read."""
    wrong = []
    for each in error.errors(include_url=False):
        place = ".".join(map(str, each["loc"]))
        wrong.append(f"{place}: {each['msg']}" if place else each["msg"])
    return "wrong arguments: " + "; ".join(wrong)
