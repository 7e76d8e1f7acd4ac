"""How long a cell takes to answer, from sending it to its result, over the channel that a page uses."""

import json
import time
import uuid
from collections.abc import Callable
from typing import Any

import websocket

from tests.browser.lab import Lab


def cell_seconds(lab: Lab, source: str, times: int, rest: Callable[[], None]) -> list[float]:
    """Run `source` in the notebook's kernel `times` times; `rest()` comes between two of them.

    Returns:
        Seconds from each request to its result.
    """
    address = f"ws://{lab.address}/api/kernels/{lab.kernel['id']}/channels?token={lab.token}"
    channel = websocket.create_connection(address, timeout=60)
    try:
        measured = []
        for _ in range(times):
            measured.append(_answer_seconds(channel, source))
            rest()
        return measured
    finally:
        channel.close()


def _answer_seconds(channel: websocket.WebSocket, source: str) -> float:
    id_ = uuid.uuid4().hex
    header = {"msg_id": id_, "msg_type": "execute_request", "username": "test", "session": "latency", "version": "5.4"}
    content = {"code": source, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": True}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    _drain(channel)
    began = time.perf_counter()
    channel.send(json.dumps(message))
    while True:
        answer = _receive(channel)
        if answer.get("parent_header", {}).get("msg_id") == id_ and answer["msg_type"] == "execute_result":
            return time.perf_counter() - began


def _drain(channel: websocket.WebSocket) -> None:
    """Read what came since the last answer: the widget's messages come on this channel, too."""
    channel.settimeout(0.001)
    try:
        while True:
            channel.recv()
    except websocket.WebSocketTimeoutException:
        channel.settimeout(60)


def _receive(channel: websocket.WebSocket) -> dict[str, Any]:
    """The next message without buffers; those with buffers are the widget's."""
    while isinstance(frame := channel.recv(), bytes):
        pass
    message: dict[str, Any] = json.loads(frame)
    return message
