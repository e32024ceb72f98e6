"""Formats of calls by name."""

from __future__ import annotations

from roll.core.registry import Registry
from roll.envs.tools.formats.api import Format
from roll.envs.tools.formats.deepseek import DeepSeek
from roll.envs.tools.formats.fences import Fences
from roll.envs.tools.formats.glm import Glm
from roll.envs.tools.formats.harmony import Harmony
from roll.envs.tools.formats.hermes import Hermes
from roll.envs.tools.formats.llama3 import Llama3
from roll.envs.tools.formats.mistral import Mistral
from roll.envs.tools.formats.qwen_coder import QwenCoder

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
