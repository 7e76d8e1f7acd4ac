"""The graph of controllers: built, checked and drawn."""

from rlkit.dataflow.graph import Dataflow, Edge

__all__ = ["Dataflow", "Edge"]
