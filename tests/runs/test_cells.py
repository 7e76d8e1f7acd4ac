"""Launching as a notebook does: everything defined in `__main__`, no usable stdout, then the kernel dies."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit.runs.handle import attach
from tests.runs.toys import repository, wait_for

CELLS = """
import signal, sys, time
sys.path.insert(0, {repository!r})

class NoFile:
    def write(self, text): return sys.__stdout__.write(text)
    def flush(self): sys.__stdout__.flush()
    def fileno(self): raise OSError("this stream has no file number")

sys.stdout = NoFile()
from helper import shout
from rlkit.runs.launch import launch
from rlkit.runs.protocol import StepResult
from tests.runs.toys import PlainTrainer

bonus = 100

def reward(response):
    return bonus + len(shout(response))

class CellTrainer(PlainTrainer):
    "Defined in a cell."
    def describe(self):
        return {{"algorithm": "cell"}}

trainer = CellTrainer(reward=reward)
trainer.step()
bonus = 200
run = launch(trainer, "runs/exp")
del bonus, reward, CellTrainer
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
print("started", flush=True)
while True:
    time.sleep(1)
"""


@pytest.fixture
def notebook(tmp_path: Path):
    (tmp_path / "helper.py").write_text("def shout(text):\n    return text + '!'\n")
    script = tmp_path / "kernel.py"
    script.write_text(CELLS.format(repository=str(repository())))
    with subprocess.Popen(
        [sys.executable, script.name],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    ) as kernel:
        yield kernel
        kernel.kill()
    status = attach(tmp_path / "runs" / "exp").status
    if status["alive"]:
        os.kill(status["pid"], signal.SIGKILL)


def test_a_run_outlives_interrupt_and_death_of_its_kernel(notebook: "subprocess.Popen[str]", tmp_path: Path):
    assert notebook.stdout is not None
    assert notebook.stdout.readline() == "started\n"
    run = attach(tmp_path / "runs" / "exp")
    assert run.config["algorithm"] == "cell"
    os.killpg(notebook.pid, signal.SIGINT)
    assert notebook.stdout.readline() == "interrupted\n"
    step = run.step_count
    wait_for(lambda: run.step_count > step + 3)
    os.killpg(notebook.pid, signal.SIGKILL)
    notebook.wait()
    step = run.step_count
    wait_for(lambda: run.step_count > step + 3)
    assert run.state == "running"
    run.stop()
    rewards = run.rollouts.dropna(subset="reward").set_index("step")["reward"]
    assert rewards[2] == 200 + 2 + 1  # the globals of the cell as they were at the start, the module next to it
    back = run.load()
    assert type(back).__name__ == "CellTrainer"
    assert back.step().step == run.step_count + 1
