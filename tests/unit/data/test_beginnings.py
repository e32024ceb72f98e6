"""Conversations that are tokenized once have the tokens of beginnings that are tokenized alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from roll.config.sections.data import TextDataConfig
from roll.core.errors import DataError
from roll.core.types import Message, ToolCall
from roll.data.chat.conversations import Conversation
from roll.data.chat.inner_tokens import inner_tokens
from roll.data.chat.tokenization import Piece, TokenSequence, pieces, tokenized
from tests.tiny import char_tokenizer
from tests.unit.data.test_chat_templates import PLAIN, sentencepiece_like

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<call>\n{{ call | tojson }}\n</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WHITE = (  # nothing but white space on one side of each border
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|> {% else %}"
    "<|im_start|>\n\n {{ m.content }}\n  \n {% endif %}{% endfor %}"
)
HIDING = (  # inner turns lose what they say beside a mark, so beginnings change
    "{% for m in messages %}<|im_start|>{% if loop.last or m.role == 'user' %}{{ m.content }}"
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
CORPUS = [
    "<|im_start|>user\nWhat's 12 + 345?<|im_end|>\n<|im_start|>assistant\nIt's  357.\n\n\n",
    "don't  do   that \n \n\n café cafe\u0301 \U0001f469\u200d\U0001f4bb \U0001f44d\U0001f3fd",
    '<call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</call> 漢字かな交じり文 ÀÉ \u00a0x',
] * 9
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
MARKS = ["<|im_start|>", "<|im_end|>"]


def wrapped(backend: Tokenizer, trainer: Any, marks: Sequence[str | AddedToken] = MARKS) -> Any:
    """The tokenizer, trained on the corpus, with added tokens."""
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    backend.add_tokens(
        [
            AddedToken(each, special=True, normalized=False) if isinstance(each, str) else each
            for each in marks
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def byte_level(pattern: str | None, normalizer: Any = None, marks: Any = MARKS) -> Any:
    """Byte-level BPE as of GPT-2, or with a pattern of its own as of Qwen and Llama 3."""
    backend = Tokenizer(models.BPE(ignore_merges=pattern == LLAMA3))
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, own])
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    return wrapped(backend, trainer, marks)


def word_piece() -> Any:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()  # lower case, no accents
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]"], show_progress=False
    )
    return wrapped(backend, trainer)


def unigram(scheme: str) -> Any:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    return wrapped(backend, trainer)


def odd_marks() -> Any:
    """Added tokens that take white space, whole words or other forms, or begin each other."""
    odd = [
        AddedToken("<|im_start|>", rstrip=True, normalized=False, special=True),
        AddedToken("<|im_end|>", lstrip=True, rstrip=True, normalized=False, special=True),
        AddedToken("<|im_end|>\n<|im", normalized=False),
        AddedToken("ab", single_word=True, normalized=False),
        AddedToken("É", normalized=True),
        AddedToken("assistant", normalized=True),
    ]
    return byte_level(None, normalizers.NFD(), odd)


def splitting() -> Any:
    """Special tokens are text to it."""
    tokenizer = byte_level(QWEN)
    tokenizer.split_special_tokens = True
    return tokenizer


class Slow:
    """A tokenizer that does not tell where its tokens are."""

    is_fast = False

    def __init__(self) -> None:
        self._fast = byte_level(None)

    def __getattr__(self, name: str) -> Any:
        assert name not in ("added_tokens_decoder", "split_special_tokens"), name
        return getattr(self._fast, name)

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any:
        return {"input_ids": self._fast(text, add_special_tokens=add_special_tokens)["input_ids"]}


TOKENIZERS: dict[str, Any] = {
    "char": char_tokenizer("".join(map(chr, range(32, 127))) + "\n"),
    "gpt2": byte_level(None),
    "qwen": byte_level(QWEN, normalizers.NFC()),
    "llama3": byte_level(LLAMA3),
    "prefix space": byte_level(
        None, normalizers.Sequence([normalizers.Prepend("_"), normalizers.Lowercase()])
    ),
    "word piece": word_piece(),
    "unigram first": unigram("first"),
    "unigram always": unigram("always"),
    "odd marks": odd_marks(),
    "splitting": splitting(),
    "slow": Slow(),
    **{f"llama2 {kind}": sentencepiece_like(kind) for kind in ("normalizer", "first", "always")},
}


def oracle(conversation: Sequence[Piece], tokenizer: Any, eos_token: int) -> TokenSequence:
    """Tokenize every beginning of a conversation for itself, and compare each with the one before:
    what is new of the longer one are the tokens of a piece."""
    tokens: list[int] = []
    before: list[int] = []
    trained, text = [], ""
    for piece in conversation:
        start = len(tokens)
        text += piece.text
        longer = tokenizer([text], add_special_tokens=conversation[0].begins)["input_ids"][0]
        if longer[: len(before)] == before:
            tokens += longer[len(before) :]
        else:
            tokens += inner_tokens(piece.text, tokenizer)
        before = longer
        tokens += [eos_token] if piece.ends else []
        trained += [(start, len(tokens))] if piece.trained else []
    return TokenSequence(tuple(tokens), tuple(trained))


WORDS = [
    *"ab1 \n\t.,'éÉàe\u0301\u0308漢ﬁ\u00a0\u200d\u3000",
    *(
        "  ",
        "\n\n",
        " \n",
        "'s",
        "don't",
        "123",
        "1234567",
        "assistant",
        "user",
        "ab",
        "cafe\u0301",
    ),
    *("\U0001f469\u200d\U0001f4bb", "\U0001f44d\U0001f3fd", "\U0001f1e9\U0001f1ea", "한글", "ﷺ"),
    *("<|im_start|>", "<|im_end|>", "<|im_end|>\n<|im", "<|im", "|>", "<s>", "</s>", "<user>"),
    *("<eos>", "[INST]", "<think>", "</think>\n\n", "<call>"),
]
said = st.lists(st.sampled_from(WORDS), min_size=1, max_size=9).map("".join)
calls = st.builds(ToolCall, st.sampled_from(["add", "find"]), st.dictionaries(said, said))


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """Turns of a user or a tool, and of the assistant, who may call tools."""
    turns: list[Message] = []
    for _ in range(draw(st.integers(1, 4))):
        turns.append(Message(draw(st.sampled_from(["user", "user", "tool"])), draw(said)))
        answer = draw(said.filter(str.strip))
        made = tuple(draw(st.lists(calls, max_size=1)))
        turns.append(Message("assistant", answer, calls=made))
    known = draw(st.integers(0, len(turns) // 2 - 1)) * 2
    return Conversation(tuple(turns[:known]), tuple(turns[known:]))


def configured() -> TextDataConfig:
    told = {"sources": ({"path": "x"},), "rows_per_step": 1}
    return TextDataConfig.model_validate(told, strict=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "template", [CHATML, WHITE, HIDING, PLAIN], ids=["chatml", "white", "hiding", "plain"]
)
@pytest.mark.parametrize("kind", TOKENIZERS)
@given(rows=st.lists(conversations(), min_size=1, max_size=3))
@settings(max_examples=12)
def test_conversations_have_the_tokens_of_their_beginnings(
    kind: str, template: str, rows: list[Conversation]
) -> None:
    tokenizer, found = TOKENIZERS[kind], []
    (tokenizer._fast if kind == "slow" else tokenizer).chat_template = template
    for row in rows:
        try:
            found.append(pieces(row, tokenizer, configured(), system=None, place="here"))
        except DataError:  # such as a template that hides something
            continue
    made = tokenized(found, tokenizer, 7)
    assert made == [oracle(each, tokenizer, 7) for each in found]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(
    texts=st.lists(
        st.lists(st.lists(st.sampled_from(WORDS), max_size=4).map("".join), min_size=1, max_size=8),
        min_size=1,
        max_size=3,
    ),
    begins=st.sampled_from([False, False, True]),
)
@example([["a  ", " b"], ["a \n", "\nb"], ["12", "345"], ["e", "\u0301"]], False)
@example([["<|im_end|> ", " \n", "<|im_start|>", "b"], ["<|im_end|>\n", "<|im_start|>"]], False)
@example([["x<|im_sta", "rt|>y"], ["", "<|im_start|>", ""], ["xab", " ab", "c ab"]], False)
@settings(max_examples=40)
def test_any_text_may_be_divided_anywhere(kind: str, texts: list[list[str]], begins: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    divided = [
        [
            Piece(text, trained=i % 2 == 1, ends=i % 4 == 3, begins=begins)
            for i, text in enumerate(each)
        ]
        for each in texts
    ]
    made = tokenized(divided, tokenizer, 7)
    assert made == [oracle(each, tokenizer, 7) for each in divided]


class Counting:
    """Counts the characters that a tokenizer gets."""

    is_fast = True

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.characters = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: list[str], **kwargs: Any) -> Any:
        self.characters += sum(map(len, text))
        return self._tokenizer(text, **kwargs)


@pytest.mark.parametrize("kind", ["char", "gpt2", "qwen", "llama3"])
def test_a_long_conversation_is_tokenized_once(kind: str) -> None:
    turns = [Message(("user", "assistant")[i % 2], f"word {i} " * 50) for i in range(40)]
    tokenizer = Counting(TOKENIZERS[kind])
    marks = {"<|im_start|>": "<user>", "<|im_end|>": "<eos>"} if kind == "char" else {}
    template = CHATML
    for mark, own in marks.items():
        template = template.replace(mark, own)
    tokenizer._tokenizer.chat_template = template
    found = pieces(Conversation((), tuple(turns)), tokenizer, configured(), system=None, place="h")
    tokenizer.characters = 0
    tokenized([found], tokenizer, 7)
    text = sum(len(piece.text) for piece in found)
    assert text <= tokenizer.characters < 1.02 * text
