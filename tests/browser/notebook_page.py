"""A notebook in JupyterLab in a real browser, driven the way a reader does it: menus, keys, the cell at the end."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Locator, Page, sync_playwright

from tests.browser.lab import Lab

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
POLL_MS = 100
CELL = ".jp-Notebook .jp-Cell"
OUTPUT = f"{CELL} .jp-OutputArea-output"


class NotebookPage:
    """The page of one notebook."""

    def __init__(self, page: Page, lab: Lab) -> None:
        self.page, self.lab = page, lab
        self.outside: list[str] = []
        """Addresses the page asked for beyond this machine."""
        self.script_errors: list[str] = []
        page.on("request", lambda request: self._note(request.url))
        page.on("pageerror", lambda error: self.script_errors.append(str(error)))

    def _note(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname != "127.0.0.1":
            self.outside.append(url)

    def wait(self, true: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
        """Wait until `true()`; the page goes on meanwhile. Raises AssertionError that says what did not come."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if true():
                return
            self.page.wait_for_timeout(POLL_MS)
        raise AssertionError(f"{what} did not come within {timeout_s:g} s")

    def open(self) -> None:
        """Open the notebook and wait for its kernel."""
        self.page.goto(self.lab.page)
        self.page.locator(CELL).first.wait_for(timeout=90_000)
        self.wait_for_kernel()

    def wait_for_kernel(self, timeout_s: float = 120) -> None:
        """Wait until the kernel is idle and the page is connected to it."""

        def ready() -> bool:
            kernel = self.lab.kernel
            return kernel.get("execution_state") == "idle" and kernel.get("connections", 0) > 0

        self.wait(ready, "an idle kernel", timeout_s)

    def choose(self, menu: str, item: str) -> None:
        """Choose from the menu bar."""
        self.page.locator(f'.lm-MenuBar-itemLabel:text-is("{menu}")').click()
        self.page.locator(f'.lm-Menu-itemLabel:text-is("{item}")').click()

    def run_all(self) -> None:
        self.choose("Run", "Run All Cells")

    def restart_kernel(self) -> None:
        """Restart through the menu and wait until the new kernel is there."""
        before = self.execution_counts()
        assert before, "nothing was run before the restart"
        self.choose("Kernel", "Restart Kernel…")
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        self.page.locator(".jp-Dialog").wait_for(state="detached")
        self.wait_for_kernel()

    def add_and_run(self, source: str) -> Locator:
        """Write a new cell at the end and run it. Returns the cell."""
        self.page.locator(".jp-Notebook-footer").click()
        cell = self.page.locator(CELL).last
        cell.locator(".cm-content").click()
        self.page.keyboard.insert_text(source)
        self.page.keyboard.press("Control+Enter")
        return cell

    def show(self, part: Locator) -> None:
        """Scroll to the top of `part`."""
        part.evaluate("(element) => element.scrollIntoView({ block: 'start' })")

    def execution_counts(self) -> list[str]:
        """Prompts of all code cells: a number when done, "*" while running or waiting, "" when never run."""
        prompts = self.page.locator(f"{CELL}.jp-CodeCell .jp-InputPrompt").all_inner_texts()
        return [prompt.strip().strip("[]:").strip() for prompt in prompts]

    def wait_until_all_ran(self, timeout_s: float) -> None:
        self.wait(
            lambda: all(count.isdecimal() for count in self.execution_counts()), "the end of all cells", timeout_s
        )

    def complaints(self) -> list[str]:
        """Error and stderr outputs of all cells."""
        kinds = ("application/vnd.jupyter.error", "application/vnd.jupyter.stderr")
        return [
            text
            for kind in kinds
            for text in self.page.locator(f'{OUTPUT} [data-mime-type="{kind}"]').all_inner_texts()
        ]

    def picture(self, of: Locator | None, path: Path) -> None:
        """Keep the page as it looks, with the top of `of` in view."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if of is not None:
            self.show(of)
            self.page.wait_for_timeout(500)
        self.page.screenshot(path=path)


@contextmanager
def opened(lab: Lab, failure: Path) -> Iterator[NotebookPage]:
    """The lab's notebook in a browser that can reach nothing but this machine; its last look goes to `failure`."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        try:
            notebook = NotebookPage(browser.new_page(viewport={"width": 1440, "height": 1500}), lab)
            try:
                notebook.open()
                yield notebook
            except BaseException:
                notebook.picture(None, failure)
                raise
        finally:
            browser.close()
