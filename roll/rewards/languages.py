"""Detection of the language of a text, with the package langdetect."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from roll.rewards.packages import optional_package

MAX_CHARS = 50_000
"""Number of characters from which the language is detected. langdetect itself uses the first 10,000
after it has removed addresses of pages and mail."""
SEED = 0
"""Seed of langdetect's sampling, so that the same text always has the same language."""


def language_of(text: str) -> str | None:
    """Return the most probable language of a text; None if the text has no letters that tell it.

    The languages are the 55 of langdetect: ISO 639-1 codes such as `en`, but `zh-cn` and `zh-tw`.

    Raises:
        ConfigError: the package langdetect is missing.
    """
    detector = detectors().create()
    detector.append(text[:MAX_CHARS])
    try:
        return str(detector.detect())
    except _undetectable():
        return None


def is_in(text: str, language: str) -> bool:
    """Return whether a text is in a language; False if none can be told.

    Chinese, Japanese and Korean are told by their scripts, because langdetect takes short Chinese
    texts for Korean. `zh` is both `zh-cn` and `zh-tw`.

    Raises:
        ConfigError: the package langdetect is missing.
    """
    letters = [char for char in text[:MAX_CHARS] if char.isalpha()]
    kana = sum("\u3040" <= char <= "\u30ff" for char in letters)
    hangul = sum("\uac00" <= char <= "\ud7af" for char in letters)
    han = sum("\u3400" <= char <= "\u9fff" for char in letters)
    found: str | None
    if hangul * 2 > len(letters):
        found = "ko"
    elif (han + kana) * 2 > len(letters) and "-" not in language:
        found = "ja" if kana * 20 > han else "zh"
    else:
        found = language_of(text)
    return found is not None and language in (found, found.partition("-")[0])


@functools.cache
def detectors() -> Any:
    """Return langdetect's factory of detectors; loads the profiles of all languages at the first
    call (0.5 s).

    Raises:
        ConfigError: the package langdetect is missing.
    """
    factories = optional_package(
        "langdetect.detector_factory", "langdetect", "language is detected"
    )
    factory = factories.DetectorFactory()
    factory.load_profile(str(Path(factories.PROFILES_DIRECTORY)))
    factory.set_seed(SEED)
    return factory


def _undetectable() -> type[Exception]:
    """Return langdetect's error for a text whose language cannot be told."""
    exceptions = optional_package(
        "langdetect.lang_detect_exception", "langdetect", "language is detected"
    )
    error: type[Exception] = exceptions.LangDetectException
    return error
