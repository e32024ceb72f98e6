"""Text of a turn as an environment or an agent hears it."""

from __future__ import annotations

from array import array

from roll.config.sections.environment import EnvironmentConfig
from roll.data.chat.turns import Turns
from roll.rewards.thinking import final_text, without_thoughts


def heard(
    action: str | array[int],
    turns: Turns,
    config: EnvironmentConfig,
    prompt_end: str,
    *,
    final: bool = False,
) -> str:
    """Return the text of a turn; of tokens, with special tokens.

    Args:
        action: text of the turn, which is returned as it is; or its tokens.
        turns: renderer with the tokenizer of the policy.
        config: settings, which say whether thoughts are heard.
        prompt_end: end of the text before the turn, which may open a thought.
        final: whether no call is read from the text. Of the channels of gpt-oss, all but the final
            one are then left out as well.
    """
    if isinstance(action, str):
        return action
    text = turns.said(action)
    if config.thoughts == "show":
        return text
    return (final_text if final else without_thoughts)(text, prompt=prompt_end) or ""
