"""Runs a dataflow on a batch."""

from rlkit.pipeline.failures import StageError
from rlkit.pipeline.pipeline import Pipeline, SpanTracker

__all__ = ["Pipeline", "SpanTracker", "StageError"]
