"""Formats of calls by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll.core.errors import ConfigError
from roll.core.registry import Registry
from roll.data.chat.templates import PromptTokenizer
from roll.envs.tools.formats.api import Format
from roll.envs.tools.formats.deepseek import DeepSeek
from roll.envs.tools.formats.fences import Fences
from roll.envs.tools.formats.glm import Glm
from roll.envs.tools.formats.harmony import Harmony
from roll.envs.tools.formats.hermes import Hermes
from roll.envs.tools.formats.llama3 import Llama3
from roll.envs.tools.formats.mistral import Mistral
from roll.envs.tools.formats.qwen_coder import QwenCoder
from roll.envs.tools.formats.vllm_parsers import PREFIX, VllmFormat

FORMATS: Registry[Format] = Registry("format of calls")
"""Formats by the name that `format` of the environment `tools` uses."""
for _names, _format in (
    (("hermes", "qwen"), Hermes()),
    (("qwen_coder",), QwenCoder()),
    (("llama3",), Llama3()),
    (("mistral",), Mistral()),
    (("harmony", "gpt_oss"), Harmony()),
    (("deepseek",), DeepSeek()),
    (("glm",), Glm()),
    (("fences",), Fences()),
):
    for _name in _names:
        FORMATS.register(_name)(_format)


def load_format(name: str) -> Format:
    """Return the format with a name: one of `FORMATS`, or `vllm:NAME`, which vLLM reads.

    Raises:
        ConfigError: there is no such format, or vLLM is not installed.
    """
    if name.startswith(PREFIX):
        return VllmFormat(name.removeprefix(PREFIX))
    return FORMATS[name]


def told_format(
    format: Format, tokenizer: PromptTokenizer, tools: Sequence[Mapping[str, Any]]
) -> Format:
    """Return a format for turns in which the policy may call these tools.

    Args:
        tokenizer: tokenizer of the policy.
        tools: descriptions of the tools, as chat templates take them.
    """
    return format.told(tokenizer, tools) if isinstance(format, VllmFormat) else format


def check_marks(name: str, tokenizer: PromptTokenizer) -> None:
    """Raise ConfigError if a format marks calls by special tokens of a model, which environments
    and agents do not see by default. Parsers of vLLM may do so, too."""
    if name.startswith(PREFIX):
        raise ConfigError(
            f"format {name!r}: parsers of vLLM read special tokens, which environments do not see; "
            "set `special_tokens: show` for this environment"
        )
    hidden = next((mark for mark in FORMATS[name].marks if _hidden(mark, tokenizer)), None)
    if hidden is not None:
        raise ConfigError(
            f"format {name!r} marks calls by {hidden!r}, a special token of this model, which "
            "environments do not see; set `special_tokens: show` for this environment"
        )


def _hidden(mark: str, tokenizer: PromptTokenizer) -> bool:
    """Return True if a mark is a special token, which is left out of actions by default."""
    tokens = tokenizer([mark], add_special_tokens=False)["input_ids"][0]
    whole, seen = (tokenizer.decode(tokens, skip_special_tokens=each) for each in (False, True))
    return mark in whole and mark not in seen
