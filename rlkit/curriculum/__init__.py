"""Curricula: pools of prompts mixed stage by stage, by steps or by what was reached, live and resumable."""

from rlkit.curriculum.declaration import Curriculum
from rlkit.curriculum.source import CurriculumSource
from rlkit.curriculum.stages import Ramp, Reaches, Stage, Steps

__all__ = ["Curriculum", "CurriculumSource", "Ramp", "Reaches", "Stage", "Steps"]
