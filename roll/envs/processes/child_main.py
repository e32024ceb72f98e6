"""Main program of the processes of an environment: a template, and a fork of it for each episode.

The template imports the environment once. For each episode it makes a fork, which begins in
milliseconds and shares the memory of what was imported. The parent's side is `template.py`
(template) and `env.py` (episode).

Any interpreter from Python 3.10 on may run this file: it needs the standard library alone, and
nothing of roll is importable there.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import gc
import importlib
import importlib.util
import inspect
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

HEADER = struct.Struct(">Q")
"""Length of the JSON text that follows, in bytes."""
PACKET_BYTES = 2**16
"""Largest packet between the parent and the template."""
SHOWN_CHARS = 4000
"""Longest part of an error that is reported."""
INFO_CHARS = 1000
"""Longest text in `info` that is reported, but for those of the keys `READ`."""
READ = ("rewards", "state", "tools")
"""Keys of `info` that mean something to a run and may be no number."""
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Load the environment, then fork for each episode until the parent hangs up.

    Arguments of the program: descriptor of the socket of packets to the parent; descriptor of a
    file with the spec, see `load`.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent()
    # A policy may write numbers of thousands of digits, which games read with `int`.
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    here = str(Path(__file__).parent)
    sys.path[:] = [path for path in sys.path if path != here]  # modules here are not for import
    try:
        with open(int(sys.argv[2]), "rb") as file:
            spec = json.load(file)
        make = load(spec)
    except BaseException as error:  # noqa: BLE001 - the process boundary: the parent gets it
        traceback.print_exc()
        said = str(error) if type(error).__name__ == "AdapterError" else described(error)
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        send_packet(control, {"refused": said[:SHOWN_CHARS], "missing": missing})
        return
    gc.collect()
    gc.freeze()  # so that collections of the forks do not copy what they share
    send_packet(control, {"ready": [each.name for each in threading.enumerate()][1:]})
    Template(control, make, spec).serve()


def load(spec: Mapping[str, Any]) -> Callable[[], Any]:
    """Return the function that makes the environment of one episode.

    Args:
        spec: `paths`: folders that go first on `sys.path`; `args`, `kwargs` of a function. With
            `package` (a folder) and `module`: its function `prepare`, which returns the function;
            the folder may use relative imports. With `object` (`package.module:Class`): the class.
    """
    sys.path[:0] = [path for path in spec["paths"] if path not in sys.path]
    if "package" in spec:
        module = importlib.import_module(f"{_imported(Path(spec['package']))}.{spec['module']}")
        make: Callable[[], Any] = module.prepare(*spec["args"], **spec["kwargs"])
        return make
    name, _, attribute = spec["object"].partition(":")
    found = importlib.import_module(name)
    for part in attribute.split("."):
        found = getattr(found, part)
    kwargs = spec["kwargs"]
    return lambda: found(**kwargs)  # type: ignore[operator]  # it is the user's class


def _imported(folder: Path) -> str:
    """Import a package by its folder; return the name under which its modules can be imported."""
    name = f"roll_{folder.name}"
    found = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert found is not None, folder
    assert found.loader is not None, folder
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return name


class Template:
    """Process that forks for each episode, and ends what the episodes leave behind."""

    def __init__(
        self, control: socket.socket, make: Callable[[], Any], spec: Mapping[str, Any]
    ) -> None:
        """Take the socket to the parent, the function that makes an environment, and the spec with
        its limits."""
        self._control = control
        self._make = make
        self._spec = spec
        self._selector = selectors.DefaultSelector()
        self._pids: dict[int, int] = {}
        """Processes by the numbers of their episodes."""

    def serve(self) -> None:
        """Obey packets of the parent until it hangs up; then end all episodes."""
        self._selector.register(self._control, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is not self._control:
                        self._bury(key.fd, key.data)
                    elif not self._obey():
                        return
        finally:
            for pid in self._pids.values():
                end_group(pid)

    def _obey(self) -> bool:
        """Do what one packet asks for; return whether the parent still listens."""
        packet, descriptors = receive_packet(self._control)
        if packet is None:
            return False
        if "fork" in packet:
            self._fork(packet["fork"], socket.socket(fileno=descriptors[0]))
        elif packet["kill"] in self._pids:
            end_group(self._pids[packet["kill"]])
        return True

    def _fork(self, number: int, link: socket.socket) -> None:
        """Start the process of an episode, which is served over `link`; report the end of the
        episode if there can be no process."""
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            link.close()
            send_packet(self._control, {"ended": number, "how": f"no process: {error.strerror}"})
            return
        if pid == 0:
            self._play(link, parent)
        link.close()
        self._pids[number] = pid
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, number)

    def _play(self, link: socket.socket, parent: int) -> None:
        """Serve one episode in a fork, and end the process."""
        code = 1
        try:
            os.setsid()  # a group of its own, for the processes that the environment starts
            die_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            self._control.close()
            self._selector.close()
            limit_memory(self._spec["memory_bytes"])
            Episode(link, self._make, self._spec["max_bytes"]).serve()
            code = 0
        except BaseException:  # noqa: BLE001 - nothing may leave a fork but its exit code
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _bury(self, pidfd: int, number: int) -> None:
        """Report the end of an episode's process, after the end of those that it has started."""
        pid = self._pids.pop(number)
        end_group(pid)  # before `waitpid`, which frees the number of the process
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._selector.unregister(pidfd)
        os.close(pidfd)
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        send_packet(self._control, {"ended": number, "how": how})


class Action(str):
    """Text that the policy wrote in one turn, as `roll.envs.api.Action`, which cannot be imported
    here."""

    cut: bool

    def __new__(cls, text: str, cut: bool) -> Action:
        made = super().__new__(cls, text)
        made.cut = cut
        return made


class Episode:
    """Environment of one episode, which answers calls of the parent."""

    def __init__(self, link: socket.socket, make: Callable[[], Any], max_bytes: int) -> None:
        """Take the socket to the parent; an answer of more than `max_bytes` is an error."""
        self._link = link
        self._make = make
        self._max_bytes = max_bytes
        self._env: Any = None
        self._loop = asyncio.new_event_loop()

    def serve(self) -> None:
        """Answer calls until the parent hangs up or closes the environment."""
        while (call := receive(self._link)) is not None:
            try:
                answer = json.dumps({"answer": self._answer(call)}).encode()
                if len(answer) > self._max_bytes:
                    raise ValueError(
                        f"the answer has {len(answer) / 2**20:.1f} MiB; at most "
                        f"{self._max_bytes / 2**20:g} MiB are taken"
                    )
            except BaseException as error:  # noqa: BLE001 - the process boundary
                traceback.print_exc()
                answer = json.dumps({"error": described(error)[:SHOWN_CHARS]}).encode()
            send(self._link, answer)
            if call["do"] == "close":
                return
        if self._env is not None:
            self._done(self._env.close())

    def _answer(self, call: Mapping[str, Any]) -> Any:
        """Do what a call asks for (`reset`, `step` or `close`); return the environment's answer as
        plain JSON values."""
        if call["do"] == "close":
            env, self._env = self._env, None
            return None if env is None else self._done(env.close())
        if call["do"] == "reset":
            self._env = self._make()
            result = self._done(self._env.reset(seed=call["seed"], options=call["options"]))
        else:
            result = self._done(self._env.step(Action(call["action"], call["cut"])))
        if isinstance(result, (tuple, list)) and result and isinstance(result[-1], Mapping):
            *others, info = result
            return [*map(plain, others), plain_info(info)]
        return plain(result)

    def _done(self, result: Any) -> Any:
        """Await what an `async` method returned; all on one loop."""
        if not inspect.isawaitable(result):
            return result

        async def wait() -> Any:
            return await result

        return self._loop.run_until_complete(wait())


def plain(value: Any) -> Any:
    """Return a value as JSON knows it: numbers of other packages as numbers, a message as a dict.

    Keys of mappings become text, at every depth.

    Raises:
        TypeError: JSON has no form for it.
        ValueError, RuntimeError: an array or tensor that has not exactly one element.
    """
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if type(value).__module__.split(".")[0] in ("numpy", "torch") and hasattr(value, "item"):
        return plain(value.item())
    if hasattr(value, "role") and hasattr(value, "content"):
        if getattr(value, "parts", ()):
            raise TypeError("a message with pictures cannot leave the process of an environment")
        named = {"name": getattr(value, "name", ""), "tool_call_id": getattr(value, "call_id", "")}
        texts = {key: text for key, text in named.items() if text}
        return {"role": value.role, "content": value.content, **texts}
    raise TypeError(f"{type(value).__name__} {repr(value)[:60]} is neither text nor a number")


def plain_info(info: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the numbers, bools and short texts of `info`, and all that the keys `READ` hold.

    Raises:
        TypeError, ValueError, RuntimeError: JSON has no form for what one of these holds.
    """
    found = {}
    for key, value in info.items():
        if key in READ:  # of a state, its name
            found[key] = str(value) if key == "state" and value is not None else plain(value)
            continue
        try:
            one = plain(value)
        except (TypeError, ValueError, RuntimeError):  # neither plain, nor a single number
            continue
        if isinstance(one, (bool, int, float)) or (isinstance(one, str) and len(one) < INFO_CHARS):
            found[str(key)] = one
    return found


def described(error: BaseException) -> str:
    """Return type and message of an error, as `TypeError: message`."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def receive(link: socket.socket) -> Any:
    """Return the next message; None at the end."""
    header = _exactly(link, HEADER.size)
    if header is None:
        return None
    body = _exactly(link, HEADER.unpack(header)[0])
    return None if body is None else json.loads(body)


def _exactly(link: socket.socket, size: int) -> bytes | None:
    """Return the next `size` bytes; None if the link ends before."""
    found = bytearray()
    while len(found) < size:
        piece = link.recv(min(size - len(found), 2**20))
        if not piece:
            return None
        found += piece
    return bytes(found)


def send(link: socket.socket, body: bytes) -> None:
    """Send a message, which is JSON text, with its length before it."""
    link.sendall(HEADER.pack(len(body)) + body)


def receive_packet(control: socket.socket) -> tuple[Any, list[int]]:
    """Return a packet and the descriptors that came with it; (None, []) at the end."""
    room = socket.CMSG_LEN(array.array("i", [0]).itemsize)
    data, extra, _, _ = control.recvmsg(PACKET_BYTES, room)
    descriptors = array.array("i")
    for _, _, value in extra:
        descriptors.frombytes(value[: len(value) - len(value) % descriptors.itemsize])
    return (json.loads(data), list(descriptors)) if data else (None, [])


def send_packet(control: socket.socket, packet: Mapping[str, Any]) -> None:
    """Send a packet to the parent; if it has ended, the next `receive_packet` tells."""
    with suppress(ConnectionError):
        control.send(json.dumps(packet).encode())


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def limit_memory(extra_bytes: int | None) -> None:
    """Let this process add so much memory of its own, and no more."""
    if extra_bytes is not None:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        used_kb = next(int(line.split()[1]) for line in status.splitlines() if "VmData" in line)
        limit = 1024 * used_kb + extra_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def end_group(pid: int) -> None:
    """Kill a process and all others of its group."""
    for kill in (os.killpg, os.kill):  # it may not have its own group yet
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
