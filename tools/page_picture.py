"""Makes docs/page.png, the picture of the server's page: a comparison, by the default model and its drafter.

python tools/page_picture.py                  # needs Chromium, playwright and pillow; speeds are this machine's
python tools/page_picture.py --dark --out /tmp/dark.png
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import expect, sync_playwright

from draftproof import assets
from draftproof.cli.options import EMBEDDED_DRAFTER, SMOLLM2_DRAFTER

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "Write a Python function that returns the n-th Fibonacci number, and explain it in two sentences."
SIZE = {"width": 1200, "height": 760}
NUM_COLOURS = 96  # in the file; the page has few
WAIT = 300_000  # milliseconds
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def started(num_drafts: int) -> tuple[subprocess.Popen[str], str]:
    """A server of the default model with so many drafts a round, and its page's address."""
    default = assets.default_model()
    head = assets.path(SMOLLM2_DRAFTER if default.is_packaged else EMBEDDED_DRAFTER)
    drafter = f'{{"model": "{head}", "num_speculative_tokens": {num_drafts}}}'
    command = [sys.executable, "-m", "draftproof", "serve", "--port", "0", "--speculative-config", drafter]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said: deque[str] = deque(maxlen=20)
    for line in process.stderr:
        said.append(line)
        found = re.match(r"a page to try it: (\S+)", line)
        if found is not None:
            return process, found[1]
    raise RuntimeError(f"the server did not start; the last that it said:\n{''.join(said)}")


def picture(browser: Any, address: str, *, is_dark: bool, num_tokens: int) -> bytes:
    """The page after a comparison; the second of two, since the first one's passes are recorded on the way."""
    scheme = "dark" if is_dark else "light"
    page = browser.new_page(viewport=SIZE, device_scale_factor=2, color_scheme=scheme)
    page.goto(address)
    expect(page.locator("#send")).to_be_enabled(timeout=WAIT)
    page.check("#compare")
    page.click("summary")
    page.fill("#max-tokens", str(num_tokens))
    page.click("summary")
    for _ in range(2):
        if page.locator("#new").is_visible():
            page.click("#new")
        page.fill("#text", QUESTION)
        page.press("#text", "Enter")
        expect(page.locator(".verdict")).to_contain_text("Identical: yes", timeout=WAIT)
        expect(page.locator("#send")).to_be_visible()
    print(page.inner_text("#figures"), page.inner_text(".verdict"), sep="\n")
    taken: bytes = page.screenshot()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "page.png")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--num-drafts", type=int, default=4)
    parser.add_argument("--num-tokens", type=int, default=200)
    given = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        parser.error(f"there is no browser: install one of {', '.join(BROWSERS)}")
    process, address = started(given.num_drafts)
    try:
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            taken = picture(browser, address, is_dark=given.dark, num_tokens=given.num_tokens)
            browser.close()
    finally:
        process.terminate()
        process.communicate()
    image = Image.open(io.BytesIO(taken)).convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE)
    image.save(given.out, optimize=True)
    print(f"{given.out}: {given.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
