"""How many scalars per second reach a run folder, and what tracking costs a step.

    python benchmarks/metrics_throughput.py [--steps 2000] [--scalars 40] [--adds 10]

One step here is what a trainer does: `adds` values per metric and a few spans go into the tracker, which is flushed;
the journal writes the metrics and the spans (and, in the second table row, 16 rollouts) to the run folder. Median of
five rounds on one core; processor time is what counts on a machine that others use too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from rlkit.metrics import MetricsTracker
from rlkit.runs.journal import Journal
from rlkit.runs.layout import RunFolder
from rlkit.runs.protocol import StepResult
from rlkit.runs.reader import RunReader

ROUNDS = 5
B = 16


def record(folder: RunFolder, steps: int, scalars: int, adds: int, *, rollouts: bool) -> tuple[float, float]:
    """Seconds of wall-clock and of processor time to track and record `steps` steps of `scalars` metrics each."""
    names = [f"area_{number % 5}/metric_{number}" for number in range(scalars)]
    columns = {
        "prompt": ["The film was"] * B,
        "response": [" a joy from the first scene to the last, and the sound was good too."] * B,
        "reward": [0.5] * B,
        "response_length": [24] * B,
    }
    tracker, journal = MetricsTracker(), Journal(folder)
    began = time.perf_counter(), time.process_time()
    for step in range(1, steps + 1):
        for name in names:
            for count in range(adds):
                tracker.add(name, 0.25, count + 1)
        for stage in ("rollout", "actor", "reward", "update"):
            with tracker.span(stage):
                pass
        reduced = tracker.flush(step)
        journal.put_step(StepResult(step, reduced.metrics, reduced.spans, columns if rollouts else {}))
        journal.flush()
    journal.close()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def measure(steps: int, scalars: int, adds: int, *, rollouts: bool) -> tuple[float, float]:
    """Wall-clock and processor seconds for all steps, median of the rounds."""
    rounds = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as name:
            folder = RunFolder(Path(name))
            folder.config.write_text("{}")
            folder.status.write_text("{}")
            rounds.append(record(folder, steps, scalars, adds, rollouts=rollouts))
            assert RunReader(name).metrics().shape == (steps, scalars)
    wall, processor = (statistics.median(column) for column in zip(*rounds, strict=True))
    return wall, processor


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=2000, help="steps to record")
    parser.add_argument("--scalars", type=int, default=40, help="metrics in a step")
    parser.add_argument("--adds", type=int, default=10, help="values added per metric and step")
    options = parser.parse_args()
    print(f"{options.scalars} metrics a step, {options.adds} values added to each")
    print(f"{'recorded':<24}{'clock':<12}{'scalars/s':>12}{'ms a step':>12}")
    for label, rollouts in (("metrics and spans", False), (f"and {B} rollouts", True)):
        steps = options.steps if not rollouts else max(1, options.steps // 5)
        measured = measure(steps, options.scalars, options.adds, rollouts=rollouts)
        for clock, seconds in zip(("wall", "processor"), measured, strict=True):
            rate = steps * options.scalars / seconds
            print(f"{label:<24}{clock:<12}{rate:>12,.0f}{1e3 * seconds / steps:>12.3f}")


if __name__ == "__main__":
    main()
