"""Makes pairs of instructions and answers for the golden file of IFEval.

Answers are built of pieces as models write them: prose with abbreviations, lists, letters with
placeholders, JSON, poems, other languages. The numbers in the instructions lie near what the answer
has, so that both verdicts occur.
"""

from __future__ import annotations

import random
import re
from typing import Any

PROSE = [
    "Dr. Smith arrived at 5 p.m. and left at once. Nobody knew why! Was it the weather?",
    "The U.S. economy grew by 3.5 percent, e.g. in farming, services, etc. Prices fell.",
    "I think it's a well-known fact: NASA and ESA don't agree. They CANNOT agree, i.e. never.",
    'Wow!!! That is AMAZING... isn\'t it? Yes, it is. "Indeed," he said. (She agreed.)',
    "My answer is yes. However, there may be other views.",
    "First, melt the butter. Second, add 2.5 cups of flour; stir well. Third, bake it for 40 min.",
    "In my opinion cats are better than dogs because cats sleep a lot and dogs bark a lot",
    "The quick brown fox jumps over the lazy dog near the river bank while birds sing loudly.",
    "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer.",
    "We propose a new method. It has three parts. Each part is simple. The code is at www.a.org.",
    "JOHN'S DOG ISN'T HERE. IT'S AT THE VET'S. CALL 555-1234 NOW.",
    "My answer is maybe. It depends on the time, the place and the people.",
    "Mr. J. K. Rowling's agent said no. 7 is a number. Fig. 3 shows the result vs. the baseline.",
]
FOREIGN = [
    "Das ist ein schöner Tag, und wir gehen in den Park. Die Kinder spielen dort gerne.",
    "Il fait beau aujourd'hui et nous allons au marché pour acheter des fruits.",
    "El perro corre por la calle mientras los niños juegan en el parque con una pelota.",
    "Это очень хорошая книга, и я её люблю.",
    "今天天气很好\uff0c我们一起去公园玩。孩子们很高兴。",
    "अपने दोस्त को पत्र लिखिए।",
    "12345 67890 !!!",
]
LISTS = [
    "* one point\n* another point\n* a third, longer point",
    "- milk\n- eggs, brown\n- bread",
    "1. Wake up.\n2. Eat breakfast.\n3. Go to work.",
    "  * nested\n    - deeper\n** bold start** of a line",
    "*\n* after an empty bullet\n-",
    "\t- tab\n\n\n- after blank lines\n--- rule",
]
SHAPES = [
    "<<A Title of Joy>>",
    "<< >>",
    "<<<Odd>>>",
    "Section 1\nSome text.\nSection 2\nMore text.\nSection 3",
    "SECTION 1 begins. SECTION2 ends.",
    "Dear [name],\nyour order [number] will reach [address] on [date].",
    "[]\n[open\nclose] [x]",
    "*highlighted* and **bold words** and *also this*",
    "**a** **b** * not * *\n*",
    '```json\n{"name": "x", "values": [1, 2.5, null]}\n```',
    '{"a": 1, "b": {"c": "d"}}',
    '{"a": 1,}',
    "One answer.\n******\nAnother answer.",
    "Same.\n******\nSame.",
    "******\nFirst\n******\nSecond\n******",
    "Paragraph one.\n***\nParagraph two.\n***\nParagraph three.",
    "***\nOnly one.\n***",
    "P.S. Do not forget the milk.",
    "p. p. s.: one more thing",
    "P.P.S. and again",
    '"All of this is quoted, from begin to end."',
    "Is there anything else I can help with?",
    "Any other questions?",
    "Sure, here is the answer:",
    "I hope this helps!",
]
KEYWORDS = ["dog", "answer", "the", "cat", "x", "is", "point", "U.S.", "milk", "end", "Section"]
END_PHRASES = ["Any other questions?", "Is there anything else I can help with?", "the milk."]
PROMPTS = ["Write about a dog.", "Sure, here is", "Dear [name],", "my answer is yes."]


FITTING = {
    "change_case:english_capital": [text.upper() for text in PROSE],
    "change_case:english_lowercase": [text.lower() for text in PROSE],
    "combination:two_responses": SHAPES[12:15],
    "detectable_content:number_placeholders": SHAPES[5:7],
    "detectable_format:constrained_response": [PROSE[4], PROSE[11]],
    "detectable_format:json_format": SHAPES[9:12],
    "detectable_format:multiple_sections": SHAPES[3:5],
    "detectable_format:number_bullet_lists": LISTS,
    "detectable_format:number_highlighted_sections": SHAPES[7:9],
    "detectable_format:title": SHAPES[:3],
    "startend:quotation": SHAPES[20:21],
}
"""Answers that many instructions need, by the id of the instruction."""


def pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` rows with ids, arguments and an answer."""
    rng = random.Random(seed)
    return [_pair(rng) for _ in range(count)]


def _pair(rng: random.Random) -> dict[str, Any]:
    kinds = rng.sample(sorted(_ARGUMENTS), rng.choice((1, 2, 3, 4)))
    fits = [kind for kind in kinds if kind in FITTING]
    answer = _answer(rng)
    if fits and rng.random() < 0.5:
        fit = rng.choice(FITTING[fits[0]])
        answer = rng.choice((fit, fit, f"{fit}\n{answer}", f"{answer}\n{fit}"))
    return {
        "instruction_id_list": kinds,
        "kwargs": [_ARGUMENTS[kind](rng, answer) for kind in kinds],
        "response": answer,
    }


def _answer(rng: random.Random) -> str:
    pool = rng.choice((PROSE, PROSE + LISTS, PROSE + SHAPES, SHAPES, FOREIGN, PROSE + FOREIGN))
    pieces = [rng.choice(pool) for _ in range(rng.choice((1, 1, 2, 3, 4, 6)))]
    text = rng.choice((" ", "\n", "\n\n", "\n***\n", "\n******\n", "\n\n\n")).join(pieces)
    if rng.random() < 0.3:
        text += "\n" + rng.choice(SHAPES[17:])
    if rng.random() < 0.1:
        text = rng.choice(SHAPES[-2:]) + "\n" + text
    changes = [str.upper, str.lower, lambda t: f'"{t}"', lambda t: f"*{t}*", lambda t: f" {t}\n"]
    if rng.random() < 0.35:
        text = rng.choice(changes)(text)
    return "" if rng.random() < 0.005 else text


def _near(rng: random.Random, number: int) -> int:
    return max(1, number + rng.choice((-1, 0, 0, 1, 2)))


def _relation(rng: random.Random) -> str:
    return rng.choice(("less than", "at least"))


def _count(pattern: str, answer: str) -> int:
    return len(re.findall(pattern, answer))


_ARGUMENTS: dict[str, Any] = {
    "keywords:existence": lambda r, a: {"keywords": r.sample(KEYWORDS, r.choice((1, 2)))},
    "keywords:frequency": lambda r, a: {
        "keyword": (word := r.choice(KEYWORDS)),
        "frequency": _near(r, _count(re.escape(word), a)),
        "relation": _relation(r),
    },
    "keywords:forbidden_words": lambda r, a: {
        "forbidden_words": r.sample(KEYWORDS, r.choice((1, 2)))
    },
    "keywords:letter_frequency": lambda r, a: {
        "letter": (letter := r.choice("abcdeiopqstxyzE")),
        "let_frequency": _near(r, a.lower().count(letter.lower())),
        "let_relation": _relation(r),
    },
    "language:response_language": lambda r, a: {
        "language": r.choice(("en", "de", "fr", "es", "ru", "hi"))
    },
    "length_constraints:number_sentences": lambda r, a: {
        "num_sentences": _near(r, _count(r"[.!?]+", a)),
        "relation": _relation(r),
    },
    "length_constraints:number_paragraphs": lambda r, a: {
        "num_paragraphs": _near(r, a.count("***") + 1)
    },
    "length_constraints:number_words": lambda r, a: {
        "num_words": _near(r, _count(r"\w+", a)),
        "relation": _relation(r),
    },
    "length_constraints:nth_paragraph_first_word": lambda r, a: {
        "num_paragraphs": (many := _near(r, a.count("\n\n") + 1)),
        "nth_paragraph": r.randint(1, many),
        "first_word": r.choice(a.split() or ["x"]).strip(".,!?'\"") or "dr",
    },
    "detectable_content:number_placeholders": lambda r, a: {
        "num_placeholders": _near(r, a.count("["))
    },
    "detectable_content:postscript": lambda r, a: {
        "postscript_marker": r.choice(("P.S.", "P.P.S"))
    },
    "detectable_format:number_bullet_lists": lambda r, a: {
        "num_bullets": _near(r, _count(r"\n\s*[*-]", "\n" + a))
    },
    "detectable_format:constrained_response": lambda r, a: {},
    "detectable_format:number_highlighted_sections": lambda r, a: {
        "num_highlights": _near(r, a.count("*") // 4)
    },
    "detectable_format:multiple_sections": lambda r, a: {
        "section_spliter": (word := r.choice(("Section", "SECTION", "Part"))),
        "num_sections": _near(r, a.count(word)),
    },
    "detectable_format:json_format": lambda r, a: {},
    "detectable_format:title": lambda r, a: {},
    "combination:two_responses": lambda r, a: {},
    "combination:repeat_prompt": lambda r, a: {
        "prompt_to_repeat": r.choice([*PROMPTS, a[:20] or "x"])
    },
    "startend:end_checker": lambda r, a: {"end_phrase": r.choice([*END_PHRASES, a[-12:] or "x"])},
    "change_case:capital_word_frequency": lambda r, a: {
        "capital_frequency": _near(r, sum(word.isupper() for word in a.split())),
        "capital_relation": _relation(r),
    },
    "change_case:english_capital": lambda r, a: {},
    "change_case:english_lowercase": lambda r, a: {},
    "punctuation:no_comma": lambda r, a: {},
    "startend:quotation": lambda r, a: {},
}
"""Functions that draw the arguments of each instruction for an answer."""
