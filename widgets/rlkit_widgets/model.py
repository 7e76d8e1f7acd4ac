"""The one widget class: a view of a run made of panels. Dashboard, mixer and the others choose the panels."""

import difflib
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import anywidget
import traitlets as t

from rlkit_widgets.feed import Feed
from rlkit_widgets.snapshot import Snapshot
from rlkit_widgets.sources import RunLike, run_folder
from rlkit_widgets.state import Changes, Json, RunState

PANELS = ("status", "controls", "mixer", "plots", "rollouts")
_STATIC = Path(__file__).parent / "static"


@cache
def _bundle(name: str) -> str:
    """Text of a built front-end file, read once."""
    return (_STATIC / name).read_text(encoding="utf-8")


class RunWidget(anywidget.AnyWidget):
    """A live view of one run. Reads the run's folder, appends requests to it, and never touches the trainer.

    Traits to `.observe` (set by the feed's thread, so keep callbacks short): `state`, `step`, `total_steps`,
    `settings`, `last_request`. Closing the widget ends its thread and its channel to the page; the run goes on.
    A widget that is made again for the same run with the same panels closes the earlier one.

    Args:
        run: a `Run`, or the path of a run folder.
        panels: which of `PANELS` to show, in the page's fixed order.
        patterns: metrics to follow; None for all.
        **kwargs: ipywidgets' own: `layout`, `tooltip`, `tabbable`.

    Raises:
        TypeError: an unknown keyword, or `run` is neither a handle nor a path.
        rlkit.RunError: the folder is not a run folder.
    """

    _esm = t.Unicode().tag(sync=True)
    _css = t.Unicode().tag(sync=True)
    panels = t.List(t.Enum(PANELS), help="panels shown").tag(sync=True)
    run_name = t.Unicode(help="name of the run").tag(sync=True)
    snapshot_id = t.Unicode(help="marks the static view that the live one hides").tag(sync=True)
    state = t.Unicode("starting", help="state of the run as its driver last reported it")
    step = t.Int(0, help="steps done")
    total_steps = t.Int(None, allow_none=True, help="steps asked for")
    settings = t.Dict(help="live settings in force")
    last_request = t.Dict(help="latest answered request: kind, args, status, step, reason, source")

    _feed: Feed | None = None
    _open: ClassVar["weakref.WeakValueDictionary[tuple[object, ...], RunWidget]"] = weakref.WeakValueDictionary()

    def __init__(
        self,
        run: RunLike,
        *,
        panels: Sequence[str] = PANELS,
        patterns: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self._refuse_unknown(kwargs)
        folder = run_folder(run)
        key = (
            type(self).__qualname__,
            str(folder.root.resolve()),
            tuple(panels),
            None if patterns is None else tuple(patterns),
        )
        previous = self._open.pop(key, None)
        if previous is not None:
            previous.close()
        run_state = RunState(folder, patterns)
        self._owns_layout = "layout" not in kwargs
        self._snapshot = Snapshot(folder.name)
        super().__init__(panels=list(panels), run_name=folder.name, snapshot_id=self._snapshot.identifier, **kwargs)
        self._feed = Feed(run_state, self, with_rollouts="rollouts" in panels)
        self._last_state = run_state
        self.on_msg(self._on_page_message)
        self._open[key] = self
        self._feed.start()

    @t.default("_esm")
    def _default_esm(self) -> str:
        return _bundle("dashboard.js")

    @t.default("_css")
    def _default_css(self) -> str:
        return _bundle("dashboard.css")

    def adopt(self, state: RunState, changes: Changes) -> None:
        """Take over what the feed found (called on its thread)."""
        self.state = str(state.status.get("state") or "starting")
        self.step = int(state.status.get("step") or 0)
        self.total_steps = state.status.get("total_steps")
        if changes.settings:
            self.settings = state.settings
        for note in changes.requests:
            self.last_request = note
        self._snapshot.refresh(state)

    def close(self) -> None:
        """End the thread, the channel to the page and the observers. The run goes on; may be called twice."""
        feed, self._feed = self._feed, None
        if feed is None:
            super().close()
            return
        feed.close()
        self._snapshot.finish(self._last_state)
        self.on_msg(self._on_page_message, remove=True)
        layout = self.layout if self._owns_layout else None
        super().close()
        self.unobserve_all()
        if layout is not None:
            layout.close()

    def _ask(self, kind: str, args: Json) -> None:
        """Queue a request to the run, as a press in the page does."""
        if self._feed is None:
            raise RuntimeError(f"this {type(self).__name__} is closed; make a new one, or use the run's own methods")
        self._feed.post({"kind": "request", "request": kind, "args": args})

    def _on_page_message(self, _widget: object, content: Json, _buffers: object) -> None:
        """A message from the page: queued, because this may run on the kernel's threads."""
        if self._feed is not None:
            self._feed.post(content)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The live view, and before it a static one that a saved notebook keeps."""
        self._snapshot.show()
        return super()._repr_mimebundle_(**kwargs)

    @classmethod
    def _refuse_unknown(cls, kwargs: Json) -> None:
        known = {"layout", "tooltip", "tabbable"}
        for name in kwargs:
            if name not in known:
                options = ["panels", "patterns", *sorted(known)] if cls is RunWidget else sorted(known)
                near = difflib.get_close_matches(name, options, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"{cls.__name__} takes no keyword {name!r}{hint} It knows: {', '.join(options)}")
