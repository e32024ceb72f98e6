"""Rules between teachers and the rest of a config; see `roll.config.checks.common`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roll.config.errors import nearest
from roll.config.sections.data import SourceConfig, TaughtSource
from roll.config.sections.training import TeacherRole


def teacher_problems(
    teachers: Mapping[str, TeacherRole], sources: Mapping[str, SourceConfig | TaughtSource]
) -> Iterator[str]:
    """Yield tags that several teachers claim, that no source has, or that no teacher has.

    If a source reads tags from a column, its own tags are not checked, and tags of teachers that no
    source has are not reported.

    Args:
        teachers: teacher by name.
        sources: source by its key in the config.
    """
    teacher_of: dict[str, str] = {}
    for name, role in teachers.items():
        for tag in role.tags:
            if tag in teacher_of:
                yield f"teachers.{name}.tags: {tag!r} already belongs to {teacher_of[tag]!r}"
            teacher_of[tag] = name
    if all(source.columns.tag is None for source in sources.values()):
        used = {source.tag for source in sources.values()}
        for tag, name in teacher_of.items():
            if tag not in used:
                yield (
                    f"teachers.{name}.tags: no source has the tag {tag!r}{nearest(tag, used)} "
                    f"(tags of the sources: {', '.join(sorted(used))})"
                )
    for key, source in sources.items():
        if source.columns.tag is None and source.tag not in teacher_of:
            yield (
                f"{key}.tag: no teacher takes the tag {source.tag!r}"
                f"{nearest(source.tag, teacher_of)} (tags with a teacher: "
                f"{', '.join(sorted(teacher_of))})"
            )
