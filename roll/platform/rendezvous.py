"""The stores at which ranks meet, bound to the address that the others were told, and to no other.

PyTorch's `TCPStore` listens on all interfaces, takes what anybody sends it, and its notes say to
which addresses the ranks connect. Given a socket that listens already, it uses that one.
"""

from __future__ import annotations

import importlib
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

BACKLOG = 2048
"""Connections that may wait; all ranks of a large job connect at once."""


def open_store(
    host: str, port: int, *, serves: bool, timeout: timedelta, **options: Any
) -> TCPStore:
    """A store at `host:port`.

    Args:
        serves: this process keeps the notes; the others connect to it.
        options: further ones of `TCPStore`, such as `world_size`.

    Raises:
        RuntimeError: the port is taken, or nobody answers there within `timeout`.
    """
    from torch._C._distributed_c10d import TCPStore

    if not serves:
        return TCPStore(host, port, is_master=False, timeout=timeout, **options)
    listener = _listen(host, port)
    store = TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        master_listen_fd=listener.fileno(),
        **options,
    )
    listener.detach()  # the store closes it
    return store


def serve_on_named_address() -> None:
    """Make the stores of `init_process_group(init_method="tcp://...")` listen where the others are
    told to connect, in processes where a library calls it.

    PyTorch takes no listening socket on that way, and offers no second handler for `tcp://`.
    """

    def create(
        hostname: str,
        port: int,
        rank: int,
        world_size: int,
        timeout: timedelta,
        use_libuv: bool = True,
    ) -> Any:
        return open_store(
            hostname,
            port,
            serves=rank == 0,
            timeout=timeout,
            world_size=world_size,
            use_libuv=use_libuv,
        )

    # The package has a function of the module's name.
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    module._create_c10d_store = create


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise RuntimeError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
