"""Debian's Chromium, driven without a window: visitors of a page, each with a profile of their own."""

import contextlib
import os
import shutil
from collections.abc import Iterator

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextlib.contextmanager
def open_chromium() -> Iterator:
    """A browser of playwright, by the program that CHROMIUM names."""
    from playwright.sync_api import sync_playwright

    name = os.environ.get("CHROMIUM", "chromium")
    program = shutil.which(name)
    if program is None:
        raise RuntimeError(f"CHROMIUM={name} is not there; it must be a program. make test-demo installs Chromium.")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """
    Someone who looks at the page, with their own cookies and storage.

    Attributes:
        page: The page of playwright.
        problems: Errors in the console, and requests to anywhere but the page's own server.
        answers: What its server has answered, in order.
    """

    def __init__(self, browser, url: str, width: int = 1180, height: int = 900, scheme: str = "light"):
        self.url, self.problems, self.answers = url, [], []
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.on("console", self.read_console)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self.read_request)
        self.page.on("requestfinished", self.read_answer)
        self.page.goto(url)
        self.page.wait_for_selector(".cup")

    def read_console(self, message) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def read_request(self, request) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.problems.append(f"a request to {request.url}")

    def read_answer(self, request) -> None:
        if "component_server" in request.url:
            self.answers.append(request.response().json())

    def wait_for_answer(self, name: str, value=None) -> dict:
        """The last answer, once it has this entry; the page may show an answer before it is noted here."""
        for _ in range(200):
            last = self.answers[-1] if self.answers else {}
            if name in last and value in (None, last[name]):
                return last
            self.page.wait_for_timeout(50)
        raise AssertionError(f"No answer has {name}={value}; the last one has {last}.")

    def open_tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name).click()

    def fill(self, name: str, value) -> None:
        self.page.locator(f"[name={name}]:visible").fill(str(value))

    def choose(self, name: str, value: str) -> None:
        self.page.locator(f"label:has([name={name}][value='{value}']):visible").click()

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).locator("visible=true").click()

    def status(self) -> str:
        return self.page.locator(".status:visible").inner_text()

    def start_game(self, swaps: int, timing: str = "fixed", speed: str = "256") -> None:
        self.fill("swaps", swaps)
        self.choose("timing", timing)
        self.choose("speed", speed)
        self.page.locator("button.main:visible").click()

    def wait_for_cue(self) -> None:
        self.page.wait_for_selector("svg.choosing", timeout=60_000)

    def wait_for_ball(self) -> None:
        self.page.wait_for_selector(".cup.found", timeout=60_000)

    def scores(self) -> dict[str, str]:
        """What each player has chosen in this game, as the table shows it."""
        rows = self.page.locator(".score tbody tr").all()
        return {row.get_attribute("data-player"): row.locator("td").first.inner_text() for row in rows}

    def leave(self) -> None:
        self.context.close()
