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
    exceptions = optional_package(
        "langdetect.lang_detect_exception", "langdetect", "language is detected"
    )
    error: type[Exception] = exceptions.LangDetectException
    return error
