"""What is learned from: prompts, preference pairs and graded tasks, read once and drawn in epochs that resume."""

from rlkit.data.prompts import OPENINGS, PromptRow, PromptSource

__all__ = ["OPENINGS", "PromptRow", "PromptSource"]
