"""Names of models on the Hugging Face hub: what is one, what is on this machine of it, and whether
the hub answers."""

from __future__ import annotations

import difflib
import re
import threading
from pathlib import Path

from roll.config.errors import ConfigError, nearest

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


def has_hub_form(name: str) -> bool:
    """Return whether `name` is written as on the hub: `org/name`, or only `name`, such as gpt2."""
    return _HUB_NAME.fullmatch(name) is not None


def may_be_on_hub(name: str) -> bool:
    """Return whether `name` is written as on the hub and is not a path inside an existing folder:
    `outputs/model` is a path if the folder `outputs` exists."""
    inside_a_folder = "/" in name and Path(name).parent.is_dir()
    return has_hub_form(name) and not inside_a_folder


def is_cached(name: str) -> bool:
    """Return whether the tokenizer of a hub model is in the hub cache of this machine."""
    if not has_hub_form(name):
        return False
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "tokenizer_config.json"), str)


def require_hub(name: str, *, url: str | None = None, limit_s: float | None = None) -> None:
    """Check that a model which is no folder can come from somewhere.

    The hub is asked once. Its client would repeat each of its requests for half a minute, which
    helps against a busy hub, but not against a network that is not there.

    Args:
        name: name on the hub.
        url: address of the hub; None: that of the client (`HF_ENDPOINT`).
        limit_s: time in which it must answer, in seconds; None: that of the client
            (`HF_HUB_ETAG_TIMEOUT`).

    Raises:
        ConfigError: nothing of the model is in the hub's cache, and the hub does not answer.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    files = ("config.json", "tokenizer_config.json")
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
        return
    url = url or constants.ENDPOINT
    why = _why_silent(url, float(constants.HF_HUB_ETAG_TIMEOUT) if limit_s is None else limit_s)
    if why is not None:
        raise ConfigError(
            f"model {name!r}: there is no such folder in {Path.cwd()} and no such model in the "
            f"hub's cache, and the hub {url} cannot be reached ({why})"
            f"{nearest(name, models_here())}"
        )


def models_here() -> list[str]:
    """Return the folders in the current one, and in those, that hold a model, and the names of the
    models in the hub's cache."""
    from huggingface_hub import constants

    cached = sorted(path.name for path in Path(constants.HF_HUB_CACHE).glob("models--*"))
    names = [name.removeprefix("models--").replace("--", "/") for name in cached]
    return _folders_here() + names


def similar_folder(name: str) -> str | None:
    """Return the folder with a model, in the current one, whose path is most similar to `name`;
    None if no path is."""
    close = difflib.get_close_matches(name, _folders_here(), n=1)
    return close[0] if close else None


def _folders_here() -> list[str]:
    """Return the folders in the current one, and in those, that hold a model."""
    found = [path for form in ("*", "*/*") for path in Path().glob(f"{form}/config.json")]
    return sorted(str(path.parent) for path in found)


def _why_silent(url: str, limit_s: float) -> str | None:
    """Return why a server does not answer, in a line; None if it does, whatever it says."""
    from huggingface_hub import get_session

    told: list[str | None] = []

    def ask() -> None:
        try:
            get_session().head(url, timeout=limit_s)
            told.append(None)
        except Exception as error:  # noqa: BLE001 - the client's library has errors of its own
            told.append(" ".join(f"{type(error).__name__}: {error}".split()))

    # In a thread: nothing else limits the time in which a name is looked up.
    thread = threading.Thread(target=ask, name="roll-hub", daemon=True)
    thread.start()
    thread.join(limit_s)
    return told[0] if told else f"no answer within {limit_s:g} s"
