"""The thread between a run folder and a page. It alone reads, sends and writes requests; callbacks only queue.

A plain daemon thread, not an asyncio task: it goes on at its pace while a cell keeps the kernel busy.
"""

import logging
import queue
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from rlkit.errors import RlkitError
from rlkit_widgets.messages import Encoder
from rlkit_widgets.rollouts import rollout_message, rollouts_message
from rlkit_widgets.state import Changes, Json, RunState

log = logging.getLogger(__name__)

PERIOD_S = 0.25
"""Seconds between two looks at the folder."""
PERIOD_ENDED_S = 1.0
"""The same for a run that has ended: it may be taken up again."""
KEEPALIVE_S = 2.0
"""Longest silence towards a page; a page that hears nothing for longer says so."""
REQUEST_KINDS = frozenset({"pause", "resume", "step", "stop", "set", "checkpoint"})


class Page(Protocol):
    """What the feed needs of a widget."""

    def send(self, content: Json, buffers: list[bytes]) -> None: ...

    def adopt(self, state: RunState, changes: Changes) -> None:
        """Take over what is new into traits."""


class Feed:
    """Follows a run for one page.

    Args:
        state: the run as known so far; from now on only the feed touches it.
        page: where messages go; held weakly, so that a dropped widget can die and ends the thread.
        with_rollouts: whether the newest rollouts are sent when they appear.
    """

    def __init__(self, state: RunState, page: Page, with_rollouts: bool) -> None:
        self._state = state
        self._page = weakref.ref(page)
        self._with_rollouts = with_rollouts
        self._encoder = Encoder(state)
        self._inbox: queue.SimpleQueue[Json | None] = queue.SimpleQueue()
        self._greeted = False
        self._follows = True
        self._last_sent = 0.0
        self._last_error: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rlkit feed {state.folder.name}", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def post(self, content: Mapping[str, Any]) -> None:
        """Queue a message from the page. Returns at once; safe from any thread."""
        self._inbox.put(dict(content))

    def close(self) -> None:
        """End the thread. The run is not touched."""
        self._closed.set()
        self._inbox.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        wait = 0.0
        while not self._closed.is_set():
            letters = self._collect(wait)
            page = self._page()
            if page is None or self._closed.is_set():
                return
            self.turn(page, letters)
            del page
            wait = PERIOD_ENDED_S if self._state.final else PERIOD_S

    def _collect(self, wait: float) -> list[Json]:
        """Messages from the page: waits for the first one at most `wait` seconds, then takes all that are there."""
        letters = []
        try:
            letter = self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()
            while letter is not None:
                letters.append(letter)
                letter = self._inbox.get_nowait()
        except queue.Empty:
            pass
        return letters

    def turn(self, page: Page, letters: list[Json]) -> None:
        """One look at the folder, and answers to `letters`. Errors go to the log and to the page, never to a cell."""
        try:
            changes = self._state.look()
            page.adopt(self._state, changes)
            answered = [self._write_request(letter) for letter in letters if letter.get("kind") == "request"]
            if any(letter.get("kind") == "hello" for letter in letters):
                self._greet(page)
                changes = Changes()
            if self._greeted:
                self._tick(page, changes, answered)
            for letter in letters:
                self._answer_rollouts(page, letter)
            self._last_error = None
        except Exception as error:  # a broken folder must not end the thread: it may be whole at the next look
            self._report(page, error)

    def _greet(self, page: Page) -> None:
        self._greeted = self._follows = True
        page.send(*self._encoder.hello())
        for content, buffers in self._encoder.history():
            page.send(content, buffers)
        if self._with_rollouts:
            page.send(rollouts_message(self._state, None), [])
        self._last_sent = time.monotonic()

    def _tick(self, page: Page, changes: Changes, answered: list[Json]) -> None:
        silent = time.monotonic() - self._last_sent >= KEEPALIVE_S
        if answered or silent or changes.status or changes.settings or changes.points or changes.requests:
            page.send(*self._encoder.tick(changes, answered))
            self._last_sent = time.monotonic()
        if changes.rollouts and self._with_rollouts and self._follows:
            page.send(rollouts_message(self._state, None), [])

    def _write_request(self, letter: Json) -> Json:
        """Append the page's request to the control file; the page's own "nonce" comes back with the run's id."""
        kind, args = letter.get("request"), dict(letter.get("args") or {})
        note: Json = {"nonce": letter.get("nonce"), "kind": kind, "args": args, "source": "widget", "step": None}
        if kind not in REQUEST_KINDS:
            return note | {"id": None, "status": "refused", "reason": f"there is no request {kind!r}"}
        if not self._state.driven:
            return note | {"id": None, "status": "refused", "reason": _undriven(self._state.status)}
        try:
            return self._state.request(str(kind), args, letter.get("nonce"))
        except (OSError, RlkitError) as error:
            return note | {"id": None, "status": "refused", "reason": f"the request could not be written: {error}"}

    def _answer_rollouts(self, page: Page, letter: Json) -> None:
        if letter.get("kind") == "rollouts":
            step = letter.get("step")
            self._follows = step is None
            page.send(rollouts_message(self._state, None if step is None else int(step)), [])
        elif letter.get("kind") == "rollout":
            page.send(rollout_message(self._state, int(letter["step"]), int(letter["place"])), [])

    def _report(self, page: Page, error: Exception) -> None:
        """Log a failed turn and tell the page, once per message."""
        text = f"{type(error).__name__}: {error}"
        if self._closed.is_set() or text == self._last_error:
            return
        self._last_error = text
        log.warning("the widget of run %s could not follow it", self._state.folder, exc_info=error)
        try:
            page.send({"kind": "error", "message": text}, [])
        except Exception:  # the channel to the page itself is broken; the log has the reason
            log.warning("the page could not be told", exc_info=True)


def _undriven(status: Json) -> str:
    """Why a run cannot be asked for anything."""
    if status.get("parked"):
        return "nobody drives the run now; its trainer goes on where it was started"
    words = {"finished": "finished", "stopped": "been stopped", "failed": "failed"}
    return f"the run has {words.get(str(status.get('state')), 'ended')}"
