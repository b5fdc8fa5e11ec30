"""The page at `/`: its files without a browser, and its behaviour in one (skipped without Chromium)."""

from __future__ import annotations

import asyncio
import html.parser
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from draftproof import LLM, SamplingParams
from draftproof.server import page as page_files
from draftproof.server.errors import RefusalError
from draftproof.server.page import FILES, POLICY
from draftproof.types import RequestOutput
from tests.made import vision
from tests.server.running import ENGINE, LONG, Running, drafting, local, running
from tests.server.scripted import scripted

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUESTION = "What is 12 * 7? Write it out, then write it out again."
PROMPT = "for i in range(10):\n    print(i)\nfor i in range(10):\n"
MESSAGES = [{"role": "user", "content": QUESTION}]
OUTSIDE = re.compile(r"""(?:https?:)?//[a-z0-9.-]+\.[a-z]+""")
HTML = """<img src=x onerror="document.title='caught'"><script>document.title='caught'</script>&amp;"""
MILLISECONDS = 1000 * LONG


# ---- without a browser


def test_files_are_open_and_under_a_strict_policy() -> None:
    """The page's files need no key, since users type it into the page; all other routes do."""
    folder = Path(page_files.__file__).parent

    async def main() -> None:
        async with local(drafting(), api_key=("secret",)) as (client, _):
            for route, (name, kind) in FILES.items():
                response = await client.get(route)
                assert response.content == (folder / name).read_bytes() and response.status_code == 200
                assert response.headers["content-type"] == kind
                assert response.headers["content-security-policy"] == POLICY
                assert response.headers["x-content-type-options"] == "nosniff"
                head = await client.head(route)
                assert head.status_code == 200 and not head.content
                assert (await client.post(route)).status_code in (401, 405)
            for route in ("/page/", "/page", "/page/__init__.py", "/page/../v1/models", "/v1/models"):
                assert (await client.get(route)).status_code == 401, route

    asyncio.run(main())
    assert "'none'" in POLICY.split(";")[0] and "unsafe" not in POLICY and "*" not in POLICY


def test_the_page_can_be_left_out() -> None:
    async def main() -> None:
        async with local(drafting(), page=False) as (client, _):
            assert [(await client.get(route)).status_code for route in FILES] == [404] * len(FILES)
        async with local(drafting(), page=False, api_key=("secret",)) as (client, _):
            assert (await client.get("/")).status_code == 401

    asyncio.run(main())


def test_nothing_comes_from_elsewhere_and_nothing_is_inline() -> None:
    folder = Path(page_files.__file__).parent
    texts = {name: (folder / name).read_text() for name, _ in FILES.values()}
    for name, text in texts.items():
        assert set(OUTSIDE.findall(text)) <= {"http://www.w3.org"}, (
            name
        )  # a name space, which is never fetched
    scripts = "".join(text for name, text in texts.items() if name.endswith(".js"))
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert unsafe not in scripts
    tags: list[tuple[str, dict[str, str | None]]] = []
    reader = html.parser.HTMLParser()
    reader.handle_starttag = lambda tag, attrs: tags.append((tag, dict(attrs)))  # type: ignore[method-assign]
    reader.feed(texts["index.html"])
    assert len(tags) > 40
    for tag, attributes in tags:
        assert tag != "style" and (tag != "script" or attributes["src"])
        assert not [name for name in attributes if name == "style" or name.startswith("on")]


def test_models_say_what_can_be_asked_for(tmp_path: Path) -> None:
    async def asked(llm: LLM) -> dict[str, Any]:
        async with local(llm) as (client, _):
            return (await client.get("/v1/models")).json()["data"][0]

    told = asyncio.run(asked(drafting()))
    assert told["speculation"] == {"num_speculative_tokens": 4, "methods": ["eagle3"]}
    assert (told["max_model_len"], told["input_modalities"], told["has_chat_template"]) == (
        256,
        ["text"],
        True,
    )
    vision.qwen2_5_vl(tmp_path)
    seeing = asyncio.run(asked(LLM(str(tmp_path), dtype="float32", max_model_len=256, num_kv_blocks=40)))
    assert seeing["input_modalities"] == ["text", "image"]
    assert seeing["speculation"]["num_speculative_tokens"] == 0


def streamed(server: Running, route: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of an answer with `include_drafts`."""
    body |= {"stream": True, "stream_options": {"include_usage": True, "include_drafts": True}}
    with server.http() as http:
        lines = http.post(route, json=body).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(drafting(max_model_len=2048, num_kv_blocks=300)) as started:
        yield started
        started.check_nothing_left()


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(dtype="float32", max_model_len=2048, num_kv_blocks=300) as llm:
        yield llm


def test_chunks_say_what_was_drafted(server: Running, plain: LLM) -> None:
    """Pieces add up to the text, accepted pieces to the accepted drafts' text, and counts to the usage's."""
    chunks = streamed(
        server, "/v1/completions", prompt=PROMPT, max_tokens=60, temperature=0, return_token_ids=True
    )
    (output,) = plain.generate(PROMPT, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    steps = [choice for choice in choices if choice.get("token_ids")]
    pieces = [piece for step in steps for piece in step["drafts"]["pieces"]]
    assert "".join(piece["text"] for piece in pieces) == output.outputs[0].text
    assert all("".join(p["text"] for p in step["drafts"]["pieces"]) == step["text"] for step in steps)
    assert steps[0]["drafts"]["num_drafted"] is None, "a prompt's end is no round"
    rounds = [step["drafts"] for step in steps[1:]]
    assert all(1 <= one["num_drafted"] <= 4 for one in rounds[:-1])
    assert [one["num_accepted"] for one in rounds] == [sum(step["accepted"]) for step in steps[1:]]
    counted = chunks[-1]["usage"]["completion_tokens_details"]
    num_accepted = sum(one["num_accepted"] for one in rounds)
    assert counted["accepted_prediction_tokens"] == num_accepted > 0
    assert counted["rejected_prediction_tokens"] == sum(one["num_drafted"] for one in rounds) - num_accepted
    accepted_ids = [i for s in steps for i, a in zip(s["token_ids"], s["accepted"], strict=True) if a]
    text = "".join(plain.tokenizer.decode([i]) for i in accepted_ids)
    assert "".join(p["text"] for p in pieces if p["accepted"]) == text


def test_nobody_is_shown_drafts_unasked_and_choices_have_their_own(server: Running) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 24, "seed": 3, "temperature": 0.8}
    with server.http() as http:
        told = http.post("/v1/completions", json={**asked, "stream": True, "return_token_ids": True}).text
    assert '"accepted"' in told and '"drafts"' not in told
    texts, shown = [""] * 2, [""] * 2
    chunks = streamed(server, "/v1/completions", n=2, **asked)
    for choice in (chunk["choices"][0] for chunk in chunks if chunk["choices"]):
        texts[choice["index"]] += choice["text"]
        pieces = choice.get("drafts", {}).get("pieces", [])
        shown[choice["index"]] += "".join(piece["text"] for piece in pieces)
    assert texts == shown and texts[0] != texts[1]


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("needs a Chromium on the path, such as Debian's package chromium")
    with api.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Page:
    """The page in its own tab, and a user's actions. It may send no request to another server, and log nothing to the
    console but what a test expects."""

    def __init__(self, browser: Any, url: str, **settings: Any) -> None:
        self.complaints: list[str] = []
        self.tab = browser.new_page(**settings)
        self.tab.set_default_timeout(MILLISECONDS)
        self.tab.on("console", lambda said: said.type == "error" and self.complaints.append(said.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("request", lambda one: self._check(one.url, url))
        self.tab.goto(url + "/")

    def _check(self, asked: str, url: str) -> None:
        if not asked.startswith((url, "data:")):
            self.complaints.append(f"asks {asked}")

    def see(self, selector: str, text: str | re.Pattern[str], *, number: int = 0) -> None:
        """Wait until an element shows `text`."""
        from playwright.sync_api import expect

        expect(self.tab.locator(selector).nth(number)).to_contain_text(text, timeout=MILLISECONDS)

    def send(self, text: str) -> None:
        self.see("#model", re.compile("."))
        self.tab.fill("#text", text)
        self.tab.press("#text", "Enter")

    def wait(self) -> None:
        """Wait until no answer is being streamed."""
        self.tab.locator("#send").wait_for(state="visible")

    def text(self, selector: str, number: int = 0) -> str:
        return str(self.tab.locator(selector).nth(number).text_content())

    def set(self, **values: str) -> None:
        self.tab.click("summary")
        for name, value in values.items():
            field = self.tab.locator("#" + name.replace("_", "-"))
            if field.evaluate("field => field.tagName") == "SELECT":
                field.select_option(value)
            else:
                field.fill(value)
        self.tab.press("#settings", "Escape")

    def leave(self) -> None:
        self.tab.close()
        assert not self.complaints


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Page]]:
    """A function that opens the page; at the end tabs are closed, and asserted to have no errors."""
    tabs: list[Page] = []

    def opened(url: str, **settings: Any) -> Page:
        tabs.append(Page(browser, url, **settings))
        return tabs[-1]

    yield opened
    for page in tabs:
        page.leave()


def marked(output: RequestOutput, choices: list[dict[str, Any]]) -> str:
    return "".join(p["text"] for c in choices for p in c.get("drafts", {}).get("pieces", []) if p["accepted"])


@pytest.mark.slow
def test_types_and_streams(opened: Callable[..., Page], server: Running, plain: LLM) -> None:
    """The text equals plain decoding's, drafted pieces are marked, and the figures are those of the rounds."""
    page = opened(server.url)
    asked = {"temperature": 0, "max_tokens": 80}
    (output,) = plain.chat(MESSAGES, SamplingParams(**asked), use_tqdm=False)
    page.set(max_tokens="80")
    page.send(QUESTION)
    page.see(".facts", "seed")
    assert page.text(".answer .text") == output.outputs[0].text
    chunks = streamed(server, "/v1/chat/completions", messages=MESSAGES, **asked)
    rounds = [chunk["choices"][0].get("drafts") for chunk in chunks if chunk["choices"]]
    rounds = [one for one in rounds if one and one["num_drafted"] is not None]
    pieces = [piece for one in rounds for piece in one["pieces"]]
    shown = "".join(page.tab.locator(".answer .text mark").all_text_contents())
    assert shown == "".join(piece["text"] for piece in pieces if piece["accepted"]) != ""
    num_accepted = sum(one["num_accepted"] for one in rounds)
    assert page.text("#per-round") == f"{1 + num_accepted / len(rounds):.2f}"
    assert f"{len(output.outputs[0].token_ids)} tokens" in page.text(".facts")
    for place, told in enumerate(page.tab.locator("#bars li").all()):
        drafted = sum(one["num_drafted"] > place for one in rounds)
        accepted = sum(one["num_accepted"] > place for one in rounds)
        assert told.get_attribute("title").endswith(f": {accepted} accepted of {drafted}")
        width = told.locator(".bar").evaluate("bar => bar.style.width")
        assert width == f"{int(100 * accepted / drafted + 0.5) if drafted else 0}%"
    for figure in ("#speed-up", "#speed", "#plain-speed"):
        assert re.fullmatch(r"\d+(\.\d+)?×?", page.text(figure)), figure
    page.send("And 3?")  # the conversation continues
    page.see(".facts", "seed", number=1)
    talk = [*MESSAGES, {"role": "assistant", "content": output.outputs[0].text}]
    (output,) = plain.chat(
        [*talk, {"role": "user", "content": "And 3?"}], SamplingParams(**asked), use_tqdm=False
    )
    assert page.text(".answer .text", 1) == output.outputs[0].text


@pytest.mark.slow
def test_completions_go_on_where_the_text_ends(
    opened: Callable[..., Page], server: Running, plain: LLM
) -> None:
    page = opened(server.url)
    page.set(max_tokens="40", temperature="0.7", seed="5", drafts="2")
    page.tab.locator("input[value=completion]").check(force=True)
    page.send(PROMPT)
    page.see(".facts", "seed 5")
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=40)
    (output,) = plain.generate(PROMPT, params, use_tqdm=False)
    assert page.text(".answer .text") == PROMPT + output.outputs[0].text
    assert "of 0" in str(page.tab.locator("#bars li").nth(2).get_attribute("title")), "two drafts at most"


@pytest.mark.slow
@pytest.mark.parametrize("by", ["button", "key"])
def test_stops(opened: Callable[..., Page], server: Running, by: str) -> None:
    """The stream is closed, so the server frees its resources, and the page takes the next question."""
    page = opened(server.url)

    def endless(route: Any) -> None:
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))

    page.tab.route("**/v1/chat/completions", endless)
    page.set(max_tokens="1900")
    page.send(QUESTION)
    page.see(".answer .text", re.compile("."))
    if by == "button":
        page.tab.dispatch_event(
            "#stop", "click"
        )  # dispatched directly: `click` waits until the growing text is stable
    else:
        page.tab.press("#text", "Escape")
    page.see(".facts", "stopped")
    text = page.text(".answer .text")
    server.check_nothing_left()
    assert 0 < int(page.text(".facts").split()[0]) < 1900 and page.text(".answer .text") == text
    page.set(max_tokens="4")
    page.send("Go on")
    page.see(".facts", "4 tokens", number=1)


@pytest.mark.slow
def test_compares(opened: Callable[..., Page], server: Running) -> None:
    page = opened(server.url)
    page.tab.check("#compare")
    page.set(max_tokens="64", temperature="0.9")
    page.send(QUESTION)
    page.see(".verdict", re.compile(r"Identical: yes, all \d+ tokens\."))
    page.wait()
    without, with_drafts = (page.text(".columns .text", i) for i in (0, 1))
    assert without == with_drafts != ""
    assert page.tab.locator(".columns .answer").nth(0).locator("mark").count() == 0
    assert page.tab.locator(".columns .answer").nth(1).locator("mark").count() > 0
    (number,) = re.findall(r"all (\d+) tokens", page.text(".verdict"))
    assert int(number) > 8, "a run so short compares little"
    for i in (0, 1):
        assert re.search(rf"\b{number} tokens · [\d.]+ tokens/s", page.text(".facts", i))


@pytest.mark.slow
def test_a_difference_is_found(opened: Callable[..., Page], server: Running) -> None:
    """The second answer differs in one token id, though its text is the same."""
    page = opened(server.url)

    def change(route: Any) -> None:
        body = route.request.post_data_json
        answer = route.fetch()
        text = answer.text()
        if body["speculation"]["num_speculative_tokens"] != 0:
            before = text
            text, number = re.subn(
                r'("token_ids":\[)(\d+)', lambda m: f"{m[1]}{int(m[2]) ^ 1}", text, count=1
            )
            assert number == 1 and text != before
        route.fulfill(response=answer, body=text)

    page.tab.route("**/v1/chat/completions", change)
    page.tab.check("#compare")
    page.set(max_tokens="16")
    page.send(QUESTION)
    page.see(".verdict.no", "Identical: no, token 1 differs.")
    page.wait()
    assert page.text(".columns .text", 0) == page.text(".columns .text", 1)


@pytest.mark.slow
def test_asks_for_the_key(opened: Callable[..., Page]) -> None:
    with running(drafting(), api_key=("secret",)) as server:
        page = opened(server.url)
        page.tab.fill("#key", "wrong")
        page.tab.press("#key", "Enter")
        page.see("#door-why", "does not know this key")
        page.tab.fill("#key", "secret")
        page.tab.click("#door button")
        page.see("#model", "tiny")
        page.set(max_tokens="8")
        page.send(QUESTION)
        page.see(".facts", "8 tokens")
        kept = page.tab.evaluate(
            "() => [localStorage.length, document.cookie, location.href, sessionStorage.length]"
        )
        assert kept == [0, "", f"{server.url}/", 1]
        page.tab.reload()
        page.see("#model", "tiny")
        assert not page.tab.locator("#door").is_visible()
        assert len(page.complaints) == 2 and all("401" in said for said in page.complaints)
        page.complaints.clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "headers", "told"),
    [
        (429, {"Retry-After": "7"}, "The server is busy. Ask again in 7 s."),
        (503, {}, "The server takes no requests at present (it is too late). Ask again in a moment."),
        (400, {}, "The server cannot do that: it is too late"),
        (500, {}, "The server failed at this: it is too late"),
        (None, {}, "The server cannot be reached. Is it running?"),
    ],
)
def test_says_what_went_wrong(
    opened: Callable[..., Page], server: Running, status: int | None, headers: dict[str, str], told: str
) -> None:
    """The page shows the error and restores the question, so that it can be sent again."""
    page = opened(server.url)
    refused = RefusalError(status or 0, "it is too late")
    page.tab.route(
        "**/v1/chat/completions",
        lambda route: (
            route.fulfill(status=status, headers=headers, json=refused.body()) if status else route.abort()
        ),
    )
    page.send(QUESTION)
    page.see("#problem", told)
    page.wait()
    assert page.tab.input_value("#text") == QUESTION and page.tab.locator(".turn").count() == 0
    page.complaints.clear()
    page.tab.unroute("**/v1/chat/completions")
    page.set(max_tokens="4")
    page.tab.press("#text", "Enter")
    page.see(".facts", "4 tokens")
    assert not page.tab.locator("#problem").is_visible()


@pytest.mark.slow
def test_an_answer_that_breaks_off_is_left_standing(opened: Callable[..., Page], server: Running) -> None:
    page = opened(server.url)
    error = json.dumps(RefusalError(500, "a fault").body())
    chunk = {"choices": [{"delta": {"content": "Half an"}, "token_ids": [5], "index": 0}]}
    body = f"data: {json.dumps(chunk)}\r\n\r\n: keep-alive\n\ndata: {error}\n\ndata: [DONE]\n\n"
    page.tab.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream")
    )
    page.set(drafts="0")
    page.send(QUESTION)
    page.see("#problem", "The server failed at this: a fault")
    assert page.text(".answer .text") == "Half an"


@pytest.mark.slow
def test_texts_are_only_ever_text(opened: Callable[..., Page], tmp_path: Path) -> None:
    """Questions, answers and reasoning are never parsed as HTML."""
    with running(scripted(tmp_path, lambda _: f"<think>{HTML} hm</think>{HTML}")) as server:
        page = opened(server.url)
        page.send(HTML)
        page.see(".facts", "seed")
        assert page.text(".answer .text") == HTML == page.text(".question p")
        assert page.text(".thoughts") == f"{HTML} hm"
        assert page.tab.locator("main img, main script").count() == 0
        assert page.tab.title().endswith(" · draftproof"), "no script ran"


@pytest.mark.slow
def test_images_go_with_the_question(opened: Callable[..., Page], tmp_path: Path) -> None:
    vision.qwen2_5_vl(tmp_path)
    vision.tokenizer(tmp_path)
    file = io.BytesIO()
    vision.picture(80, 60, 3).save(file, "PNG")
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "num_kv_blocks": 40}
    with running(LLM(str(tmp_path), **settings)) as server:
        page = opened(server.url)
        page.see("#attach", "Add image")
        picture = {"name": "a.png", "mimeType": "image/png", "buffer": file.getvalue()}
        page.tab.set_input_files("#file", [picture, picture])
        page.tab.locator("#images button").first.click()
        page.set(max_tokens="12")
        page.send("What is it?")
        page.see(".facts", "seed")
        assert page.tab.locator(".question img").count() == 1
        shown = page.text(".answer .text")
    with LLM(str(tmp_path), **settings) as llm:
        image = {"type": "image", "image": Image.open(file)}
        content = [image, {"type": "text", "text": "What is it?"}]
        params = SamplingParams(temperature=0, max_tokens=12)
        blind, seeing = (
            llm.chat([{"role": "user", "content": given}], params, use_tqdm=False)[0].outputs[0].text
            for given in (content[1:], content)
        )
    assert shown == seeing != blind


@pytest.mark.slow
def test_without_a_drafter_nothing_is_promised(opened: Callable[..., Page]) -> None:
    with running(LLM(**ENGINE)) as server:
        page = opened(server.url)
        page.see("#note", "runs without a drafter")
        assert page.tab.locator("#compare").is_disabled() and page.tab.locator("#drafts").is_disabled()
        page.set(max_tokens="8")
        page.send(QUESTION)
        page.see(".facts", "8 tokens")


@pytest.mark.slow
def test_events_are_read_wherever_the_stream_is_cut(opened: Callable[..., Page], server: Running) -> None:
    page = opened(server.url)
    text = 'data: {"a": 1}\n\n: comment\n\nevent: x\r\ndata:two\r\ndata: lines\r\n\r\ndata: é😀\n\ndata: cut off\n'
    read = """async ([bytes, size]) => {
        const { events } = await import("/page/answers.js");
        const whole = Uint8Array.from(bytes);
        const stream = new ReadableStream({ start(to) {
            for (let i = 0; i < whole.length; i += size) to.enqueue(whole.slice(i, i + size));
            to.close();
        } });
        const found = [];
        for await (const data of events(stream)) found.push(data);
        return found;
    }"""
    for size in (1, 2, 3, 7, 1000):
        found = page.tab.evaluate(read, [list(text.encode()), size])
        assert found == ['{"a": 1}', "two\nlines", "é😀"], size


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fits_a_phone(opened: Callable[..., Page], server: Running, scheme: str) -> None:
    page = opened(server.url, viewport={"width": 360, "height": 640}, color_scheme=scheme)
    page.tab.check("#compare")
    page.set(max_tokens="32")
    page.send("x" * 300)
    page.see(".verdict", "Identical: yes")
    page.wait()
    wide = page.tab.evaluate("() => document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0
    for selector in ("#send", "#text", "#figures", "#compare"):
        assert page.tab.locator(selector).is_visible()
