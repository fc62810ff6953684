"""A real browser, and a talk in it that any server has to stand."""

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextlib.contextmanager
def chromium() -> Iterator["Browser"]:
    """Chromium without a window; skips where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium in PATH")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(browser: "Browser", address: str, **options: object) -> Iterator["Page"]:
    """A page of a browser profile of its own, at an address. No script may fail in it, or be stopped by the policy."""
    context = browser.new_context(accept_downloads=True, **options)
    page = context.new_page()
    page.set_default_timeout(5000)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: "ecurity" in message.text and faults.append(message.text))
    page.goto(address)
    yield page
    context.close()
    assert not faults


def ask(page: "Page", text: str) -> None:
    """Type and send."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answered(page: "Page", seconds: float = 5) -> None:
    """Wait for the end of the answer that is being written."""
    page.locator("#send", has_text="Send").wait_for(timeout=1000 * seconds)
    page.locator("#turns[aria-busy=false] > .answer:last-child").wait_for()


def converse(page: "Page", exported: Path, seconds: float = 60) -> None:
    """From the first question to the export, with whatever a server says. `seconds`: for each of its answers."""
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("24")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Thinking").select_option("off")
    page.get_by_role("button", name="Done").click()
    for question in ("Tell me about Ruth 1.", "And then?"):
        ask(page, question)
        answered(page, seconds)
    status = page.locator(".answer .status").last
    assert re.search(r"^[\d,]+ prompt tokens?.* · first token after .* · \d+ tokens?", status.inner_text())
    answers = page.locator(".answer > .markdown")
    first = answers.first.inner_text()
    assert first.strip()

    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edit the message").press("Enter")
    answered(page, seconds)
    assert page.locator(".turn").count() == 2
    assert answers.first.inner_text() == first  # the same question, greedily

    page.get_by_role("button", name="Regenerate").click()
    answered(page, seconds)
    assert answers.first.inner_text() == first

    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(exported)
