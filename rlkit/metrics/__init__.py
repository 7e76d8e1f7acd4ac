"""Metrics: collect (`tracker`), reduce (`reduce`), measure memory (`telemetry`) and send on (`rlkit.runs.sinks`)."""

from rlkit.metrics import telemetry
from rlkit.metrics.catalogue import METRICS, MetricInfo
from rlkit.metrics.reduce import Last, Max, Mean, Min, Rate, Reduction, Sum
from rlkit.metrics.tracker import MetricsTracker
from rlkit.runs.protocol import Span, StepMetrics

__all__ = [
    "METRICS",
    "Last",
    "Max",
    "Mean",
    "MetricInfo",
    "MetricsTracker",
    "Min",
    "Rate",
    "Reduction",
    "Span",
    "StepMetrics",
    "Sum",
    "telemetry",
]
