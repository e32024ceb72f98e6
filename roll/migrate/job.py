"""`Job`: one translation, with the file that is read, the file that is made, and what to say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from roll.config.sections.lifecycle import SERVICES
from roll.migrate.devices import as_text
from roll.migrate.draft import Draft, one_line
from roll.migrate.keys import Keys

Kind = Literal["number", "whole", "flag", "text", "texts"]
Change = Callable[[Any], Any]

MEGATRON_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
"""Key of Megatron-Core, as all frameworks have it -> key of `strategy` here."""


class Job:
    """One translation under way."""

    def __init__(self, keys: Keys) -> None:
        """Begin with an empty draft."""
        self.keys = keys
        self.draft = Draft()
        self.todo: list[str] = []
        """What the user must do before the file can run, one line each."""
        self._pools: dict[tuple[int, ...], str] = {}

    def put(self, target: str, value: Any, *keys: str, note: str = "") -> None:
        """Set `target`; the comment names the keys that it was made of, and says `note`. Without
        keys of the file, it is a default of the other framework."""
        readable = [key for key in keys if self.keys.can_use(key)]
        there = [".".join(leaf) for key in readable for leaf in self.keys.at(key)]
        for key in there:
            self.keys.use(key)
        named = ", ".join(there) or "default"
        self.draft.put(target, value, one_line(f"{named}: {note}" if note else named))

    def move(
        self, key: str, target: str, kind: Kind, change: Change | None = None, note: str = ""
    ) -> Any:
        """Translate a key that has one counterpart; return the value that was put, or None.

        Args:
            kind: type in which the key is read.
            change: function of the value; None from it means that the value has no counterpart.
        """
        value = self.read(key, kind)
        if value is None:
            return None
        value = change(value) if change else value
        if value is None:
            self.keys.explain(key, "this value has no counterpart")
            return None
        self.put(target, value, key, note=note)
        return value

    def read(self, key: str, kind: Kind) -> Any:
        """Return the value of a key in this type; None if it is left out, empty, or of another."""
        readers: Mapping[str, Callable[[str], Any]] = {
            "number": self.keys.number,
            "whole": self.keys.whole,
            "flag": self.keys.flag,
            "text": self.keys.text,
            "texts": lambda key: self.keys.texts(key) or None,
        }
        return readers[kind](key)

    def count(self, key: str, target: str, low: int = 1, note: str = "") -> int | None:
        """Translate a whole number of at least `low`; a smaller one is named as without effect."""
        value = self.keys.whole(key)
        if value is None:
            return None
        if value < low:
            self.why(key, f"{value} switches it off, or is out of range")
            return None
        self.put(target, value, key, note=note)
        return value

    def choose(self, key: str, target: str, choices: Mapping[str, Any], what: str = "") -> Any:
        """Translate a key by a table of its values; a value that is not there is named."""
        value = self.keys.text(key)
        if value is None:
            return None
        if value.lower() not in choices:
            self.why(key, what or f"{value} has no counterpart (known: {', '.join(choices)})")
            return None
        self.put(target, choices[value.lower()], key)
        return choices[value.lower()]

    def why(self, key: str, reason: str) -> None:
        """Name a key, and everything below it, that has no counterpart."""
        self.keys.explain(key, reason)

    def why_all(self, reasons: Mapping[str, str], under: str = "") -> None:
        """Name each of these keys that the file has, below the key `under`."""
        for key, reason in reasons.items():
            self.why(f"{under}.{key}" if under else key, reason)

    def ask(self, line: str) -> None:
        """Note something that the user must do or look at before the run."""
        if line not in self.todo:
            self.todo.append(line)

    def pool(self, devices: tuple[int, ...], wish: str) -> str:
        """Return the name of the pool of these devices; a new one is called `wish`."""
        if devices not in self._pools:
            name, number = wish, 2
            while name in self._pools.values():
                name, number = f"{wish}_{number}", number + 1
            self._pools[devices] = name
        return self._pools[devices]

    def put_services(self, names: Iterable[str], project: str, *told_by: str) -> None:
        """Write a tracker of `project` for each of the names that is a service we send metrics
        to."""
        trackers = [{"kind": name, "project": project} for name in SERVICES if name in set(names)]
        if trackers:
            self.put("track.trackers", trackers, *told_by)

    def put_pools(self, devices_per_node: int | None, told_by: Iterable[str]) -> None:
        """Write `pools` and `cluster`, for as many machines as the devices need.

        Args:
            devices_per_node: number of devices of a machine; None if nobody says it.
            told_by: keys that say it.
        """
        largest = max((max(devices) for devices in self._pools), default=0)
        per_node = devices_per_node or min(largest + 1, 8)
        told = ", ".join(told_by) if devices_per_node else "by the devices"
        for key in told_by if devices_per_node else ():
            self.keys.use(key)
        self.draft.put("cluster.devices_per_node", per_node, told)
        nodes = largest // per_node + 1
        if nodes > 1:
            self.draft.put("cluster.nodes", nodes, f"the pools name {largest + 1} devices")
        for devices, name in self._pools.items():
            self.draft.put(f"pools.{name}", as_text(devices))


def packs(job: Job, role: str) -> bool:
    """Return whether the backend of a role in the draft trains, and so packs rows."""
    return job.draft.get(f"{role}.strategy.kind") in ("fsdp2", "deepspeed", "megatron")


def needs_reference(job: Job) -> bool:
    """Return whether the algorithm of the draft compares with a reference."""
    kinds = [term["kind"] for term in job.draft.get("algorithm.loss", [])]
    return "kl" in kinds or job.draft.get("algorithm.kl_in_reward") is not None
