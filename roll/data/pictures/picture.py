"""`Picture`: an encoded picture of a row, whose bytes are on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from roll.core.errors import PictureError
from roll.core.pickling import pickle_by_fields
from roll.core.pictures import Pictures
from roll.core.types import Message
from roll.data.spool import Place


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded picture of a row, as far as the driver knows it. It is small, and its bytes can be
    read in each process of this machine while the one that has made it lives."""

    name: str = field(compare=False)
    """File, row and number of the picture, for messages."""
    source: Place | str = field(compare=False)
    """Where its bytes are: in the spool, or path of its file."""
    identity: str
    """Text that is another for other bytes. Of a file, which is not read for it: path and size."""
    height: int = 0
    width: int = 0
    wrong: str = ""
    """Why it cannot be read; empty for a sound picture."""

    def read(self) -> bytes:
        """Return the encoded picture.

        Raises:
            PictureError: the disk does not give it.
        """
        try:
            return self.source.read() if isinstance(self.source, Place) else self._file()
        except OSError as error:
            raise PictureError(error.strerror or str(error)) from error

    def _file(self) -> bytes:
        assert isinstance(self.source, str)
        return Path(self.source).read_bytes()


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class EncodedPictures:
    """Pictures of a row whose patches are not made yet, in the place of their address."""

    pictures: tuple[Picture, ...]

    def get(self) -> NoReturn:
        """Raise RuntimeError: who makes patches has forgotten this row."""
        raise RuntimeError(f"the patches of {self.pictures[0].name} are not made yet")


def encoded_pictures(pictures: Pictures) -> tuple[Picture, ...]:
    """Return the pictures of a row whose patches are not made yet."""
    assert isinstance(pictures.patches, EncodedPictures)
    return pictures.patches.pictures


def identities(pictures: Pictures) -> list[str]:
    """Return the identity of each picture of a row whose patches are not made yet."""
    return [picture.identity for picture in encoded_pictures(pictures)]


def pictures_in(messages: Sequence[Message]) -> tuple[Picture, ...]:
    """Return the pictures of a conversation, in order."""
    return tuple(
        part for message in messages for part in message.parts if isinstance(part, Picture)
    )
