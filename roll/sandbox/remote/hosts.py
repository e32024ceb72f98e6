"""`Hosts`: which host takes the next program."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

PROTOCOLS = ("roll", "sandbox_fusion", "piston")
PAUSE_S = 2.0
"""How long a host that was lost, had no room or could not run a program gets nothing while others
do better."""


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
    told: bool = False
    """Whether it has told its width and level; those of other protocols than `roll` never do."""
    paused_until: float = 0.0


class Hosts:
    """The hosts of a sandbox. All threads of its workers share them."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Know the addresses; nothing is asked yet."""
        self.all = [Host(url) for url in dict.fromkeys(each.rstrip("/") for each in urls)]
        self.on_growth: Callable[[], None] = lambda: None
        """Is called when a host has told its width after the start."""
        self._lock = threading.Lock()

    @property
    def width(self) -> int:
        """Programs that all of them run at the same time, as far as is known."""
        return sum(each.width for each in self.all)

    def take(self, but: Collection[Host] = ()) -> Host:
        """Return the host with the least to do for its size, and count a program more there.

        One that has refused or was lost a moment ago comes last, because it is the one with the
        least to do; it may do better when there is no other. Hosts in `but` are left out, unless
        there are no others.
        """
        with self._lock:
            now = time.monotonic()
            host = min(
                [each for each in self.all if each not in but] or self.all,
                key=lambda each: (max(each.paused_until, now), each.load / each.width),
            )
            host.load += 1
            return host

    def give_back(self, host: Host, pause_s: float | None = None) -> None:
        """Count a program less. The host gets no other one for `pause_s` if others do better; None:
        nothing was learnt about it."""
        with self._lock:
            host.load -= 1
            if pause_s is not None:
                host.paused_until = time.monotonic() + pause_s
