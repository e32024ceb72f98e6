"""One text in the tokens of two models, against the offsets that the tokenizers themselves tell."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from roll.config.sections.data import TemplateConfig
from roll.core.batches import RetokenizedBatch, TrainBatch
from roll.core.errors import DataError
from roll.data.chat.other_tokens import OtherTokens, beginning, check_same_text
from tests.tiny import char_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer(
    *merges: tuple[str, str], bos: str = "<s>", eos: str = "</s>"
) -> PreTrainedTokenizerFast:
    """Bytes, and pairs of tokens that become one."""
    pieces = [bos, eos, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [first + second for first, second in merges]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, chat_template=TEMPLATE
    )


STUDENT = byte_tokenizer(("a", "b"), ("b", "c"), ("ab", "c"), ("Ġ", "a"))
TEACHER = byte_tokenizer(("b", "c"), ("a", "a"), ("Ã", "©"), bos="<begin>", eos="<end>")


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def batch_of(rows: list[tuple[list[int], list[int]]]) -> TrainBatch:
    """Rows of a prompt and trained tokens."""
    width = max(len(prompt) + len(trained) for prompt, trained in rows)
    tokens, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width)
    for i, (prompt, trained) in enumerate(rows):
        tokens[i, : len(prompt) + len(trained)] = torch.tensor([*prompt, *trained])
        mask[i, len(prompt) : len(prompt) + len(trained)] = 1
    sizes = [len(prompt) + len(trained) for prompt, trained in rows]
    return TrainBatch(tokens=tokens, lengths=torch.tensor(sizes), loss_mask=mask.bool())


def starts(tokenizer: PreTrainedTokenizerFast, text: str) -> dict[int, int]:
    """Character -> place of the token that begins there, by the tokenizer's own offsets."""
    found: dict[int, int] = {}
    end = 0
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    for place, (begin, after) in enumerate(offsets["offset_mapping"]):
        if begin >= end:  # else a byte within a character
            found[begin] = place
        end = max(end, after)
    return found


def pairs_of(made: RetokenizedBatch, row: int) -> list[tuple[int, int]]:
    """Places of the teacher's trained tokens and of those of the student."""
    theirs = made.loss_mask[row].nonzero()[:, 0].tolist()
    return list(zip(theirs, made.student_positions[row].tolist(), strict=True))


@given(st.text("abc é日", min_size=1, max_size=12), st.text("abc é日", min_size=1, max_size=12))
@settings(max_examples=80)
def test_tokens_stand_together_where_both_begin(asked: str, said: str) -> None:
    prompt, answer = ids(STUDENT, asked), ids(STUDENT, said)
    end = STUDENT.eos_token_id
    made = OtherTokens(STUDENT, TEACHER, [TEACHER.bos_token_id]).rows(
        batch_of([([STUDENT.bos_token_id, *prompt], [*answer, end]), ([5], [6])])
    )
    their_prompt, their_answer = ids(TEACHER, asked), ids(TEACHER, said)
    row = [TEACHER.bos_token_id, *their_prompt, *their_answer, TEACHER.eos_token_id]
    assert made.tokens[0, : len(row)].tolist() == row
    assert made.lengths[0] == len(row)
    ours, theirs = starts(STUDENT, said), starts(TEACHER, said)
    before = 1 + len(their_prompt), 1 + len(prompt)
    wanted = [
        (before[0] + theirs[at], before[1] + ours[at]) for at in sorted(ours.keys() & theirs.keys())
    ]
    wanted.append((before[0] + len(their_answer), before[1] + len(answer)))
    assert pairs_of(made, 0) == wanted


def test_the_same_tokens_stand_together_one_by_one() -> None:
    row = [STUDENT.bos_token_id, *ids(STUDENT, "abc bc")], [*ids(STUDENT, "é日ab"), 1]
    made = OtherTokens(STUDENT, STUDENT, [STUDENT.bos_token_id]).rows(batch_of([row]))
    assert made.tokens[0].tolist() == [*row[0], *row[1]]
    # Only parts of a character have no place of their own in the text.
    size = len(row[0])
    assert pairs_of(made, 0) == [(size + at, size + at) for at in (0, 2, 5, 6)]


def test_a_text_that_no_tokenizer_would_write_is_taught_where_it_can_be() -> None:
    """A policy may sample "a", "b" in place of "ab", and bytes that are no character."""
    alone = [ids(STUDENT, each)[0] for each in "ab"]
    broken = ids(STUDENT, "é")[:1]
    made = OtherTokens(STUDENT, TEACHER, []).rows(batch_of([([5], [*alone, *broken, *alone])]))
    paired = [own for _, own in pairs_of(made, 0)]
    assert paired[:2] == [1, 2]
    text = TEACHER.decode(made.tokens[0, 1:].tolist())
    assert text == "ab\ufffdab"


def test_a_teacher_without_a_letter_teaches_the_first_token() -> None:
    """The char tokenizer has no é and writes <pad> for it."""
    made = OtherTokens(STUDENT, char_tokenizer(), []).rows(batch_of([([5], ids(STUDENT, "aéa"))]))
    assert pairs_of(made, 0) == [(1, 1)]


def test_chat_templates_must_render_one_text() -> None:
    data = TemplateConfig(chat_template=True)
    plain = TemplateConfig(chat_template=False)
    check_same_text(STUDENT, TEACHER, data)
    assert beginning(TEACHER, data) == [TEACHER.bos_token_id]
    assert beginning(TEACHER, plain) == []
    with pytest.raises(DataError, match=r"renders '<user>.* where the student's renders '\[user\]"):
        check_same_text(STUDENT, char_tokenizer(), data)
    check_same_text(STUDENT, char_tokenizer(), plain)
    endless = PreTrainedTokenizerFast(tokenizer_object=TEACHER.backend_tokenizer)
    with pytest.raises(DataError, match="no end-of-sequence token"):
        check_same_text(STUDENT, endless, plain)
