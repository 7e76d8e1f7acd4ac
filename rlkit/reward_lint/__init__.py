"""Reward lint: what is wrong with a reward, told from recorded rollouts, without a model or a GPU.

    report = rlkit.lint_rewards(run)                    # the recorded terms of a run
    report = rlkit.lint_rewards("runs/exp", my_reward)  # and a function that is still being written
    report.ok, report.table(), report                   # shown as a table in a cell

Loads no torch.
"""

from rlkit.reward_lint.lint import lint_rewards
from rlkit.reward_lint.report import Finding, LintReport

__all__ = ["Finding", "LintReport", "lint_rewards"]
