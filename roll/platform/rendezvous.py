"""The TCP stores through which ranks find each other, each listening on one address only.

By default, PyTorch's `TCPStore` listens on all network interfaces and accepts entries from anyone.
Its entries tell the ranks to which addresses to connect. So the store gets a socket that already
listens, at the address that the ranks were told.
"""

from __future__ import annotations

import importlib
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

BACKLOG = 2048
"""Maximum number of connections that wait to be accepted. All ranks of a large job connect at the
same time."""


def open_store(
    host: str, port: int, *, serves: bool, timeout: timedelta, **options: Any
) -> TCPStore:
    """Open the store at `host:port`, as its server or as a client.

    Args:
        serves: True in the process that runs the server; the others connect to it.
        timeout: time limit of connecting, and of each later wait for an entry.
        options: further arguments of `TCPStore`, such as `world_size`.

    Raises:
        RuntimeError: the server cannot listen at the address, or a client gets no answer within
            `timeout`.
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
    listener.detach()  # the store now owns the socket and closes it
    return store


def serve_on_named_address() -> None:
    """Make the stores of `init_process_group(init_method="tcp://...")` listen only at the named
    address. For processes in which a library, such as an engine, makes that call.

    The function replaces an internal function of PyTorch: with `tcp://` PyTorch accepts no
    listening socket, and no second handler can be registered for `tcp://`.
    """

    def create(
        hostname: str,
        port: int,
        rank: int,
        world_size: int,
        timeout: timedelta,
        use_libuv: bool = True,
    ) -> Any:
        """Open a store in place of PyTorch's own function; rank 0 serves it, at `hostname` only."""
        return open_store(
            hostname,
            port,
            serves=rank == 0,
            timeout=timeout,
            world_size=world_size,
            use_libuv=use_libuv,
        )

    # `torch.distributed.rendezvous` is also a function, so the module is imported by its path.
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    module._create_c10d_store = create


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the first address of `host`; RuntimeError if it cannot."""
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
