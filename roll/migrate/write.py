"""`roll migrate`: writes the run file that stands for one of another framework."""

from __future__ import annotations

from pathlib import Path

from roll.config import load_config
from roll.config.errors import ConfigError, UserError
from roll.migrate.translate import migrate


def write_migrated(
    source: Path, target: Path | None, *, model: str | None, data: str | None
) -> tuple[str, list[str]]:
    """Translate a run file; return the new one, and what to tell the user, one line each.

    Args:
        source: run file of ROLL, verl or NeMo RL.
        target: file to write; None writes and tells nothing.
        model: folder or hub name in place of those of the file.
        data: file or hub name in place of those of the file.

    Raises:
        ConfigError: the source cannot be read or translated.
        UserError: the target exists already, or cannot be written.
    """
    made = migrate(source, model=model, data=data)
    if target is None:
        return made.text, []
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(made.text)
    except FileExistsError:
        raise UserError(f"{target}: exists already; choose another name, or remove it") from None
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error}") from None
    told = [f"before the run: {line}" for line in made.todo]
    try:
        load_config(target)
    except ConfigError as error:
        told += [f"not valid yet: {line}" for line in str(error).splitlines()]
    told.append(
        f"{target}: made from a run file of {made.framework}; {len(made.untranslated)} key(s) "
        f"without a counterpart are named in it. Next: roll check {target}"
    )
    return made.text, told
