"""Weights of an SGLang engine: updates in its own sessions, whole tensors at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from lightrft.engines.engine_weights import AssembledWeights
from lightrft.engines.sglang.backend import flattened
from lightrft.engines.types import EngineParameter

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine


class SGLangWeights(AssembledWeights):
    """Whole parameters, sent to the scheduler process.

    Args:
        engine: The started engine.
        manifest: Its parameters, in checkpoint names.
        engine_name: Names the engine in errors.
    """

    def __init__(
        self, engine: Engine, manifest: Sequence[EngineParameter], engine_name: str
    ) -> None:
        super().__init__(manifest, engine_name)
        self._engine = engine

    def _hand_over(self, tensors: dict[str, torch.Tensor]) -> None:
        if not self._is_updating:
            self._checked("begin_weight_update", self._engine.begin_weight_update)
            self._is_updating = True
        payload = flattened(list(tensors.items()))
        self._checked(
            "update_weights_from_tensor",
            lambda: self._engine.update_weights_from_tensor(
                [payload], load_format="flattened_bucket", flush_cache=False
            ),
        )

    def _end_update(self) -> None:
        self._checked("end_weight_update", self._engine.end_weight_update)

    def _checked(self, name: str, call: Callable[[], tuple[bool, str]]) -> None:
        """SGLang returns its failures."""
        is_ok, message = call()
        if not is_ok:
            raise RuntimeError(f"sglang refused {name}: {message}")

    def _stored_hashes(self, names: Sequence[str]) -> list[int]:
        """None: the weights lie in another process, in SGLang's own layout."""
        del names
        return []
