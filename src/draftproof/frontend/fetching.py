"""Fetches images that messages name by http(s) URLs, from the domains that the user allows, within limits.

Each request resolves its name once, all addresses must be public, and the connection goes to the checked address, so
DNS rebinding cannot reach another one; a redirect is a new request under the same rules. Proxies and credentials in
the environment are not used.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import ipaddress
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from dataclasses import dataclass

from draftproof.schema import shown

ANY = "*"  # allows all domains
MOST_REDIRECTS = 3
MOST_SECONDS = 10.0  # per image, redirects included
PIECE = 1 << 16
PORTS = {"http": 80, "https": 443}
Resolve = Callable[[str, int], list[str]]  # name, port -> addresses
Connect = Callable[[str, int, float], socket.socket]  # address, port, seconds


@dataclass(frozen=True, slots=True)
class Remote:
    """An image that is yet to be fetched. `where`: its name in errors."""

    url: str
    where: str


@dataclass(frozen=True, slots=True)
class _Place:
    """The parts of a URL; `host` is lower case, without a trailing dot."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def name(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


def _resolved(host: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _connected(address: str, port: int, seconds: float) -> socket.socket:
    return socket.create_connection((address, port), timeout=seconds)


class Fetcher:
    """Fetches from the allowed domains only; if `ANY` is among them, from all. Thread-safe."""

    def __init__(
        self,
        domains: Collection[str],
        most_bytes: int,
        *,
        most_seconds: float = MOST_SECONDS,
        resolve: Resolve = _resolved,
        connect: Connect = _connected,
    ) -> None:
        self._domains = frozenset(domain.lower().rstrip(".") for domain in domains)
        self._most_bytes = most_bytes
        self._most_seconds = most_seconds
        self._resolve = resolve
        self._connect = connect

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def check(self, url: str, where: str) -> Remote:
        """The image that a URL names, not fetched yet. ValueError if the URL itself is not allowed."""
        self._place(url, where)
        return Remote(url, where)

    def fetch(self, remote: Remote) -> bytes:
        """The image's bytes. ValueError names what is wrong and who can fix it."""
        deadline = time.monotonic() + self._most_seconds
        url, where = remote.url, remote.where
        place = self._place(url, where)
        try:
            for _ in range(MOST_REDIRECTS + 1):
                found = self._answer(place, where, deadline)
                if isinstance(found, bytes):
                    return found
                url = _led_to(url, found, where)
                scheme, place = place.scheme, self._place(url, where)
                if scheme == "https" != place.scheme:
                    raise ValueError(
                        f"{where}: {shown(url)}: is a redirect from https to http; give its target"
                    )
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() >= deadline:
                raise self._too_slow(where, url) from error
            reason = str(error) or type(error).__name__
            raise ValueError(f"{where}: {shown(url)}: could not be fetched ({reason})") from error
        raise ValueError(
            f"{where}: {shown(url)}: is redirected more than {MOST_REDIRECTS} times; give its target"
        )

    def _place(self, url: str, where: str) -> _Place:
        try:
            parts = urllib.parse.urlsplit(url)
            host = (parts.hostname or "").encode("idna").decode("ascii").lower().rstrip(".")
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{where}: {shown(url)}: is no URL ({error})") from error
        if parts.scheme not in PORTS or not host or parts.username is not None:
            raise ValueError(f"{where}: {shown(url)}: must be http(s)://host/path, without a user's name")
        if ANY not in self._domains and host not in self._domains:
            raise ValueError(
                f"{where}: {shown(url)}: {host!r} is not among allowed_media_domains={sorted(self._domains)}; "
                "give a data URI"
            )
        path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        query = urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
        return _Place(
            parts.scheme,
            host,
            PORTS[parts.scheme] if port is None else port,
            f"{path}?{query}" if query else path,
        )

    def _answer(self, place: _Place, where: str, deadline: float) -> bytes | str:
        """The content (bytes), or the target of a redirect (str)."""
        address = self._address(place, where, deadline)
        connected = self._connect(address, place.port, self._left(deadline))
        if place.scheme == "https":
            connected = self._tls.wrap_socket(
                connected, server_hostname=place.host, do_handshake_on_connect=False
            )
        watch = threading.Timer(self._left(deadline), functools.partial(_shut, connected))
        watch.daemon = True
        watch.start()
        try:
            if isinstance(connected, ssl.SSLSocket):
                connected.do_handshake()
            return self._asked(connected, place, where, deadline)
        finally:
            watch.cancel()
            connected.close()

    def _asked(self, connected: socket.socket, place: _Place, where: str, deadline: float) -> bytes | str:
        connection = http.client.HTTPConnection(place.host, place.port)
        connection.sock = connected
        headers = {"Accept": "image/*", "Accept-Encoding": "identity", "Connection": "close"}
        connection.request("GET", place.path, headers={"Host": place.name, **headers})
        answer = connection.getresponse()
        target = answer.getheader("Location")
        if answer.status in (301, 302, 303, 307, 308) and target:
            return target
        if answer.status != 200:
            raise ValueError(
                f"{where}: {place.name} answered with {answer.status} {answer.reason}; try another URL"
            )
        return self._content(answer, place, where, deadline)

    def _content(self, answer: http.client.HTTPResponse, place: _Place, where: str, deadline: float) -> bytes:
        if (answer.length or 0) > self._most_bytes:
            raise self._too_long(where, place)
        content = bytearray()
        while piece := answer.read1(PIECE):
            content += piece
            if len(content) > self._most_bytes:
                raise self._too_long(where, place)
            self._left(deadline)
        self._left(deadline)
        if answer.length:
            raise http.client.IncompleteRead(bytes(content), answer.length)
        return bytes(content)

    def _address(self, place: _Place, where: str, deadline: float) -> str:
        """The address to connect to. ValueError if any address of the name is not public."""
        found: Future[list[str]] = Future()

        def resolve() -> None:
            try:
                found.set_result(self._resolve(place.host, place.port))
            except Exception as error:
                found.set_exception(error)

        threading.Thread(target=resolve, name="draftproof-resolver", daemon=True).start()
        try:
            addresses = found.result(self._left(deadline))
        except WaitedTooLong as error:
            raise OSError("no answer of the name service") from error
        if not addresses:
            raise OSError(f"{place.host!r} has no address")
        hidden = next((each for each in addresses if not is_public(each)), None)
        if hidden is not None:
            raise ValueError(
                f"{where}: {place.host!r} has the address {hidden}, which is not public; give a data URI"
            )
        return addresses[0]

    def _left(self, deadline: float) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("too slow")
        return left

    def _too_slow(self, where: str, url: str) -> ValueError:
        return ValueError(
            f"{where}: {shown(url)}: took longer than {self._most_seconds:g} seconds; give a data URI"
        )

    def _too_long(self, where: str, place: _Place) -> ValueError:
        return ValueError(
            f"{where}: what {place.name} sent is more than {self._most_bytes} bytes; give a smaller image"
        )


def is_public(address: str) -> bool:
    """Whether an address is globally reachable, and so is any IPv4 address embedded in it."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None or found in _TRANSLATED:  # an embedded IPv4 address
            return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
        wrapped = [found.sixtofour, *(found.teredo or ())]
        if any(each is not None and not is_public(str(each)) for each in wrapped):
            return False
    if any(found in network for network in _INNER):
        return False
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)


_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")  # NAT64: names resolve to these in such networks
# Addresses that some version of Python calls global although they are not: protocol assignments (clouds answer at
# some), Azure's host, documentation, site-local, and local NAT64.
_INNER = tuple(
    map(
        ipaddress.ip_network,
        ("192.0.0.0/24", "168.63.129.16/32", "64:ff9b:1::/48", "3fff::/20", "5f00::/16", "fec0::/10"),
    )
)


def _led_to(url: str, target: str, where: str) -> str:
    """The URL that a redirect leads to. ValueError if it is not a URL."""
    try:
        return urllib.parse.urljoin(url, target)
    except ValueError as error:
        raise ValueError(
            f"{where}: {shown(url)}: is redirected to {shown(target)}, no URL ({error})"
        ) from error


def _shut(connected: socket.socket) -> None:
    """Shut the socket down, which ends any read or write that waits on it."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
