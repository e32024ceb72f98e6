"""Parts that users bring: classes, named by import path where a built-in part has its `kind`.

A part of one's own is a config class: its options are its fields, so they are validated like those
of built-in parts. The public bases are in `roll.extend`.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from roll.config.base import Config
from roll.config.errors import ConfigError
from roll.config.user_code.classes import check_class, public_base
from roll.config.user_code.import_path import load_object, searched_first

BUILT_IN, OWN = "<built in>", "<own>"
"""Tags of the two sorts of choices, which appear in the places of validation errors only."""
_reads_code: ContextVar[bool] = ContextVar("_reads_code", default=True)


class OwnPart(Config):
    """Base of all parts that users bring; its fields are the options of the part."""

    sort: ClassVar[str] = "part"
    """Noun for the part in messages."""
    place: ClassVar[str] = ""
    """Key of the run file that takes such a part."""
    kind: str = ""
    """Import path of the class, `my_module:MyClass`. If left out: that of the class itself."""

    @classmethod
    def __pydantic_init_subclass__(cls, **settings: Any) -> None:
        """Let the import path of the class be the default of its `kind`."""
        super().__pydantic_init_subclass__(**settings)
        cls.model_fields["kind"].default = f"{cls.__module__}:{cls.__qualname__}"
        cls.model_rebuild(force=True)


def part_name(kind: str) -> str:
    """Return the name of a part in metrics: its `kind`, of one's own the name of its class."""
    return kind.rpartition(":")[2]


@contextmanager
def importing(folder: Path, *, allowed: bool) -> Iterator[None]:
    """Import the parts that users bring, inside the block.

    Args:
        folder: folder that is searched for their modules first.
        allowed: if False, nothing is imported, and a part is an object with its options alone,
            which are not validated: for run files that are only read, and may be somebody else's.
    """
    token = _reads_code.set(allowed)
    try:
        with searched_first(folder):
            yield
    finally:
        _reads_code.reset(token)


@dataclass(frozen=True)
class OrOwn:
    """Annotation of a union of built-in parts that a class of the user's can stand in for; or of
    `family` alone, if there are no built-in ones."""

    family: type[OwnPart]
    """Base of the classes that are accepted."""
    bases: str
    """Names of the public bases, for messages: `roll.extend.Filter`."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return the schema of the union, and of the user's classes beside it."""
        own = core_schema.no_info_plain_validator_function(self._made)
        if source is self.family:  # there are no built-in parts of this sort
            return own
        return core_schema.tagged_union_schema(
            {BUILT_IN: handler(source), OWN: own},
            discriminator=lambda value: OWN if _names_code(value) else BUILT_IN,
        )

    def find(self, kind: str) -> type[OwnPart]:
        """Import and return the class at an import path.

        Raises:
            ConfigError: there is no such class, its module fails, it is of another sort, or it
                breaks a rule of `check_class`.
        """
        try:
            found = imported(kind)
        except ConfigError as error:
            raise ConfigError(f"kind: {error}") from None
        if not (inspect.isclass(found) and issubclass(found, self.family)):
            raise ConfigError(
                f"kind: {kind} is no class that derives from {self.bases}{_where_instead(found)}"
            )
        try:
            check_class(kind, found)
        except ConfigError as error:
            raise ConfigError(f"kind: {error}") from None
        return found

    def named_by(self, value: Any) -> type[OwnPart] | None:
        """Return the user's class that a mapping names; None if it names none, or none that can be
        used."""
        if not (isinstance(value, dict) and _names_code(value) and _reads_code.get()):
            return None
        try:
            return self.find(value["kind"])
        except ConfigError:
            return None

    def _made(self, value: Any) -> OwnPart:
        """Return the part that a mapping describes; a part itself as it is."""
        if isinstance(value, self.family):
            return value
        if not (isinstance(value, dict) and isinstance(value.get("kind"), str)):
            raise ConfigError(f"kind: {value!r:.60} is of no class that derives from {self.bases}")
        if not _reads_code.get():
            opaque: Any = types.new_class("Unread", (self.family,), {"extra": "allow"})
            return cast(OwnPart, opaque.model_construct(**value))
        # Through JSON, as the rest of a run file: strict mode takes lists for tuples then.
        return self.find(value["kind"]).model_validate_json(json.dumps(value))


def _where_instead(found: Any) -> str:
    """Return which base a part of another sort has, and the key that takes it; an empty text for
    all else."""
    if not (inspect.isclass(found) and issubclass(found, OwnPart) and found.place):
        return ""
    return f"; it is a {public_base(found)}: name it in {found.place}"


def _names_code(value: Any) -> bool:
    """Return whether a choice is one of the user's."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return isinstance(value, OwnPart) or (isinstance(kind, str) and ":" in kind)


def imported(path: str) -> Any:
    """Import and return the object at an import path.

    Raises:
        ConfigError: there is no such object, importing its module fails (the message has the
            user's lines), or nothing is to be imported now.
    """
    if not _reads_code.get():
        raise ConfigError(f"{path} is code, and this command only reads the file")
    try:
        return load_object(path)
    except ConfigError:
        raise
    except Exception as error:
        from roll.config.user_code.import_errors import told_import

        raise ConfigError(
            f"importing {path.partition(':')[0]} failed{told_import(error)}"
        ) from error
