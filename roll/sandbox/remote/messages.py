"""Jobs and outcomes as JSON, as both ends of `roll sandbox serve` write and read them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from roll.sandbox.outcome import Job, Limits, Outcome, Status

PROTOCOL = 1
"""Number of the form of messages. A host with another one is refused."""
TOKEN_VARIABLE = "ROLL_SANDBOX_TOKEN"
"""Environment variable with the token, at both ends."""

_Kinds = Mapping[str, tuple[type, ...]]
_NUMBER = (int, float)
_LIMITS: _Kinds = {each.name: (int,) if each.type == "int" else _NUMBER for each in fields(Limits)}
_OUTCOME: _Kinds = {
    "exit_code": (int, type(None)),
    "signal": (int, type(None)),
    "stdout": (str,),
    "stderr": (str,),
    "cut": (bool,),
    "cpu_s": _NUMBER,
    "wall_s": _NUMBER,
    "peak_mb": _NUMBER,
    "reason": (str,),
}


def job_message(job: Job, limits: Limits) -> dict[str, Any]:
    """Return a job as a JSON object."""
    return {
        "program": text_message(job.program),
        "stdin": text_message(job.stdin),
        "files": {name: text_message(content) for name, content in job.files.items()},
        "limits": asdict(limits),
    }


def read_job(message: Any) -> tuple[Job, Limits]:
    """Return the job of `job_message`, and its limits; what is left out is as in `Job`.

    Raises:
        ValueError: it is none; the message says why.
    """
    found = _object(message, {"program", "stdin", "files", "limits"})
    if "program" not in found:
        raise ValueError("expected `program`, the text of a program")
    files = found.get("files", {})
    if not isinstance(files, dict):
        raise ValueError(f"files: expected an object, found {type(files).__name__}")
    contents = {name: read_text(content, f"files.{name}") for name, content in files.items()}
    program = read_text(found["program"], "program")
    job = Job(program, read_text(found.get("stdin", ""), "stdin"), contents)
    return job, read_limits(found.get("limits", {}))


def read_limits(message: Any) -> Limits:
    """Return limits; those that are left out have their defaults.

    Raises:
        ValueError: there is no such limit, or it is no number above 0.
    """
    found = _object(message, {*_LIMITS})
    for name, value in found.items():
        may_be_none = name == "addresses_mb" and value is None
        if not may_be_none and (isinstance(value, bool) or not isinstance(value, _LIMITS[name])):
            raise ValueError(f"limits.{name}: expected a number, found {value!r:.60}")
    return Limits(**found)


def outcome_message(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as a JSON object."""
    return asdict(outcome)


def read_outcome(message: Any) -> Outcome:
    """Return the outcome of `outcome_message`.

    Raises:
        ValueError: it is none.
    """
    found = _object(message, {"status", *_OUTCOME})
    for name, kinds in _OUTCOME.items():
        value = found.get(name)
        is_odd = isinstance(value, bool) and bool not in kinds
        if name not in found or is_odd or not isinstance(value, kinds):
            raise ValueError(f"{name}: found {value!r:.60}")
    return Outcome(**{**found, "status": Status(str(found.get("status")))})


def text_message(text: str | bytes) -> str | dict[str, str]:
    """Return text as it is, and bytes that are no UTF-8 in base64."""
    try:
        return text.encode().decode() if isinstance(text, str) else text.decode()
    except UnicodeDecodeError:
        assert isinstance(text, bytes)
        return {"base64": base64.b64encode(text).decode()}
    except UnicodeEncodeError:  # lone surrogates: a question mark, as for workers here
        assert isinstance(text, str)
        return text.encode("utf-8", "replace").decode()


def read_text(message: Any, what: str) -> str | bytes:
    """Return what `text_message` was given.

    Raises:
        ValueError: it is neither text nor base64.
    """
    if isinstance(message, str):
        return message
    if isinstance(message, dict) and [*message] == ["base64"]:
        try:
            return base64.b64decode(message["base64"], validate=True)
        except (binascii.Error, ValueError, TypeError):
            pass
    raise ValueError(f'{what}: expected text, or {{"base64": "..."}}')


def _object(message: Any, keys: set[str]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"expected a JSON object, found {type(message).__name__}")
    odd = sorted(set(message) - keys)
    if odd:
        raise ValueError(f"unknown {', '.join(map(repr, odd))}; known: {', '.join(sorted(keys))}")
    return message
