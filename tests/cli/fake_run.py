"""A run folder written by hand through the formats of `rlkit.runs`, and a stand-in driver that answers requests."""

import json
import math
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from rlkit.errors import RlkitError
from rlkit.runs import events
from rlkit.runs.control import ControlReader
from rlkit.runs.layout import DriverLock, RunFolder, write_status
from rlkit.runs.log import LineWriter
from rlkit.runs.protocol import Span, StepMetrics
from rlkit.runs.rollouts import write_rollouts

SETTINGS: dict[str, Any] = {
    "lr": 2e-5,
    "kl_coef": 0.05,
    "temperature": 1.0,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "kl_target": None,
    "reward_weights": {"sentiment": 1.0, "brevity": 0.25},
}


class FakeRun:
    """Writes what a driver writes. `serve` also answers requests in a thread, as a driver does between steps."""

    def __init__(self, directory: Path, *, total_steps: int = 40, state: str = "running") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.folder = RunFolder(directory)
        self.folder.config.write_text(json.dumps({"algorithm": "ppo", "total_steps": total_steps}))
        self.folder.dataflow.write_text(json.dumps({"nodes": [], "edges": []}))
        self.log = LineWriter(self.folder.events)
        self.settings = json.loads(json.dumps(SETTINGS))
        self.total_steps = total_steps
        self.step = 0
        self.state = state
        self.lock = DriverLock(self.folder)
        self.write_status()
        self.log.write(events.settings(0, self.settings), events.state("running", 0))

    def write_status(self, reason: str = "") -> None:
        """Replace status.json by the state of this object."""
        now = time.time()
        write_status(
            self.folder,
            {
                "state": self.state,
                "step": self.step,
                "total_steps": self.total_steps,
                "pid": os.getpid(),
                "process_started": psutil.Process().create_time(),
                "host": socket.gethostname(),
                "heartbeat": now,
                "started": now - 14 * self.step,
                "reason": reason,
                "settings": self.settings,
                "run": self.folder.name,
            },
        )

    def take_steps(self, count: int) -> None:
        """Record steps whose curves are known: reward/mean is step / 100, kl/per_token is step / 1000."""
        for _ in range(count):
            self.step += 1
            n, now = self.step, time.time()
            wave = math.sin(n / 3)
            values = {
                "reward/mean": n / 100,
                "reward/sentiment": n / 50 + wave / 10,
                "reward/brevity": -n / 80,
                "reward/latency_ms": 3.1,
                "kl/per_token": n / 1000,
                "rollout/response_length": 24 - n / 10 + wave,
                "rollout/throughput_tokens_per_sec": 310 + 20 * wave,
                "rollout/entropy": 2.9 - n / 60,
                "train/policy_loss": wave / 40,
                "train/grad_norm": 1.2 + wave / 2,
                "train/step_time_ms": 13_800 + 300 * wave,
                "memory/process_rss_mb": 2150.0,
            }
            spans = [
                Span("rollout", now, 8.6),
                Span("actor", now, 8.4),
                Span("sentiment", now + 8.4, 0.1),
                Span("update", now + 8.6, 5.1),
            ]
            responses = [f" a joy from the first scene to the last, number {i} of step {n}." for i in range(8)]
            path = write_rollouts(
                self.folder,
                n,
                {
                    "prompt": ["The film was"] * 8,
                    "response": responses,
                    "reward": [0.9 - i / 5 for i in range(8)],
                    "reward/sentiment": [0.8 - i / 5 for i in range(8)],
                    "finish_reason": ["stop", "length"] * 4,
                },
            )
            self.log.write(
                events.metrics(StepMetrics(n, values)),
                events.spans(n, spans),
                events.rollouts(n, self.folder.relative(path), 8),
            )
        self.write_status()

    def answer(self, kind: str, args: Mapping[str, Any], status: Any, reason: str = "", source: str = "cli") -> None:
        """Record a request that was answered."""
        self.log.write(events.request(f"r{time.time_ns()}", kind, dict(args), status, self.step, reason, source))

    def serve(self) -> "Serving":
        """A context manager within which requests are answered and the driver lock is held."""
        return Serving(self)


class Serving:
    """The thread of a stand-in driver."""

    def __init__(self, run: FakeRun) -> None:
        self.run = run
        self.requests: list[tuple[str, dict[str, Any], str]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> "Serving":
        self.run.lock.acquire()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()
        self.run.lock.release()

    def _loop(self) -> None:
        reader = ControlReader(self.run.folder)
        while not self._done.wait(0.02):
            for line in reader.poll():
                self.requests.append((line.kind, line.args, line.source))
                try:
                    self._apply(line.kind, line.args)
                except RlkitError as error:
                    answer = events.request(
                        line.id, line.kind, line.args, "refused", self.run.step, str(error), line.source
                    )
                else:
                    answer = events.request(line.id, line.kind, line.args, "applied", self.run.step, "", line.source)
                self.run.log.write(answer)
                self.run.write_status()

    def _apply(self, kind: str, args: dict[str, Any]) -> None:
        states = {"pause": "paused", "resume": "running", "stop": "stopped"}
        if kind == "set":
            unknown = set(args) - set(self.run.settings)
            if unknown:
                raise RlkitError(f"there is no live setting {sorted(unknown)[0]!r}")
            for name, value in args.items():
                if isinstance(value, dict):
                    self.run.settings[name].update(value)
                else:
                    self.run.settings[name] = value
        elif kind == "step":
            self.run.take_steps(int(args.get("n", 1)))
        elif kind in states:
            self.run.state = states[kind]
