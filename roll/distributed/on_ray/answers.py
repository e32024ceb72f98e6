"""Results of a call to several Ray actors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray

from roll.core.errors import WaitTimeoutError
from roll.core.types import worker_name
from roll.distributed.cluster import ranks_name
from roll.distributed.on_ray.failures import raise_failure
from roll.distributed.on_ray.members import Member
from roll.distributed.watchdog import POLL_S, Watchdog


class RayAnswers:
    """Implementation of `Answers` for a call to several actors: one Ray reference per actor.

    Waits are cut into short slices, so that the death of one actor is noticed while others work.
    """

    def __init__(
        self, method: str, refs: Sequence[Any], members: Sequence[Member], watchdog: Watchdog
    ) -> None:
        """Keep the references.

        Args:
            refs: reference to the answer of each of `members`, in the same order.
        """
        self._method = method
        self._refs = refs
        self._members = members
        self._watchdog = watchdog
        self._results: dict[int, Any] = {}
        """Index in `refs` -> result, for the results that have been fetched."""

    def done(self) -> bool:
        waiting = [ref for place, ref in enumerate(self._refs) if place not in self._results]
        return not waiting or not ray.wait(waiting, num_returns=len(waiting), timeout=0)[1]

    def settle(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            living = zip(self._refs, self._members, strict=True)
            waiting = [ref for ref, member in living if member.death is None]
            left_s = max(0.0, min(POLL_S, deadline - time.monotonic()))
            if (
                not waiting
                or not ray.wait(
                    waiting, num_returns=len(waiting), timeout=left_s, fetch_local=False
                )[1]
            ):
                return True
            if self._watchdog.ended or time.monotonic() > deadline:
                return False

    def poll(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        places = {ref: i for i, ref in enumerate(self._refs) if i not in self._results}
        while places:
            left_s = deadline - time.monotonic()
            # Wait for all at once: waiting for one at a time would check all of them every time.
            ready, _ = ray.wait(
                list(places), num_returns=len(places), timeout=max(0.0, min(POLL_S, left_s))
            )
            self._fetch([(places.pop(ref), ref) for ref in ready])
            if places:
                self._watchdog.check(self._members)
                if left_s <= 0:
                    return False
        return True

    def collect(self, timeout_s: float) -> list[Any]:
        if not self.poll(timeout_s):
            raise self.overdue(timeout_s)
        return [self._results[place] for place in range(len(self._refs))]

    def overdue(self, timeout_s: float) -> WaitTimeoutError:
        first = self._members[0]
        who = ranks_name(
            worker_name(first.role, first.label),
            list(dict.fromkeys(member.rank for member in self._members)),
        )
        silent_members = (m for i, m in enumerate(self._members) if i not in self._results)
        missing = list(dict.fromkeys(member.rank for member in silent_members))
        silent = ", ".join(str(rank) for rank in missing)
        which = f"rank {silent} has" if len(missing) == 1 else f"ranks {silent} have"
        return WaitTimeoutError(
            f"waited {timeout_s:g} s for {who}.{self._method} ({which} not answered); "
            "cluster.call_timeout_s and cluster.start_timeout_s are the limits"
        )

    def _fetch(self, ready: Sequence[tuple[int, Any]]) -> None:
        """Store the results of (index, reference) pairs; if a rank failed, raise its error."""
        try:
            values = ray.get([ref for _, ref in ready])
        except ray.exceptions.RayError:
            values = [self._fetch_one(place, ref) for place, ref in ready]
        self._results |= zip((place for place, _ in ready), values, strict=True)

    def _fetch_one(self, place: int, ref: Any) -> Any:
        """Return the result of the rank with index `place`, or raise its error by
        `raise_failure`."""
        try:
            return ray.get(ref)
        except ray.exceptions.RayError as error:
            raise_failure(error, self._members[place], self._method, self._watchdog)
