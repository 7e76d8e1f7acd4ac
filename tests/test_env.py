"""What importing rlkit does to the environment."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("before", "policy"),
    [("", "PASSIVE"), ("import os; os.environ['OMP_WAIT_POLICY'] = 'ACTIVE'; ", "ACTIVE"), ("import torch; ", "None")],
)
def test_threads_sleep_unless_the_user_or_torch_came_first(before: str, policy: str) -> None:
    unset, show = "import os; os.environ.pop('OMP_WAIT_POLICY', None); ", "print(os.environ.get('OMP_WAIT_POLICY'))"
    code = f"{unset}{before}import rlkit; {show}"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == policy
