"""The 25 checks of IFEval, each a function of a text and the arguments of its row.

Every function returns the same as the original (Zhou et al. 2023, arXiv:2311.07911, in the version
of lm-evaluation-harness 0.4.13), but in linear time and without exceptions. Where the original
raises or draws a random number, the docstring says what happens here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

from roll.rewards.instructions.arguments import (
    Parse,
    relation,
    text,
    texts,
    whole_number,
)
from roll.rewards.instructions.sentences import sentences
from roll.rewards.instructions.words import count_capital_words, count_words
from roll.rewards.languages import language_of

CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""Answers between which `detectable_format:constrained_response` lets the model choose."""

_STAR = re.compile(r"^[^\S\n]*\*[^*].*$", re.MULTILINE)
_DASH = re.compile(r"^[^\S\n]*-.*$", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*([^\n*]*)\*")
_DOUBLE_HIGHLIGHT = re.compile(r"\*\*([^\n*]*)\*\*")
_DIVIDER = re.compile(r"\s?\*\*\*\s?")
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}


@dataclass(frozen=True, slots=True)
class Checker:
    """Check of one instruction."""

    follows: Callable[..., bool]
    """Function of the text, and of the arguments as keywords."""
    arguments: Mapping[str, Parse] = field(default_factory=dict)
    """Names of the arguments -> function that reads the value of the row."""


def compare(number: int, wanted: int, how: str) -> bool:
    """Return whether a number is `less than` or `at least` the wanted one."""
    return number < wanted if how == "less than" else number >= wanted


@lru_cache(maxsize=4096)
def pattern_of(keyword: str, flags: int = re.IGNORECASE) -> re.Pattern[str]:
    """Return the pattern of a keyword. The original takes keywords as regular expressions and fails
    on those that are none, such as `c++`; here these are plain text."""
    try:
        return re.compile(keyword, flags)
    except (re.error, OverflowError, RecursionError):
        return re.compile(re.escape(keyword), flags)


def has_keywords(value: str, keywords: Sequence[str]) -> bool:
    """Return whether each keyword occurs, in any case, also inside of words."""
    return all(pattern_of(keyword).search(value) for keyword in keywords)


def keyword_frequency(value: str, keyword: str, frequency: int, relation: str) -> bool:
    """Return whether a keyword occurs less than, or at least, so many times."""
    found = sum(1 for _ in pattern_of(keyword.strip()).finditer(value))
    return compare(found, frequency, relation)


def has_no_forbidden_words(value: str, forbidden_words: Sequence[str]) -> bool:
    """Return whether none of the words occurs as a whole word, in any case."""
    return not any(pattern_of(rf"\b{_valid(word)}\b").search(value) for word in forbidden_words)


def _valid(word: str) -> str:
    """Return a word as a regular expression, escaped if it is none."""
    return pattern_of(word, 0).pattern


def letter_frequency(value: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Return whether a letter occurs less than, or at least, so many times, in any case.

    For any other character than a-z the original draws a random letter; here it is counted itself.
    """
    return compare(value.lower().count(letter.strip().lower()), let_frequency, let_relation)


def is_in_language(value: str, language: str) -> bool:
    """Return whether the text is in the language; True if no language can be told.

    The languages are langdetect's: Chinese is `zh-cn` or `zh-tw`, and no text is in `zh`.
    """
    return language_of(value) in (language, None)


def number_of_sentences(value: str, num_sentences: int, relation: str) -> bool:
    """Return whether the text has less than, or at least, so many sentences."""
    # So many decide, so that the others need not be found.
    found = sum(1 for _ in islice(sentences(value), max(num_sentences, 0)))
    return compare(found, num_sentences, relation)


def number_of_words(value: str, num_words: int, relation: str) -> bool:
    """Return whether the text has less than, or at least, so many words."""
    return compare(count_words(value), num_words, relation)


def number_of_paragraphs(value: str, num_paragraphs: int) -> bool:
    """Return whether `***` divides the text into so many paragraphs. Only the first and the last
    piece may be empty; they do not count then."""
    pieces = [bool(piece.strip()) for piece in _DIVIDER.split(value)]
    return all(pieces[1:-1]) and sum(pieces) == num_paragraphs


def first_word_of_paragraph(
    value: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Return whether blank lines divide the text into so many paragraphs, and the n-th piece begins
    with the word, in any case and without punctuation.

    As in the original, empty pieces do not count as paragraphs, but for the place of the n-th.
    """
    pieces = value.split("\n\n")
    count = sum(bool(piece.strip()) for piece in pieces)
    if count != num_paragraphs or not 1 <= nth_paragraph <= count:
        return False
    words = pieces[nth_paragraph - 1].split(maxsplit=1)
    if not words:
        return False
    word = words[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word, maxsplit=1)[0].lower() == first_word.lower()


def number_of_placeholders(value: str, num_placeholders: int) -> bool:
    """Return whether there are at least so many pairs of square brackets, each on one line."""
    found = 0
    for line in value.split("\n"):
        end = 0
        while (start := line.find("[", end)) >= 0 and (end := line.find("]", start) + 1) > 0:
            found += 1
    return found >= num_placeholders


def has_postscript(value: str, postscript_marker: str) -> bool:
    """Return whether the mark of a postscript occurs, in any case."""
    marker = postscript_marker.strip()
    pattern = _POSTSCRIPTS.get(marker, marker.lower())
    return bool(pattern_of(pattern, 0).search(value.lower()))


def number_of_bullets(value: str, num_bullets: int) -> bool:
    """Return whether exactly so many lines begin with `*` or `-`."""
    found = sum(1 for bullet in (_STAR, _DASH) for _ in bullet.finditer(value))
    return found == num_bullets


def is_constrained(value: str) -> bool:
    """Return whether one of the `CONSTRAINED` answers occurs."""
    return any(option in value for option in CONSTRAINED)


def number_of_highlights(value: str, num_highlights: int) -> bool:
    """Return whether at least so many pieces stand between `*`; between `**`, each counts again."""
    found = sum(bool(piece.strip()) for piece in _HIGHLIGHT.findall(value))
    found += sum(bool(piece.strip()) for piece in _DOUBLE_HIGHLIGHT.findall(value))
    return found >= num_highlights


def number_of_sections(value: str, section_spliter: str, num_sections: int) -> bool:
    """Return whether the mark of a section with a number occurs at least so many times."""
    mark = pattern_of(rf"{_valid(section_spliter.strip())}\s?\d+", 0)
    return sum(1 for _ in mark.finditer(value)) >= num_sections


def is_json(value: str) -> bool:
    """Return whether the whole text is JSON, also in a fenced block.

    On JSON that is nested too deeply to be read, the original raises; here it is none.
    """
    value = value.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        value = value.removeprefix(fence)
    try:
        json.loads(value.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def has_title(value: str) -> bool:
    """Return whether a line has a title in double angular brackets that is not empty."""
    for line in value.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start <= end - 3 and line[start:end].lstrip("<").rstrip(">").strip():
            return True
    return False


def has_two_responses(value: str) -> bool:
    """Return whether `******` divides the text into two different pieces; a further piece may be
    empty at the beginning or the end."""
    pieces = [piece.strip() for piece in value.split("******")]
    full = [piece for piece in pieces if piece]
    return all(pieces[1:-1]) and len(full) == 2 and full[0] != full[1]


def repeats_prompt(value: str, prompt_to_repeat: str) -> bool:
    """Return whether the text begins with the prompt, in any case."""
    return value.strip().lower().startswith(prompt_to_repeat.strip().lower())


def ends_with(value: str, end_phrase: str) -> bool:
    """Return whether the text ends with the phrase, in any case; double quotes may follow."""
    return value.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_frequency(value: str, capital_frequency: int, capital_relation: str) -> bool:
    """Return whether less than, or at least, so many words have capitals only."""
    return compare(count_capital_words(value), capital_frequency, capital_relation)


def is_english_in_capitals(value: str) -> bool:
    """Return whether the text has no small letter and is English or of no language."""
    return value.isupper() and language_of(value) in ("en", None)


def is_english_in_small_letters(value: str) -> bool:
    """Return whether the text has no capital and is English or of no language."""
    return value.islower() and language_of(value) in ("en", None)


def has_no_comma(value: str) -> bool:
    """Return whether the text has no comma."""
    return "," not in value


def is_quoted(value: str) -> bool:
    """Return whether the text begins and ends with a double quote."""
    value = value.strip()
    return len(value) > 1 and value[0] == value[-1] == '"'


CHECKERS: Mapping[str, Checker] = {
    "keywords:existence": Checker(has_keywords, {"keywords": texts}),
    "keywords:frequency": Checker(
        keyword_frequency, {"keyword": text, "frequency": whole_number, "relation": relation}
    ),
    "keywords:forbidden_words": Checker(has_no_forbidden_words, {"forbidden_words": texts}),
    "keywords:letter_frequency": Checker(
        letter_frequency,
        {"letter": text, "let_frequency": whole_number, "let_relation": relation},
    ),
    "language:response_language": Checker(is_in_language, {"language": text}),
    "length_constraints:number_sentences": Checker(
        number_of_sentences, {"num_sentences": whole_number, "relation": relation}
    ),
    "length_constraints:number_paragraphs": Checker(
        number_of_paragraphs, {"num_paragraphs": whole_number}
    ),
    "length_constraints:number_words": Checker(
        number_of_words, {"num_words": whole_number, "relation": relation}
    ),
    "length_constraints:nth_paragraph_first_word": Checker(
        first_word_of_paragraph,
        {"num_paragraphs": whole_number, "nth_paragraph": whole_number, "first_word": text},
    ),
    "detectable_content:number_placeholders": Checker(
        number_of_placeholders, {"num_placeholders": whole_number}
    ),
    "detectable_content:postscript": Checker(has_postscript, {"postscript_marker": text}),
    "detectable_format:number_bullet_lists": Checker(
        number_of_bullets, {"num_bullets": whole_number}
    ),
    "detectable_format:constrained_response": Checker(is_constrained),
    "detectable_format:number_highlighted_sections": Checker(
        number_of_highlights, {"num_highlights": whole_number}
    ),
    "detectable_format:multiple_sections": Checker(
        number_of_sections, {"section_spliter": text, "num_sections": whole_number}
    ),
    "detectable_format:json_format": Checker(is_json),
    "detectable_format:title": Checker(has_title),
    "combination:two_responses": Checker(has_two_responses),
    "combination:repeat_prompt": Checker(repeats_prompt, {"prompt_to_repeat": text}),
    "startend:end_checker": Checker(ends_with, {"end_phrase": text}),
    "change_case:capital_word_frequency": Checker(
        capital_frequency, {"capital_frequency": whole_number, "capital_relation": relation}
    ),
    "change_case:english_capital": Checker(is_english_in_capitals),
    "change_case:english_lowercase": Checker(is_english_in_small_letters),
    "punctuation:no_comma": Checker(has_no_comma),
    "startend:quotation": Checker(is_quoted),
}
"""Checks by the id of the instruction in a data set."""
