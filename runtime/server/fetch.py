"""Fetch a reference clip over http(s) without being talked into the private network (SERVING.md 5.1).

Every name is resolved here, every address is checked, and the connection goes to the address that was checked, so a
name that changes its mind between check and connect gains nothing. Redirects are followed by hand, each one checked
like the first URL. The whole fetch has one deadline and one size limit; nothing of the answer is echoed. A
socket's timeout limits one read, and a header may take a thousand, so a timer ends the connection at the deadline.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from runtime.server.errors import ApiError

MAX_REDIRECTS = 3
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_REDIRECTS = (301, 302, 303, 307, 308)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """What one fetch may cost."""

    max_bytes: int
    timeout_seconds: float


def is_public(address: Address) -> bool:
    """Whether an address is out in the internet: not private, loopback, link-local, reserved, or a way to such."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.sixtofour is not None or address.teredo is not None or address in _NAT64:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def fetch(url: str, limits: FetchLimits, allowed: Callable[[Address], bool] = is_public) -> bytes:
    """The body behind `url`; ApiError 400 when it may not or cannot be fetched."""
    deadline = time.monotonic() + limits.timeout_seconds
    for _ in range(1 + MAX_REDIRECTS):
        parts = _checked(url)
        plain = _connect(parts, deadline, allowed)
        connection = http.client.HTTPConnection(str(parts.hostname), _port(parts))
        connection.sock = plain
        try:
            with _ended_at(deadline, plain):
                if parts.scheme == "https":
                    connection.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=parts.hostname)
                target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                connection.request("GET", target, headers={"Accept": "audio/*", "Accept-Encoding": "identity"})
                response = connection.getresponse()
                if response.status in _REDIRECTS:
                    url = urljoin(url, response.getheader("Location") or "")
                    continue
                if response.status != 200:
                    raise _refused(f"the server answered with status {response.status}")
                return _read(connection, response, limits.max_bytes, deadline)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _refused("the connection failed or took too long") from error
        finally:
            connection.close()
    raise _refused(f"more than {MAX_REDIRECTS} redirects")


def _refused(reason: str) -> ApiError:
    return ApiError(400, f"ref_audio could not be fetched: {reason}", "ref_audio")


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _refused("the URL is malformed") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password or port == 0:
        raise _refused("expected http(s)://host/path without a user name")
    if not url.isascii() or any(c <= " " for c in url):
        raise _refused("the URL holds characters that must be escaped")
    return parts


@contextmanager
def _ended_at(deadline: float, connected: socket.socket) -> Iterator[None]:
    """Whatever still reads or writes at the deadline sees the end of the connection."""
    with connected.dup() as guard:  # the same connection, also when TLS has taken the socket over

        def end() -> None:
            with suppress(OSError):  # it ended by itself
                guard.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(max(0.0, deadline - time.monotonic()), end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


def _connect(parts: SplitResult, deadline: float, allowed: Callable[[Address], bool]) -> socket.socket:
    """A connection to an address that was checked."""
    host = str(parts.hostname)
    port = _port(parts)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _refused("the host name cannot be resolved") from error
    addresses = [ipaddress.ip_address(str(entry[4][0]).split("%")[0]) for entry in found]
    if not addresses or not all(allowed(address) for address in addresses):
        raise _refused("the host is not a public address")
    try:
        return socket.create_connection((str(addresses[0]), port), timeout=_left(deadline))
    except OSError as error:
        raise _refused("the connection failed or took too long") from error


def _read(
    connection: http.client.HTTPConnection, response: http.client.HTTPResponse, max_bytes: int, deadline: float
) -> bytes:
    data = bytearray()
    while True:
        if connection.sock is not None:
            connection.sock.settimeout(_left(deadline))
        piece = response.read1(1 << 16)
        _left(deadline)  # before an empty piece is taken for the end: the timer also ends the body
        if not piece:
            return bytes(data)
        data += piece
        if len(data) > max_bytes:
            raise _refused(f"the clip is larger than {max_bytes} bytes")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the fetch took too long")
    return left
