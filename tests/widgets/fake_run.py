"""A run folder that grows without a trainer: what a driver would write, with made-up curves.

`python -m tests.widgets.fake_run FOLDER --steps 200 --period 0.5` plays a whole run in real time, answering requests.
"""

import argparse
import math
import os
import random
import socket
import time
from pathlib import Path
from typing import Any

from rlkit.errors import RequestRefused
from rlkit.runs import events
from rlkit.runs.control import ControlLine, ControlReader, check_changes, send, step_count
from rlkit.runs.layout import DriverLock, RunFolder, write_atomic, write_status
from rlkit.runs.log import LineWriter, dump_line
from rlkit.runs.protocol import RunState, StepMetrics
from rlkit.runs.rollouts import write_rollouts

SPECS: dict[str, dict[str, Any]] = {
    "lr": {"type": "float", "min": 0.0, "max": 1.0, "doc": "Learning rate of the policy."},
    "kl_coef": {"type": "float", "min": 0.0, "max": 10.0, "doc": "Weight of the KL penalty."},
    "temperature": {"type": "float", "min": 0.01, "max": 5.0, "doc": "Sampling temperature."},
    "clip_low": {"type": "float", "min": 0.0, "max": 1.0, "doc": "Lower bound of the ratio's clipping."},
    "clip_high": {"type": "float", "min": 0.0, "max": 1.0, "doc": "Upper bound of the ratio's clipping."},
    "value_clip": {"type": "float", "min": 0.0, "max": None, "doc": "Clip range of the value loss."},
    "top_k": {"type": "int", "min": 0, "max": None, "doc": "Sample from this many tokens; 0 for all."},
    "reward_weights": {"type": "weights", "doc": "Weight of each reward term."},
}
PROMPTS = ("The film was", "My first day at the new job", "The soup arrived", "On the last evening of the trip")
ENDINGS = (
    " a quiet joy from its first minute to its last, and the two leads carried every scene they were given.",
    " fine, I suppose, although nobody told me where the door was and I stood in the rain for an hour.",
    " dreadful.",
    " better than anyone had promised: warm, bright, generous, and over far too soon for all of us.\nWe went again.",
)


class FakeRun:
    """Writes a run folder step by step.

    Args:
        directory: a new folder.
        total: steps the run was asked for.
        terms: names of the reward terms.
    """

    def __init__(self, directory: Path, total: int = 200, terms: tuple[str, ...] = ("sentiment", "brevity")) -> None:
        self.folder = RunFolder.create(directory)
        self.step = 0
        self.total = total
        self.state: RunState = "running"
        self.settings: dict[str, Any] = {"lr": 1e-6, "kl_coef": 0.05, "temperature": 1.0, "clip_low": 0.2}
        self.settings |= {"clip_high": 0.2, "value_clip": None, "top_k": 0}
        self.settings["reward_weights"] = {term: 1.0 / (1 + place) for place, term in enumerate(terms)}
        self.random = random.Random(7)
        write_atomic(self.folder.config, dump_line({"trainer": "PPOTrainer", "setting_specs": SPECS}))
        self.write_status()
        self.events = LineWriter(self.folder.events)
        self.events.write(events.settings(0, self.settings), events.state("running", 0))
        self.lock = DriverLock(self.folder)
        self.lock.acquire()
        self.requests = ControlReader(self.folder)

    def write_status(self, reason: str = "", age: float = 0.0) -> None:
        """Status as of `age` seconds ago."""
        status = {
            "state": self.state,
            "step": self.step,
            "total_steps": self.total,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "heartbeat": time.time() - age,
            "started": time.time(),
            "reason": reason,
            "settings": self.settings,
            "run": self.folder.name,
        }
        write_status(self.folder, status)

    def set_state(self, state: RunState, reason: str = "") -> None:
        self.state = state
        if state in ("stopped", "finished", "failed"):
            self.lock.release()
        self.events.write(events.state(state, self.step, reason))
        self.write_status(reason)

    def metrics(self) -> dict[str, float]:
        """Curves that look like training: rewards rise and level off, KL grows, entropy falls."""
        done = self.step / max(1, self.total)
        noise = self.random.gauss
        terms = {term: math.tanh(2.4 * done + 0.2 * place) - 0.4 for place, term in enumerate(self.weights)}
        terms = {term: value + noise(0, 0.06) for term, value in terms.items()}
        values = {f"reward/{term}": value for term, value in terms.items()}
        values["reward/mean"] = sum(self.weights[term] * value for term, value in terms.items())
        values |= {
            "kl/coef": self.settings["kl_coef"],
            "reward/std": 0.3 + abs(noise(0, 0.05)),
            "reward/latency_ms": abs(noise(12, 3)),
            "train/policy_loss": noise(0, 0.02) - 0.02 * done,
            "train/value_loss": 0.6 * math.exp(-3 * done) + abs(noise(0, 0.02)),
            "kl/per_token": 0.08 * done**0.7 + abs(noise(0, 0.004)),
            "train/entropy": 3.1 - 1.2 * done + noise(0, 0.05),
            "train/grad_norm": abs(noise(1, 0.3)),
            "train/lr": self.settings["lr"],
            "train/step_time_ms": 4100 + noise(0, 160),
            "rollout/throughput_tokens_per_sec": 1450 + noise(0, 60),
            "rollout/response_length": 42 - 14 * done + noise(0, 2),
            "memory/process_rss_mb": 2300 + 20 * done,
        }
        return values

    @property
    def weights(self) -> dict[str, float]:
        weights: dict[str, float] = self.settings["reward_weights"]
        return weights

    def take_step(self, extra: dict[str, float] | None = None, rows: int = 8) -> None:
        """One step: metrics, rollouts (none when `rows` is 0) and the status."""
        self.step += 1
        self.events.write(events.metrics(StepMetrics(self.step, self.metrics() | (extra or {}))))
        if rows:
            path = write_rollouts(self.folder, self.step, self.rollouts(rows))
            self.events.write(events.rollouts(self.step, self.folder.relative(path), rows))
        self.write_status()

    def rollouts(self, rows: int) -> dict[str, list[Any]]:
        pick = [self.random.randrange(len(ENDINGS)) for _ in range(rows)]
        terms = {f"reward/{term}": [round(self.random.uniform(-1, 1), 3) for _ in pick] for term in self.weights}
        mixed = [sum(self.weights[term] * terms[f"reward/{term}"][row] for term in self.weights) for row in range(rows)]
        return {
            "row": list(range(rows)),
            "group": [row // 4 for row in range(rows)],
            "prompt": [PROMPTS[(self.step + row // 4) % len(PROMPTS)] for row in range(rows)],
            "response": [ENDINGS[place] for place in pick],
            "reward": mixed,
            **terms,
            "response_length": [len(ENDINGS[place]) // 4 for place in pick],
            "finish_reason": ["length" if place == 1 else "stop" for place in pick],
            "policy_version": [self.step - 1] * rows,
            "advantage": [self.random.gauss(0, 1) for _ in pick],
        }

    def serve(self) -> int:
        """Answer the new requests as a driver does at a step boundary. Returns the steps asked for while paused."""
        steps = 0
        for line in self.requests.poll():
            status, reason = "applied", ""
            try:
                steps += self._apply(line)
            except RequestRefused as refusal:
                status, reason = "refused", str(refusal)
            answer = events.request(line.id, line.kind, line.args, status, self.step, reason, line.source)  # type: ignore[arg-type]
            self.events.write(answer)
            if line.kind == "set" and status == "applied":
                self.events.write(events.settings(self.step, self.settings))
            self.write_status()
        return steps

    def _apply(self, line: ControlLine) -> int:
        if line.problem:
            raise RequestRefused(line.problem)
        if line.kind == "set":
            check_changes(line.args, self.settings)
            for name, value in line.args.items():
                low, high = SPECS[name].get("min"), SPECS[name].get("max")
                if (low is not None and value < low) or (high is not None and value > high):
                    raise RequestRefused(f"{name} must lie in {low} to {high}; got {value}")
            weights = {**self.weights, **line.args.get("reward_weights", {})}
            self.settings = {**self.settings, **line.args, "reward_weights": weights}
        elif line.kind == "step":
            return step_count(line.args)
        elif line.kind != "checkpoint":
            states: dict[str, RunState] = {"pause": "paused", "resume": "running", "stop": "stopped"}
            self.set_state(states[line.kind])
        return 0

    def play(self, period: float) -> None:
        """Take the remaining steps in real time, one every `period` seconds, until the end or a stop."""
        while self.state in ("running", "paused") and self.step < self.total:
            owed = self.serve()
            if self.state == "running" or owed:
                for _ in range(max(1, owed)):
                    self.take_step()
            self.write_status()
            time.sleep(period if self.state == "running" else 0.05)
        if self.state == "running":
            self.set_state("finished")

    def ask(self, kind: str, **args: Any) -> str:
        """A request from elsewhere, as `run.set(...)` makes it."""
        return send(self.folder.root, kind, args, "python")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--done", type=int, default=0, help="steps taken at once, before real time begins")
    parser.add_argument("--period", type=float, default=0.5, help="seconds a step")
    given = parser.parse_args()
    run = FakeRun(given.folder, given.steps)
    for _ in range(given.done):
        run.take_step()
    run.play(given.period)
