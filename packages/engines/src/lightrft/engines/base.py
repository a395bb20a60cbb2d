"""The interface every rollout engine implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from lightrft.engines.native_params import params_of_native
from lightrft.engines.types import (
    Completion,
    EngineParameter,
    EngineStatus,
    GenerationRequest,
    SamplingParams,
    WeightPiece,
)

if TYPE_CHECKING:
    import torch


class StaleEngineError(RuntimeError):
    """The engine was asked to generate while its weights are not those of the trainer."""


class RolloutEngine(ABC):
    """A generator of completions whose weights a trainer replaces between calls.

    Weight updates are a transaction: `begin_weight_update`, any number of `load_weights`, then
    `finish_weight_update`, then `reset_caches`. Only then may `generate` be called again.

    Attributes:
        name: The registry name ("hf", "fake", "vllm", "sglang").
        weights_version: Version of the weights in use; -1 before the first update. Set by
            `set_weights_version` after the caller has verified the update.
        status: Asleep or awake.
    """

    name: str
    runs_on_every_rank: bool = True
    """Whether all ranks of a tensor-parallel group must call `generate` (SPMD executors)."""
    computes_model: bool = True
    """Whether it computes the trainer's model, so that logprobs of the two can be compared."""

    def __init__(self) -> None:
        self.status = EngineStatus.WAKEUP
        self.weights_version = -1
        self._stale_reason: str | None = None

    @property
    @abstractmethod
    def native(self) -> object:
        """The backend's own object (a vLLM `LLM`, a transformers model, ...)."""

    @abstractmethod
    def generate(
        self, requests: Sequence[GenerationRequest], sampling_params: SamplingParams
    ) -> list[Completion]:
        """Samples completions, prompt-major: `n` consecutive completions for each request.

        Raises:
            StaleEngineError: The weights were changed behind the engine, or an update is open.
            RuntimeError: The engine sleeps.
            ValueError: A request is malformed; the message names its id.
        """

    def params_of_native(self, native: object) -> SamplingParams | None:
        """Our parameters from a backend's own object; None if it is no such object.

        Raises:
            ValueError: It sets what our completions cannot honour; the message names all of it.
        """
        return params_of_native(native)

    @abstractmethod
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Scores a given sequence at temperature 1.

        Returns:
            len(token_ids) fp32 logprobs; entry t scores token t given the tokens before it, entry
            0 is 0.
        """

    @abstractmethod
    def sleep(self, level: int = 1) -> None:
        """Releases memory. Level 1 keeps the weights on the host, level 2 drops them."""

    @abstractmethod
    def wake_up(self, tags: tuple[str, ...] | None = None) -> None:
        """Takes memory back; tags are "weights" and "kv_cache", None means all."""

    @property
    def weights_were_dropped(self) -> bool:
        """Whether frozen parameters, too, must be sent again (sleep level 2, restart)."""
        return self.weights_version < 0

    @abstractmethod
    def parameter_manifest(self) -> tuple[EngineParameter, ...]:
        """Every parameter the engine needs, in checkpoint names, in a fixed order."""

    @abstractmethod
    def begin_weight_update(self) -> None:
        """Opens an update; `generate` raises until it is finished."""

    @abstractmethod
    def load_weights(self, pieces: Iterable[WeightPiece]) -> None:
        """Writes pieces; a parameter may arrive in several pieces and in several calls.

        Raises:
            KeyError: A name is not in the manifest.
            ValueError: A shape or dtype differs from the manifest.
        """

    @abstractmethod
    def finish_weight_update(self) -> None:
        """Closes the update (post-processing, repacking). Caches stay invalid until reset."""

    @abstractmethod
    def reset_caches(self) -> None:
        """Drops every cached activation (prefix cache, encoder cache)."""

    @abstractmethod
    def hash_parameters(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """The position-keyed 64-bit hash of each verifiable parameter, read from final storage.

        Returns:
            Checkpoint name -> signed 64-bit hash as `lightrft.kernels.hash_tensor` defines it.
        """

    def alias_weights(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Shares the given full tensors as the engine's own storage.

        Returns:
            False if this engine cannot alias (nothing was changed).
        """
        del tensors
        return False

    def set_weights_version(self, version: int) -> None:
        """Declares the weights verified and usable under this version."""
        self.weights_version = version
        self._stale_reason = None

    def mark_stale(self, reason: str) -> None:
        """Forbids `generate` until the next completed weight update."""
        self._stale_reason = reason

    def check_usable(self) -> None:
        """Raises unless the engine is awake and holds a complete set of weights."""
        if self._stale_reason is not None:
            raise StaleEngineError(
                f"the {self.name} engine must not generate: {self._stale_reason}; "
                "call strategy.update_engine_weights(actor) first"
            )
        if self.status is EngineStatus.SLEEPED:
            raise RuntimeError(f"the {self.name} engine sleeps; call wake_up() before generate()")

    def close(self) -> None:  # noqa: B027 (an engine may have nothing to release)
        """Releases all resources; the engine must not be used afterwards."""
