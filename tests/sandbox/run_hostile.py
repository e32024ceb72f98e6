"""Runs hostile programs at a level and writes what became of each, a line of JSON for each.

`python -m tests.sandbox.run_hostile LEVEL [ordinary] [container]`, from the repository's root.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from roll.sandbox import Job, Limits, Outcome, Sandbox
from roll.sandbox.worker.usage import descendants
from tests.sandbox import another_user, container_filter
from tests.sandbox.hostile_attacks import (
    HONEST,
    HONEST_INPUT,
    HONEST_OUTPUT,
    PROGRAMS,
    SEARCH,
)

LIMITS = Limits(
    cpu_s=0.2, wall_s=0.4, memory_mb=200, processes=12, output_bytes=2**16, files=64, disk_mb=4
)
PATIENT = Limits(cpu_s=20, wall_s=60)
LATE_S, SOON_S = 1.5, 0.5
MOST_MB = {"memory-mapped_file_over_forks": 400.0}
"""Most memory that a program may have. Its limit is kept by the kernel, with a little for what it
had before; only several processes together are measured, while they go on writing."""
LANES = 3
REPOSITORY = Path(__file__).parents[2]
HELD = os.environ.get("HELD_BY_THE_PARENT", "nothing is held")


class Lane:
    """A sandbox with one worker, and things that a program must not reach."""

    def __init__(self, level: str) -> None:
        self.sandbox = Sandbox(level, workers=1)
        self.folder = Path(tempfile.mkdtemp(prefix="bait_"))
        self.folder.chmod(0o777)
        self.secret, self.name = secrets.token_hex(16), secrets.token_hex(16)
        (self.folder / "secret").write_text(self.secret)
        (self.folder / "secret").chmod(0o666)
        self.listeners = [
            socket.create_server(("127.0.0.1", 0)),
            _bound(socket.SOCK_STREAM, f"\0{self.name}"),
            _bound(socket.SOCK_STREAM, str(self.folder / "socket")),
        ]
        self.port = self.listeners[0].getsockname()[1]
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", self.port))
        self.boxes = [
            udp,
            _bound(socket.SOCK_DGRAM, f"\0{self.name}d"),
            _bound(socket.SOCK_DGRAM, str(self.folder / "datagrams")),
        ]
        for each in (*self.listeners, *self.boxes):
            each.setblocking(False)
        self.victim = subprocess.Popen(["/bin/sleep", "600"])
        self.listed = self._listed()
        self.worker = self._of_this_sandbox()
        self.template = next(pid for pid in descendants([self.worker]) if pid != self.worker)

    def _of_this_sandbox(self) -> int:
        pool = self.sandbox._pool
        return pool.workers[0].pid

    def fill(self, text: str) -> str:
        """Put the things into a program."""
        words = {
            "SECRET": self.folder / "secret",
            "FOLDER": self.folder,
            "PARENT": os.getpid(),
            "WORKER": self.worker,
            "TEMPLATE": self.template,
            "VICTIM": self.victim.pid,
            "PORT": self.port,
            "ABSTRACT": self.name,
            "REPOSITORY": REPOSITORY,
            "WORD": self.name,
            "DROPPED": os.getuid() != 0 or self.sandbox.level != "landlock",
        }
        for word, value in words.items():
            text = text.replace(f"@{word}@", str(value))
        return text

    def try_program(self, name: str) -> dict[str, Any]:
        """Run a program, and again if it took too long or had too much before it was measured: the
        machine may be busy."""
        most_mb = MOST_MB.get(name, LIMITS.memory_mb * 1.25)
        for _ in range(3):
            began = time.monotonic()
            outcome = self.sandbox.run_now(Job(self.fill(PROGRAMS[name]), "1 2\n", limits=LIMITS))
            took = time.monotonic() - began
            if took <= LIMITS.wall_s + LATE_S and outcome.peak_mb <= most_mb:
                break
        leaks = [*self._seen(outcome), *self._strays()]
        if took > LIMITS.wall_s + LATE_S:
            leaks.append(f"took {took:.2f} s")
        if outcome.peak_mb > most_mb:
            leaks.append(f"had {outcome.peak_mb:.0f} MB")
        follower = Job(HONEST, HONEST_INPUT, limits=PATIENT)
        honest = self.sandbox.run_now(follower)
        if honest.stdout != HONEST_OUTPUT or not honest.ok:
            leaks.append(f"the next honest job: {honest}")
        if name == "between-heap":
            search = self.sandbox.run_now(Job(SEARCH, limits=PATIENT))
            if search.stdout != "0\n":
                leaks.append(f"the next job's memory: {search}")
        return {
            "name": name,
            "status": outcome.status,
            "leaks": leaks,
            "took": took,
            "stdout": outcome.stdout[:200],
            "stderr": outcome.stderr[-200:],
            "reason": outcome.reason,
        }

    def _seen(self, outcome: Outcome) -> list[str]:
        """Return what the program has reached, by looking at the things themselves."""
        leaks = []
        written = outcome.stdout + outcome.stderr
        leaks += ["printed the secret"] * (self.secret in written)
        leaks += ["printed the environment"] * (HELD in written)
        said = [line for line in outcome.stdout.splitlines() if line.startswith("LEAK")]
        leaks += [f"said {line}" for line in said[:3]]
        leaks += ["killed a process"] * (self.victim.poll() is not None)
        leaks += ["killed the template"] * (not _runs(self.template))
        leaks += ["killed the worker"] * (not _runs(self.worker))
        leaks += ["changed the folder"] * (self._listed() != self.listed)
        for listener in self.listeners:
            leaks += _reached(listener.accept)
        for box in self.boxes:
            leaks += _reached(lambda box=box: box.recv(16))
        if max(len(outcome.stdout), len(outcome.stderr)) > LIMITS.output_bytes * 4:
            leaks.append("wrote too much")  # 4: a byte that is no UTF-8 is shown as \xff
        return leaks

    def _strays(self) -> list[str]:
        """Return whether processes of a job are left after a moment."""
        deadline = time.monotonic() + SOON_S
        while True:
            # Worker, template and the next job; nursery, and first processes of the next two jobs.
            family = [pid for pid in descendants([self.worker]) if _runs(pid)]
            if len(family) <= (6 if self.sandbox.level == "namespaces" else 3):
                return []
            if time.monotonic() > deadline:
                return [f"left processes: {len(family)}"]
            time.sleep(0.01)

    def _listed(self) -> list[tuple[Any, ...]]:
        return sorted(
            (each.name, (found := each.lstat()).st_mode, found.st_size, found.st_mtime_ns)
            for each in self.folder.iterdir()
        )

    def close(self) -> None:
        """End the sandbox and remove the things."""
        self.sandbox.close()
        self.victim.kill()
        self.victim.wait()
        shutil.rmtree(self.folder)


def _bound(kind: int, place: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, kind)
    made.bind(place)
    if kind == socket.SOCK_STREAM:
        made.listen()
    if not place.startswith("\0"):
        os.chmod(place, 0o777)
    return made


def _reached(call: Any) -> list[str]:
    try:
        call()
    except BlockingIOError:
        return []
    return ["reached a socket"]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main(level: str, *where: str) -> None:
    """Run all programs, in several lanes."""
    if "ordinary" in where:
        another_user.become_ordinary()
    if "container" in where:
        container_filter.install()
    wanted = [name for name in PROGRAMS if not where or name.startswith(where[-1])] or [*PROGRAMS]
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in wanted:
        waiting.put(name)
    lanes = [Lane(level) for _ in range(LANES)]

    def work(lane: Lane) -> None:
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                found = lane.try_program(name)
            except Exception as error:  # noqa: BLE001  # a result like any other
                found = {"name": name, "status": "error", "leaks": [repr(error)]}
            sys.stdout.write(json.dumps(found) + "\n")

    threads = [threading.Thread(target=work, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for lane in lanes:
        lane.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
