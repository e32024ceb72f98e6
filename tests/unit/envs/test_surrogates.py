"""Half of a surrogate pair in what an environment says: it has no UTF-8, and so no tokens."""

from __future__ import annotations

from typing import Any

import pytest

from roll.core.types import Message
from roll.envs.api import Hearing, messages_of
from roll.envs.tools.environment import Tools
from tests.tiny import char_tokenizer
from tests.unit.built_in_envs.test_tools_env import called, play
from tests.unit.data.test_chat_templates import byte_tokenizer
from tests.unit.envs.test_env_host import Echo, played, whole

HALF = "a\ud800b"


@pytest.mark.parametrize(
    "observation",
    [
        HALF,
        Message("user", HALF),
        {"role": "tool", "content": HALF, "name": HALF, "tool_call_id": HALF},
        [Message("tool", HALF, name=HALF, call_id=HALF), {"role": "user", "content": HALF}],
        Message("user", HALF, parts=(HALF, 7)),
    ],
)
def test_messages_have_whole_characters_only(observation: Any) -> None:
    for message in messages_of(observation):
        texts = [message.content, *(each for each in message.parts if isinstance(each, str))]
        texts += [message.name, message.call_id]
        assert message.content == "a?b"
        for text in texts:
            assert text.encode().decode() in ("a?b", "")


def test_messages_of_whole_characters_stay_the_same() -> None:
    said = Message("tool", "\U0001f9ee \u00e9", name="x", call_id="1")
    assert messages_of(said) == (said,)


def test_an_episode_goes_on_behind_half_of_a_pair() -> None:
    def step(action: str) -> Any:
        return HALF, 0.5, env.turns == 3, False, {}

    env = Echo(step=step)
    first, *rest = played(whole, env)
    assert len(rest) == 3, "no turn ends the episode as failed"
    assert char_tokenizer().decode(rest[0].tokens) == "<user>a?b<assistant>"
    assert first.tokens


def half() -> str:
    """Says half of a pair, again and again."""
    return HALF * 1000


def test_a_result_of_a_tool_with_half_of_a_pair_is_cut_and_read() -> None:
    env = Tools(["tests.unit.envs.test_surrogates:half"])
    env.listen(Hearing(byte_tokenizer("qwen3"), special_tokens=False))
    _, (said, *_) = play(env, called("half"))
    assert said[0].content.startswith("a?ba?b")
