"""Words as IFEval counts them: runs of letters and digits, and words of the Penn Treebank."""

from __future__ import annotations

import re

import regex

from roll.rewards.instructions.sentences import sentences

_WORD = regex.compile(r"\w+")
"""For `regex` the vowel signs of Hindi are part of words, as in NLTK 3.10; for `re` they are
not."""
_APART = re.compile(
    r"[\u00ab\u00bb\u201c\u201d\u2018\u2019\u201e`\"]|''|[:,](?!\d)|\.{2,}|[;@#$%&?!*()\[\]{}<>\u2012-\u2015]|--"
)
"""Marks that the Treebank's tokenizer separates from the words around them."""
_OPENING = re.compile(r"(?<!\w)'(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)", re.IGNORECASE)
_CLITICS = (
    re.compile(r"(?<=[^' ])(?='[sSmMdD]? )"),
    re.compile(r"(?<=[^' ])(?=(?:'ll|'LL|'re|'RE|'ve|'VE|n't|N'T) )"),
)
_FUSED = re.compile(
    r"\b(?:(can)(not)|(d)('ye)|(gim)(me)|(gon)(na)|(got)(ta)|(lem)(me)|(more)('n)|(wan)(na)(?=\s))\b",
    re.IGNORECASE,
)


def count_words(text: str) -> int:
    """Return the number of runs of letters, digits and underscores."""
    return sum(1 for _ in _WORD.finditer(text))


def count_capital_words(text: str) -> int:
    """Return the number of words without a small letter and with at least one capital.

    Words are those of the Penn Treebank, as NLTK's `word_tokenize` divides them: "IT'S" is two
    words, "CANNOT" too, "WELL-KNOWN" one.

    Source: the tokenizer script of the Penn Treebank, in the version of NLTK 3.10.
    """
    if "'" not in text:
        return sum(word.isupper() for word in _divided(text))
    # A clitic before the last period of a sentence ("SO IT IS'NT.") is divided, elsewhere not.
    return sum(word.isupper() for sentence in sentences(text) for word in _divided(sentence))


def _divided(sentence: str) -> list[str]:
    """Return the words of a sentence; marks that are no words may be missing."""
    text = _APART.sub(" ", _OPENING.sub("' ", sentence)).rstrip()
    if text.endswith("."):
        text = text[:-1] + " ."
    text = " ".join(text.split()) + " "
    for clitic in _CLITICS:
        text = clitic.sub(" ", text)
    return _FUSED.sub(_two_words, text).split()


def _two_words(fused: re.Match[str]) -> str:
    first, second = (part for part in fused.groups() if part)
    return f" {first} {second} "
