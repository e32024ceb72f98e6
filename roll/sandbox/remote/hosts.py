"""`Hosts`: which host takes the next program."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

PROTOCOLS = ("roll", "sandbox_fusion", "piston")
_PAUSE_S = 2.0
"""How long a host that was lost gets nothing while others live."""


@dataclass(frozen=True, slots=True)
class Remote:
    """Hosts that run programs, and how they are asked."""

    urls: Sequence[str]
    """Addresses, `http://` or `https://`."""
    protocol: str = "roll"
    """One of `PROTOCOLS`: `roll sandbox serve`, SandboxFusion, or Piston."""
    token: str | None = field(default=None, repr=False)
    """Sent as `Authorization: Bearer <token>`."""
    patience_s: float = 120.0
    """How long a program waits for a host that has room or answers again, before this is an
    error."""

    def __post_init__(self) -> None:
        """Raise ValueError for what is no address, no protocol or no time."""
        if isinstance(self.urls, str) or not self.urls:
            raise ValueError(f"urls: expected a list of addresses, found {self.urls!r}")
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
                raise ValueError(
                    f"urls: expected http://HOST:PORT or https://..., without a user, found {url!r}"
                )
        if self.protocol not in PROTOCOLS:
            known = ", ".join(PROTOCOLS)
            raise ValueError(f"protocol: unknown {self.protocol!r}; expected one of {known}")
        if not self.patience_s > 0:
            raise ValueError(f"patience_s: expected more than 0, got {self.patience_s!r}")


@dataclass(eq=False)
class Host:
    """One of them."""

    url: str
    load: int = 0
    """Programs that it has of this process now."""
    width: int = 1
    """Programs that it runs at the same time."""
    level: str = ""
    """Its level of isolation; empty if it has told none."""
    lost_until: float = 0.0


class Hosts:
    """The hosts of a sandbox. All threads of its workers share them."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Know the addresses; nothing is asked yet."""
        self.all = [Host(url) for url in dict.fromkeys(each.rstrip("/") for each in urls)]
        self._lock = threading.Lock()

    def take(self) -> Host:
        """Return the host with the least to do for its size, and count a program more there.

        One that was lost a moment ago comes last: it may be back when there is no other.
        """
        with self._lock:
            now = time.monotonic()
            host = min(
                self.all, key=lambda each: (max(each.lost_until, now), each.load / each.width)
            )
            host.load += 1
            return host

    def give_back(self, host: Host, *, lost: bool = False) -> None:
        """Count a program less, and note whether the host was lost."""
        with self._lock:
            host.load -= 1
            host.lost_until = time.monotonic() + _PAUSE_S if lost else 0.0
