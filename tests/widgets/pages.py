"""Stand-ins for a browser page: one that records what the feed sends, and a comm that records what a widget sends."""

import json
import struct
import time
from collections.abc import Callable
from typing import Any

from comm.base_comm import BaseComm

from rlkit_widgets.state import Changes, RunState

Points = dict[str, list[tuple[float, float]]]


class RecorderPage:
    """Takes the feed's messages as a widget does."""

    def __init__(self) -> None:
        self.messages: list[tuple[dict[str, Any], list[bytes]]] = []
        self.adopted: list[Changes] = []

    def send(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        self.messages.append((json.loads(json.dumps(content, allow_nan=False)), buffers))

    def adopt(self, state: RunState, changes: Changes) -> None:
        self.adopted.append(changes)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [content for content, _ in self.messages if content["kind"] == kind]

    def clear(self) -> None:
        self.messages.clear()


class RecorderComm(BaseComm):
    """A comm whose messages go nowhere but into `sent`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sent: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)

    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        self.sent.append({"type": msg_type, "data": data, "buffers": buffers or []})

    def custom(self, kind: str) -> list[dict[str, Any]]:
        """Contents of the custom messages of one kind."""
        contents = [sent["data"].get("content", {}) for sent in self.sent if sent["data"]]
        return [content for content in contents if content.get("kind") == kind]


def message_bytes(message: tuple[dict[str, Any], list[bytes]]) -> int:
    """Bytes of a message without the envelope."""
    content, buffers = message
    return len(json.dumps(content).encode()) + sum(len(buffer) for buffer in buffers)


def decode(messages: list[tuple[dict[str, Any], list[bytes]]]) -> Points:
    """The points of a series of messages, read as the page reads them."""
    names: dict[int, str] = {}
    points: Points = {}
    for content, buffers in messages:
        names |= dict(content.get("names", []))
        if not buffers:
            continue
        steps = struct.unpack(f"<{len(buffers[0]) // 8}d", buffers[0])
        values = struct.unpack(f"<{len(buffers[1]) // 4}f", buffers[1])
        assert len(steps) == len(values) == sum(count for _, count in content["series"])
        place = 0
        for identifier, count in content["series"]:
            line = points.setdefault(names[identifier], [])
            line += zip(steps[place : place + count], values[place : place + count], strict=True)
            place += count
    return points


def press(widget: Any, **content: Any) -> None:
    """Deliver a message from the page as the kernel does."""
    widget._handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})


def eventually(condition: Callable[[], Any], timeout: float = 20.0) -> Any:
    """The first true value of `condition`; fails when there is none in time."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)
    return value
