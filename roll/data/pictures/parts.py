"""Messages whose content is a list of parts, and marks in texts that stand for pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll.core.errors import RowError
from roll.core.types import Message
from roll.data.pictures.forms import picture_of
from roll.data.pictures.picture import Picture

MARK = "<image>"
"""Text that stands for the next picture of the column of pictures."""
_HERE = object()
"""Part of a message that stands for the next picture of the column of pictures."""


def parts_of(content: Sequence[Any], where: str, folder: Path) -> tuple[Any, ...]:
    """Return the parts of a message as texts, pictures, and marks for pictures of the column.

    A part is a text, or an object with `type` (`text`, `image`, `image_url`) and a key of this
    name. An `image` without a picture of its own stands for the next one of the column.

    Args:
        where: file, row, column and place of the message, for messages.
        folder: folder of the file, to which paths of pictures are relative.

    Raises:
        DataError: a part is of no known form.
    """
    found = []
    for number, part in enumerate(content):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise RowError(f"{where}[{number}] is a {type(part).__name__}; {_FORMS}")
        # Parquet files give every part of a list all keys, null where the part has none.
        given = {key: value for key, value in part.items() if value is not None}
        found.append(_part(given, f"{where}[{number}]", folder))
    return tuple(found)


_FORMS = (
    "a part is a text, {type: text, text}, {type: image, image} or {type: image_url, image_url}"
)


def _part(part: Mapping[str, Any], where: str, folder: Path) -> Any:
    """Return one part of a message; DataError if it is of no known form."""
    match part.get("type"):
        case "text" if isinstance(part.get("text"), str):
            return part["text"]
        case "image":
            value = next((part[key] for key in ("image", "path", "url") if key in part), None)
            return _HERE if value is None else picture_of(value, where, folder)
        case "image_url" if "image_url" in part:
            value = part["image_url"]
            url = value.get("url") if isinstance(value, Mapping) else value
            return picture_of(url, where, folder)
        case "video":
            raise RowError(
                f"{where} is a video, and videos are not read; give its frames, as many as the "
                "model shall see, as parts with the type image"
            )
    shown = ", ".join(sorted(part))
    raise RowError(f"{where} has the type {part.get('type')!r} and the keys {shown}; {_FORMS}")


def text_of_parts(parts: Sequence[Any]) -> str:
    """Return the text of a message, without its pictures."""
    return "".join(part for part in parts if isinstance(part, str))


def with_pictures(
    messages: tuple[Message, ...], pictures: Sequence[Picture] | None, where: str
) -> tuple[Message, ...]:
    """Return the messages with the pictures of the row's column in their places.

    Each mark takes the next picture. Without any mark, all pictures come before the text of the
    first message of the user.

    Args:
        messages: messages of one conversation; those with parts have them from `parts_of`.
        pictures: pictures of the column; None if the source has no such column.
        where: file and row, for the message.

    Raises:
        DataError: there are more or fewer marks than pictures, or no message to put them into.
    """
    if pictures is None:
        if any(part is _HERE for message in messages for part in message.parts):
            raise RowError(
                f"{where}: a part of the type image holds no picture; put it under the key image, "
                "or name the column with the pictures in columns.images"
            )
        return messages
    marks = sum(part is _HERE for message in messages for part in _marked(message))
    if not marks and pictures:
        return _in_front(messages, pictures, where)
    if marks != len(pictures):
        raise RowError(
            f"{where}: {marks} places for pictures ({MARK}, or parts of the type image without a "
            f"picture), but {len(pictures)} pictures in the column"
        )
    left = iter(pictures)
    return tuple(_filled(message, left) for message in messages)


def _marked(message: Message) -> Iterator[Any]:
    """Yield texts, pictures and marks of a message; a `MARK` in a text is a mark, too."""
    for part in message.parts or (message.content,):
        if not isinstance(part, str):
            yield part
            continue
        before, *behind = part.split(MARK)
        yield before
        for text in behind:
            yield _HERE
            yield text


def _filled(message: Message, left: Iterator[Picture]) -> Message:
    """Return the message with the next pictures of `left` in place of its marks."""
    parts = [next(left) if part is _HERE else part for part in _marked(message)]
    if not any(isinstance(part, Picture) for part in parts):
        return message
    told = tuple(part for part in parts if part != "")
    return replace(message, content=text_of_parts(told), parts=told)


def _in_front(
    messages: tuple[Message, ...], pictures: Sequence[Picture], where: str
) -> tuple[Message, ...]:
    """Return the messages with the pictures before the text of the first message of the user;
    DataError if there is none."""
    first = next((i for i, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        raise RowError(f"{where}: no message of the user, which the pictures could be part of")
    asked = messages[first]
    parts = (*pictures, *(asked.parts or (asked.content,)))
    return (*messages[:first], replace(asked, parts=parts), *messages[first + 1 :])
