"""How weights of this process enter vLLM's model: a weight-transfer engine of our own, registered with vLLM's.

The first checkpoint is loaded as vLLM loads any (its layerwise reload and the loaders of its model). Where that turns
out to be a plain copy, later ones are copied straight into the engine's parameters (`direct_copy`), which stay at their
addresses: CUDA graphs hold them, and sleeping takes and gives the memory under them.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.engines.budget import is_out_of_memory
from rlkit.errors import GenerationError
from rlkit.generation.vllm.direct_copy import DirectCopy, prove
from rlkit.generation.weights import Checkpoint

__all__ = ["copied_directly", "register_transfer", "update_ended", "used_as_loaded", "worker_of"]

_NAME = "rlkit-same-process"
_PLAIN = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
"""Ways to compute with a weight that keep nothing but the weight (off the CPU)."""


@cache
def register_transfer() -> str:
    """Makes the transfer within this process known to vLLM; returns its name there."""
    from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    @dataclass
    class Nothing(WeightTransferInitInfo):  # type: ignore[misc]
        """There is nobody to meet."""

    @dataclass
    class Weights(WeightTransferUpdateInfo):  # type: ignore[misc]
        weights: Iterable[tuple[str, Tensor]]

    class SameProcess(WeightTransferEngine):  # type: ignore[misc]
        """Loads tensors of this process, wherever they are."""

        init_info_cls = Nothing
        update_info_cls = Weights
        model: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._expected = {name for name, _ in self.model.named_parameters()}
            self._direct: DirectCopy | None = None
            self._may_be_direct = True
            self._loading: Any = None
            self.last_was_direct = False

        def init_transfer_engine(self, init_info: Nothing) -> None:
            """Nothing to set up."""

        def start_weight_update(self) -> None:
            """What has to be set up depends on the weights."""
            self._loading, self.last_was_direct = None, False

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":  # which has nothing to wait for, and no such call
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: Weights) -> None:
            weights = update_info.weights
            if self._direct is not None and isinstance(weights, Checkpoint) and self._direct(weights):
                self.last_was_direct = True
                return
            self._direct, self._loading = None, weights
            initialize_layerwise_reload(self.model)
            try:
                loaded = self.model.load_weights(iter(weights))
            except BaseException:  # layers keep what they have been given, and another pass would build on it
                finalize_layerwise_reload(self.model, self.model_config)
                raise
            if loaded is not None and (missing := sorted(self._expected - set(loaded))):
                raise GenerationError(
                    f"the trainer's model has no weights for {len(missing)} of vLLM's parameters, first {missing[0]!r}"
                )

        def finish_weight_update(self) -> None:
            weights, self._loading = self._loading, None
            if weights is None:
                return
            finalize_layerwise_reload(self.model, self.model_config)
            head: Any = getattr(self.model, "lm_head", None)
            if self.device.type == "cpu" and hasattr(head, "quant_method"):
                # A head tied to the embedding gets no weights of its own, but its packed copy must follow.
                head.quant_method.process_weights_after_loading(head)
            if self._may_be_direct and isinstance(weights, Checkpoint):
                self._direct = self._proven(weights)
                self._may_be_direct = self._direct is not None

        def _proven(self, weights: Checkpoint) -> DirectCopy | None:
            """A direct copy that has been tried once, so that it is ready; None where there is none, or no memory."""
            if not used_as_loaded(self.model):
                return None
            packed = getattr(self.model, "packed_modules_mapping", None) or {}
            try:
                direct = prove(dict(self.model.named_parameters()), packed, weights)
                return direct if direct is not None and direct(weights) else None
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                return None

        def shutdown(self) -> None:
            """The model must not live on because of its way in: what vLLM remembers of each layer in order to reload it
            is found by weak references to the layer and refers to the layer itself."""
            for layer in self.model.modules() if self.model is not None else ():
                LAYERWISE_INFO.pop(layer, None)
            self.model = self._default_model = self._direct = self._loading = None

        @staticmethod
        def trainer_send_weights(iterator: Iterator[tuple[str, Tensor]], trainer_args: Any) -> None:
            """As 0.26 has it: one update of `trainer_args["llm"]`, between its start and finish."""
            trainer_args["llm"].update_weights({"update_info": {"weights": iterator}})

    WeightTransferEngineFactory.register_engine(_NAME, SameProcess)
    return _NAME


def used_as_loaded(model: nn.Module) -> bool:
    """Whether vLLM's model computes with its parameters themselves, and keeps nothing that was made from them.

    What it may keep: quantised or packed weights (on the CPU even of plain layers), the absorbed products of latent
    attention, attention sinks in another dtype. After a direct copy these would be those of the old weights.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in _PLAIN:
            return False
        linear = torch.nn.functional.linear
        if getattr(module, "cpu_linear", linear) is not linear:
            return False
        if hasattr(module, "process_weights_after_loading"):
            plain = type(module).__name__ == "Attention"
            if not plain or getattr(getattr(module, "impl", None), "sinks", None) is not None:
                return False
    return True


@contextlib.contextmanager
def update_ended(llm: Any) -> Iterator[None]:
    """An update of a `vllm.LLM` that breaks off is over: vLLM would refuse every later one."""
    try:
        yield
    except BaseException:
        worker = worker_of(llm)
        if hasattr(worker, "_weight_update_active"):
            worker._weight_update_active = False
        raise


def worker_of(llm: Any) -> Any:
    """The part of a `vllm.LLM` in this process that holds the model; None where it is missing."""
    place = llm
    for name in ("llm_engine", "model_executor", "driver_worker", "worker"):
        place = getattr(place, name, None)
    return place


def copied_directly(llm: Any) -> bool:
    """Whether the last weights of a `vllm.LLM` went straight into its parameters."""
    engine = getattr(worker_of(llm), "weight_transfer_engine", None)
    return bool(getattr(engine, "last_was_direct", False))
