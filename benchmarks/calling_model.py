"""A random model that walks over frozen lakes by calls of a tool, which roll and TRL understand.

A Qwen3 in float32. A few of its weights are set so that it writes the calls of the four moves, in
four tokens with the end token, and nothing else.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from examples.tiny_model import splitter, tokenizer_of
from roll.envs.built_in.boards.directions import MOVES
from roll.envs.built_in.boards.frozen_lake import AGENT, GOAL, HOLE, ICE

HEAD, TAIL = '<tool_call>\n{"name": "move", "arguments": {"direction": "', '"}}\n</tool_call>'
"""Text of a call before and behind its direction."""
SAID, TURN, EOS = "<said>", "<turn>", "<eos>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<turn>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    """<tool_call>\n{"name": "{{ call.function.name }}", """
    """"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<eos>"""
    "{% else %}<said>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<turn>{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": TURN,
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": EOS, "content": "text"},
    },
}
"""Description of a turn, by which transformers reads calls for TRL."""


def make_model(path: Path, layers: int, hidden: int) -> Path:
    """Write a model with random weights, which writes nothing but calls, and its tokenizer; return
    the path.

    Args:
        hidden: width of the hidden states, a multiple of 4.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    call = [HEAD, *MOVES, TAIL]
    tokenizer = tokenizer_of(
        [*call, *(AGENT, ICE, HOLE, GOAL, "\n")],
        splitter([re.escape(piece) for piece in call]),
        roles=[SAID, TURN],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.response_template = RESPONSE_TEMPLATE
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        dtype="float32",
    )
    model: Any = Qwen3ForCausalLM(config)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    # Each dimension says that certain tokens (left) are followed by certain others (right).
    follows = [([TURN], [HEAD]), ([HEAD], [*MOVES]), ([*MOVES], [TAIL]), ([TAIL], [EOS])]
    with torch.no_grad():
        for dimension, (before, after) in enumerate(follows):
            embedding[tokenizer.convert_tokens_to_ids(before), dimension] = 4.0
            head[tokenizer.convert_tokens_to_ids(after), dimension] = 3.0
        # A bit more often towards the goal, so that not all rewards are 0.
        head[tokenizer.convert_tokens_to_ids(["right", "down"]), 1] += 0.06
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
