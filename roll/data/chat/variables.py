"""Check of the variables that users set for a chat template: a template ignores unknown ones."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from roll.config.errors import nearest
from roll.core.errors import ConfigError


def check_variables(key: str, variables: Mapping[str, Any], tokenizer: Any) -> None:
    """Check that a tokenizer's chat template mentions all variables that are set for it.

    Looks at the words of the template, not at its syntax: templates have tags that Jinja alone does
    not know, and a tokenizer may have several templates, of which any may use a variable. Without a
    template nothing is checked.

    Args:
        key: key of the variables in the config.

    Raises:
        ConfigError: the template does not mention one of them.
    """
    text = str(tokenizer.chat_template or "")
    words = set(re.findall(r"[^\W\d]\w*", text))
    # Arguments of the method are no variables of the template, such as the name of a template.
    known = words | inspect.signature(tokenizer.apply_chat_template).parameters.keys()
    for name in variables:
        if text and name not in known:
            raise ConfigError(
                f"{key}.{name}: the chat template of the tokenizer does not mention {name!r}, so "
                f"it would have no effect{nearest(name, words)}; drop it, or correct the name"
            )
