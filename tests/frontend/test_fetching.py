"""Images at URLs: allowed hosts, and limits of size and time; a local server stands for the internet."""

from __future__ import annotations

import asyncio
import http.server
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftproof import LLM, SamplingParams
from draftproof.config import EngineConfig
from draftproof.frontend.async_llm import AsyncLLM
from draftproof.frontend.fetching import Fetcher, is_public
from tests.frontend.images.cases import A, image_url, message
from tests.made import vision
from tests.made.pictures import encoded
from tests.made.vision import IMAGE

PUBLIC = "93.184.215.14"  # stands for the server of these tests
GREEDY = SamplingParams(temperature=0, max_tokens=4)


class World:
    """A server with its own name resolution. `asked`: (host, path) of its requests; `gone_to`: addresses that were
    connected to; `names`: name -> successive answers of the resolver, of which the last is repeated."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.gone_to: list[tuple[str, int]] = []
        self.names: dict[str, list[list[str]]] = {"pictures.example": [[PUBLIC]]}
        self.pages: dict[str, Callable[[http.server.BaseHTTPRequestHandler], None]] = {}
        self.stop = threading.Event()
        world = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                world.asked.append((self.headers["Host"], self.path))
                world.pages[self.path](self)

            def log_message(self, *given: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def resolve(self, host: str, port: int) -> list[str]:
        answers = self.names[host]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def connect(self, address: str, port: int, seconds: float) -> socket.socket:
        self.gone_to.append((address, port))
        assert address == PUBLIC, "nobody may go elsewhere"
        return socket.create_connection(self.server.server_address[:2], timeout=seconds)

    def fetcher(self, *domains: str, most_bytes: int = 1 << 20, most_seconds: float = 10.0) -> Fetcher:
        return Fetcher(
            domains or ("*",),
            most_bytes,
            most_seconds=most_seconds,
            resolve=self.resolve,
            connect=self.connect,
        )

    def fetch(self, url: str, *domains: str, **limits: Any) -> bytes:
        fetcher = self.fetcher(*domains, **limits)
        return fetcher.fetch(fetcher.check(url, "image 0"))

    def send(self, path: str, body: bytes, status: int = 200, **headers: str) -> None:
        def act(handler: http.server.BaseHTTPRequestHandler) -> None:
            handler.send_response(status)
            for name, value in {"Content_Length": str(len(body)), **headers}.items():
                handler.send_header(name.replace("_", "-"), value)
            handler.end_headers()
            handler.wfile.write(body)

        self.pages[path] = act


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.stop.set()
    made.server.shutdown()
    made.server.server_close()


def test_what_is_there_comes_from_the_address_that_was_looked_at(world: World) -> None:
    world.send("/a%20b.png?x=1", b"content")
    assert world.fetch("http://Pictures.Example./a b.png?x=1", "pictures.example") == b"content"
    assert world.asked == [("pictures.example", "/a%20b.png?x=1")] and world.gone_to == [(PUBLIC, 80)]
    world.send("/", b"at a port")
    assert world.fetch("http://pictures.example:8080") == b"at a port"
    assert world.asked[-1] == ("pictures.example:8080", "/") and world.gone_to[-1] == (PUBLIC, 8080)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://other.example/a", "not among allowed_media_domains"),
        ("http://pictures.example.evil.example/a", "not among allowed_media_domains"),
        ("http://user:word@pictures.example/a", "without a user's name"),
        ("http:///a", "must be http"),
        ("http://pictures.example:99999/", "is no URL"),
        ("ftp://pictures.example/a", "must be http"),
    ],
)
def test_an_url_tells_whether_it_may_be_fetched(world: World, url: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"image 0: .*{words}"):
        world.fetcher("pictures.example").check(url, "image 0")


OWN = [
    *("127.0.0.1", "10.0.0.7", "169.254.169.254", "192.168.1.1", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
    *("192.0.0.192", "168.63.129.16", "::1", "fe80::1%eth0", "fd00::1", "fec0::2", "3fff::1", "::127.0.0.1"),
    *("::ffff:127.0.0.1", "::ffff:168.63.129.16", "64:ff9b::7f00:1", "64:ff9b:1::5db8:d80e", "2002:7f00:1::"),
]
EVERYBODYS = [PUBLIC, "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"]


def test_addresses_of_ones_own_network_are_not_asked(world: World) -> None:
    assert all(map(is_public, EVERYBODYS))
    for address in OWN:
        assert not is_public(address), address
        world.names["pictures.example"] = [[PUBLIC, address]]
        with pytest.raises(ValueError, match=r"has the address .*, which is not public"):
            world.fetch("http://pictures.example/a")
    assert not world.gone_to


@pytest.mark.parametrize("host", ["127.1", "0x7f.1", "2130706433", "[::1]", "[::ffff:127.0.0.1]", "0"])
def test_addresses_in_other_words_are_looked_at_too(host: str) -> None:
    """The system's resolver is used, which sends no query for numeric addresses."""
    fetcher = Fetcher(["*"], 10, connect=lambda *given: pytest.fail("somebody connected"))
    with pytest.raises(ValueError, match="which is not public"):
        fetcher.fetch(fetcher.check(f"http://{host}/a", "image 0"))


def test_a_name_that_changes_its_mind_reaches_nothing_else(world: World) -> None:
    world.send("/a", b"content")
    world.names["pictures.example"] = [[PUBLIC], ["127.0.0.1"]]
    assert world.fetch("http://pictures.example/a") == b"content"
    with pytest.raises(ValueError, match=r"127.0.0.1, which is not public"):
        world.fetch("http://pictures.example/a")
    assert world.gone_to == [(PUBLIC, 80)]


def test_redirects_are_requests_like_others(world: World) -> None:
    world.send("/a", b"", 302, Location="/b")
    world.send("/b", b"", 307, Location="http://other.example/c")
    world.send("/c", b"content")
    world.names["other.example"] = [[PUBLIC]]
    assert world.fetch("http://pictures.example/a") == b"content"
    assert [path for _, path in world.asked] == ["/a", "/b", "/c"]
    with pytest.raises(ValueError, match=r"'other.example' is not among"):
        world.fetch("http://pictures.example/a", "pictures.example")
    world.names["other.example"] = [["192.168.0.1"]]
    with pytest.raises(ValueError, match=r"192.168.0.1, which is not public"):
        world.fetch("http://pictures.example/a")
    world.send("/file", b"", 302, Location="file:///etc/passwd")
    with pytest.raises(ValueError, match="must be http"):
        world.fetch("http://pictures.example/file")
    world.send("/odd", b"", 302, Location="http://[")
    with pytest.raises(ValueError, match=r"image 0: .* is redirected to 'http://\[', no URL"):
        world.fetch("http://pictures.example/odd")
    world.send("/loop", b"", 301, Location="/loop")
    with pytest.raises(ValueError, match="redirected more than 3 times"):
        world.fetch("http://pictures.example/loop")
    assert [path for _, path in world.asked].count("/loop") == 4


def test_size_is_limited_whatever_the_server_says(world: World) -> None:
    world.send("/a", b"x" * 1000)
    assert len(world.fetch("http://pictures.example/a", most_bytes=1000)) == 1000
    with pytest.raises(ValueError, match="more than 999 bytes"):
        world.fetch("http://pictures.example/a", most_bytes=999)

    def endless(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not world.stop.is_set():
            try:
                handler.wfile.write(b"x" * 10000)
            except OSError:
                return

    world.pages["/endless"] = endless
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        world.fetch("http://pictures.example/endless", most_bytes=1000)
    world.send("/short", b"xyz", Content_Length="1000")
    with pytest.raises(ValueError, match=r"could not be fetched|took longer"):
        world.fetch("http://pictures.example/short", most_seconds=1)


@pytest.mark.parametrize("when", ["headers", "content", "name"])
def test_time_is_limited_from_the_first_to_the_last_byte(world: World, when: str) -> None:
    def dripping(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + (b"\r\n" if when == "content" else b"X: "))
        while not world.stop.wait(0.02):
            try:
                handler.wfile.write(b"x")
            except OSError:
                return

    world.pages["/a"] = dripping
    fetcher = world.fetcher(most_seconds=0.3)
    if when == "name":
        fetcher._resolve = lambda host, port: [str(world.stop.wait(60))]
    with pytest.raises(ValueError, match=r"took longer than 0.3 seconds"):
        fetcher.fetch(fetcher.check("http://pictures.example/a", "image 0"))
    assert threading.active_count() < 50


@pytest.mark.parametrize(
    ("status", "words"), [(404, "answered with 404"), (500, "answered with 500"), (304, "answered with 304")]
)
def test_an_answer_that_is_no_image_is_an_error(world: World, status: int, words: str) -> None:
    world.send("/a", b"", status)
    with pytest.raises(ValueError, match=words):
        world.fetch("http://pictures.example/a")
    world.names["gone.example"] = [[]]
    with pytest.raises(ValueError, match=r"could not be fetched \('gone.example' has no address"):
        world.fetch("http://gone.example/a")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates")
def test_certificates_are_those_of_the_name(world: World, tmp_path: Path) -> None:
    key, chain = str(tmp_path / "key"), str(tmp_path / "chain")
    made = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {chain} -days 2 -subj /CN=test -addext"
    )
    subprocess.run([*made.split(), "subjectAltName=DNS:pictures.example"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    world.server.socket = context.wrap_socket(world.server.socket, server_side=True)
    world.send("/a", b"content")
    world.send("/down", b"", 302, Location="http://pictures.example/a")
    world.names["other.example"] = [[PUBLIC]]
    fetcher = world.fetcher()
    fetcher._tls.load_verify_locations(chain)
    assert fetcher.fetch(fetcher.check("https://pictures.example/a", "image 0")) == b"content"
    assert world.gone_to == [(PUBLIC, 443)] and world.asked == [("pictures.example", "/a")]
    for url, words in (
        ("https://other.example/a", "could not be fetched .*certificate"),
        ("https://pictures.example/down", "redirect from https to http"),
    ):
        with pytest.raises(ValueError, match=words):
            fetcher.fetch(fetcher.check(url, "image 0"))
    with pytest.raises(ValueError, match=r"could not be fetched .*certificate"):
        world.fetch("https://pictures.example/a")  # its certificate is not trusted


@pytest.mark.parametrize("given", ["a.example", ["http://a.example"], [1], [""]])
def test_domains_are_a_list(given: Any) -> None:
    with pytest.raises(ValueError, match=r"allowed_media_domains=.*must be a list"):
        EngineConfig(allowed_media_domains=given)


def test_messages_name_images_elsewhere_only_where_that_is_allowed(world: World, tmp_path: Path) -> None:
    vision.qwen2_5_vl(tmp_path)
    vision.tokenizer(tmp_path)
    world.send("/a.png", encoded(A, "PNG"))
    world.send("/text", b"no image")
    words = {"type": "text", "text": "w5 w6 w7"}
    url, broken, lost = (image_url(f"http://pictures.example/{name}") for name in ("a.png", "text", "lost"))
    with (
        LLM(str(tmp_path), dtype="float32") as llm,
        pytest.raises(ValueError, match="set allowed_media_domains"),
    ):
        llm.chat(message(url, words), GREEDY, use_tqdm=False)
    with LLM(str(tmp_path), dtype="float32", allowed_media_domains=["pictures.example"]) as llm:
        reader = llm.requests.inputs.images
        assert reader is not None and reader._fetcher is not None
        reader._fetcher = world.fetcher("pictures.example")
        world.send("/lost", b"", 404)
        found = llm.chat([message(url, words), message(broken), message(lost)], GREEDY, use_tqdm=False)
        given = {"prompt_token_ids": [IMAGE, 5, 6, 7], "multi_modal_data": {"image": A}}
        assert (
            found[0].outputs[0].token_ids
            == llm.generate(given, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        )
        assert "is no PNG" in str(found[1].error) and "404" in str(found[2].error)
        with pytest.raises(ValueError, match="not among allowed_media_domains"):
            llm.chat(message(image_url("http://other.example/a.png")), GREEDY, use_tqdm=False)


def test_a_server_fetches_images_and_frames_before_it_encodes(world: World, tmp_path: Path) -> None:
    vision.qwen2_5_vl(tmp_path)
    vision.tokenizer(tmp_path)
    for number in range(2):
        world.send(f"/{number}.png", encoded(vision.picture(32, 24, number), "PNG"))
    urls = [f"http://pictures.example/{number}.png" for number in range(2)]
    parts = [image_url(urls[0]), {"type": "video", "video": urls}, {"type": "video", "video": [A, A]}]
    llm = LLM(str(tmp_path), dtype="float32", allowed_media_domains=["*"])
    reader = llm.requests.inputs.images
    assert reader is not None
    reader._fetcher = world.fetcher()
    prompt = llm.chat_prompt(message(*parts))
    expected = llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    world.asked.clear()

    async def main() -> list[int]:
        engine = AsyncLLM(llm)
        fetched = await engine.fetch(prompt)
        assert sorted(path for _, path in world.asked) == ["/0.png", "/0.png", "/1.png"]
        with pytest.raises(ValueError, match="18 images are to be fetched, at most 16"):
            await engine.fetch(llm.chat_prompt(message(*parts * 6)))
        assert len(world.asked) == 3
        world.pages.clear()  # nothing is left to fetch
        found = [i async for delta in engine.generate(fetched, GREEDY) for i in delta.token_ids]
        await engine.shutdown()
        return found

    assert asyncio.run(main()) == expected


def test_a_server_waits_for_others_aside(world: World, tmp_path: Path) -> None:
    """While an image is being fetched, the tokenizing thread does other work."""
    vision.qwen2_5_vl(tmp_path)
    vision.tokenizer(tmp_path)
    world.send("/a.png", encoded(A, "PNG"))
    plain, is_asked = world.pages["/a.png"], threading.Event()

    def held(handler: http.server.BaseHTTPRequestHandler) -> None:
        is_asked.set()
        world.stop.wait(60)
        plain(handler)

    world.pages["/a.png"] = held

    async def run() -> None:
        with LLM(str(tmp_path), dtype="float32", allowed_media_domains=["pictures.example"]) as llm:
            reader = llm.requests.inputs.images
            assert reader is not None
            reader._fetcher = world.fetcher(most_seconds=60)
            server = AsyncLLM(llm)
            given = llm.chat_prompt(message(image_url("http://pictures.example/a.png")))
            fetching = asyncio.create_task(server.fetch(given))
            await asyncio.to_thread(is_asked.wait, 60)
            assert await server.encode(lambda: "free") == "free" and not fetching.done()
            world.stop.set()
            found = await fetching
            assert isinstance(found, dict) and found["multi_modal_data"]["image"] == [encoded(A, "PNG")]
            assert await server.fetch([1, 2]) == [1, 2]
            await server.shutdown()

    asyncio.run(run())
