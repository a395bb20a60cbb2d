"""Interface of rollout engines, and their shared code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightrft.engines.engine_weights import (
    EngineWeights,
    StaleEngineError as StaleEngineError,
    is_full_tensor,
)
from lightrft.engines.ledger import Ledger
from lightrft.engines.media.families import reads_media
from lightrft.engines.media.media import EncodedPrompt
from lightrft.engines.native_params import params_of_native
from lightrft.engines.rows import (
    FinishedRow,
    Limits,
    RequestedSample,
    completion_of,
    rows_of_requests,
)
from lightrft.engines.text import Text, context_tokens, end_of_sequence_ids
from lightrft.engines.types import (
    Completion,
    EngineConfig,
    EngineParameter,
    EngineStatus,
    GenerationRequest,
    SamplingParams,
)

if TYPE_CHECKING:
    from lightrft.engines.media.encoder import MediaReader
    from lightrft.kernels.weight_bucket.layout import WeightPiece

TAGS = ("weights", "kv_cache")
# Batches of finished rows with their samples.
FinishedRows = Generator[list[FinishedRow]]


class RolloutEngine(ABC):
    """Generator of completions whose weights a trainer replaces between calls.

    Subclasses start the backend and sample; they store weights in an `EngineWeights`.

    Weight updates are a transaction: `begin_weight_update`, any number of `load_weights`, then
    `finish_weight_update`, then `reset_caches`. Only then may `generate` be called again.

    Args:
        config: Settings of the engine.

    Attributes:
        name: Registry name ("hf", "vllm", "sglang").
        weights_version: Version of the weights in use; -1 before the first update. Set by
            `set_weights_version` after the caller has verified the update.
        status: Asleep or awake.
        ledger: Record of sampled tokens, while recording is on.
        seen_media: Last completed prompt with images or videos; None if there was none.
    """

    name: str
    # Whether all ranks of a tensor-parallel group must call `generate` (SPMD executors).
    runs_on_every_rank: bool = True
    # Whether it runs the trainer's model, so that logprobs can be compared with the trainer's.
    computes_model: bool = True

    # Whether `poll` returns completions while others are still being sampled, or all at once.
    streams: bool = False

    # Whether it takes images and videos, if the model does.
    reads_media: bool = False

    # Whether it always keeps the checkpoint's weights and adds adapters to them.
    keeps_base = False

    # Parameters whose storage the trainer uses.
    lent_names: frozenset[str] = frozenset()

    # Whether sleep must be enabled at the start.
    sleeps_on_request_only = False
    weights: EngineWeights

    def __init__(self, config: EngineConfig) -> None:
        self.status = EngineStatus.WAKEUP
        self.weights_version = -1
        self._stale_reason: str | None = None
        self._config = config
        self._dtype = config.torch_dtype
        self._text = Text(config.model_path)
        self._sleeping_tags: set[str] = set()
        # Completions that were submitted and not yet returned: their source, and their number.
        self._running: FinishedRows | None = None
        self._num_running = 0
        self._params = SamplingParams()
        self.ledger = Ledger()
        self.seen_media: EncodedPrompt | None = None

    @property
    @abstractmethod
    def native(self) -> object:
        """Object of the backend (a vLLM `LLM`, a transformers model, ...).

        Raises:
            RuntimeError: The backend was stopped.
        """

    @property
    def runner_name(self) -> str:
        """Name, for the log, of the code that runs the model, if a backend has several."""
        return type(self).__name__

    def params_of_native(self, native: object) -> SamplingParams | None:
        """Convert a backend's sampling parameters to ours; return None for other objects.

        Raises:
            ValueError: The object sets unsupported fields; the message names all of them.
        """
        return params_of_native(native)

    @abstractmethod
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Score a sequence at temperature 1.

        Returns:
            len(token_ids) fp32 logprobs; entry t scores token t after the tokens before it, entry
            0 is 0.
        """

    def layer_outputs(
        self, token_ids: Sequence[int], media: EncodedPrompt | None
    ) -> dict[str, torch.Tensor]:
        """Return the layers' outputs for one sequence.

        Args:
            token_ids: Tokens of the sequence.
            media: Prompt at its start, if that has images or videos.

        Returns:
            transformers' name of each layer -> its output; empty if the engine exposes none.
        """
        del token_ids, media
        return {}

    def set_weights_version(self, version: int) -> None:
        """Mark the weights as verified and usable under this version."""
        self.weights_version = version
        self._stale_reason = None

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model knows and samples."""
        return self._limits.vocab_size

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus completion, in tokens; None is unlimited."""
        return self._limits.max_model_len

    def mark_stale(self, reason: str) -> None:
        """Forbid `generate` until the next completed weight update."""
        self._stale_reason = reason

    def _read_limits(self, hf_config, generation_config) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        """Read vocabulary, longest sequence and end-of-sequence ids of a transformers model."""
        text_config = hf_config.get_text_config()
        vocabulary, num_rows = self._config.vocabulary, int(text_config.vocab_size)
        self.eos_ids = {*end_of_sequence_ids(hf_config, generation_config), *vocabulary.ends}
        self._limits = Limits(
            vocab_size=min(num_rows, vocabulary.num_tokens or num_rows),
            num_rows=num_rows,
            max_model_len=self._config.max_model_len or context_tokens(hf_config),
            engine_name=self.name,
            reads_media=self.reads_media and reads_media(hf_config),
        )

    def _take_over(self, module: nn.Module | None) -> None:
        """Load the weights of a module, if there is no checkpoint.

        A sharded module is left to the first weight update.
        """
        if self._config.model_path or module is None:
            return
        from lightrft.kernels.weight_bucket.layout import WeightPiece

        held = dict(module.named_parameters(remove_duplicate=False))
        pieces = []
        for parameter in self.parameter_manifest():
            tensor = held.get(parameter.name)
            if parameter.tied_to is not None:
                continue
            if tensor is None or not is_full_tensor(tensor, torch.Size(parameter.shape)):
                return
            flat = tensor.detach().reshape(-1).to(parameter.dtype)
            pieces.append(WeightPiece(parameter.name, parameter.shape, 0, flat))
        self.begin_weight_update()
        self.load_weights(pieces)
        self.finish_weight_update()
        self.reset_caches()

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling_params: SamplingParams,
        *,
        on_finished: Callable[[list[Completion]], None] | None = None,
    ) -> list[Completion]:
        """Sample completions, prompt-major: `n` consecutive completions for each request.

        Args:
            requests, sampling_params: Prompts and their sampling parameters.
            on_finished: Callback for each result of `poll`, before the rest is sampled.

        Raises:
            StaleEngineError: The weights are stale, or an update is open.
            RuntimeError: The engine sleeps, or requests are in progress.
            ValueError: A request is malformed; the message names its id.
            FloatingPointError: The model's logits are not finite.
        """
        self.submit(requests, sampling_params)
        completions: dict[tuple[int, int], Completion] = {}
        try:
            while finished := self.poll():
                completions |= {(item.request_id, item.sample_index): item for item in finished}
                if on_finished is not None:
                    on_finished(finished)
        finally:
            self.abort()
        samples = range(sampling_params.n)
        return [completions[request.request_id, index] for request in requests for index in samples]

    def submit(
        self, requests: Sequence[GenerationRequest], sampling_params: SamplingParams
    ) -> None:
        """Submit requests, whose completions `poll` returns; raise what `generate` raises.

        The engine accepts no other call until all are returned or aborted.
        """
        self.check_usable()
        rows = rows_of_requests(
            requests,
            sampling_params,
            self._limits,
            encode=self._encode,
            encode_media=self._encode_media,
        )
        self._check_params(sampling_params)
        if rows:
            self._running = self.stream_rows(rows, sampling_params)
            self._params, self._num_running = sampling_params, len(rows)

    def poll(self) -> list[Completion]:
        """Sample until some completions end, and return them; return [] once none are left.

        The completions are those of `generate`, in the order in which they end.

        Raises:
            StaleEngineError: The weights were changed since `submit`.
            RuntimeError: The engine ended with rows missing.
            FloatingPointError: The model's logits are not finite.
        """
        if self._running is None:
            return []
        params, version = self._params, self.weights_version
        try:
            self._check_weights()
            finished = next(self._running, [])
            if not finished:
                raise RuntimeError(
                    f"the {self.name} engine ended with {self._num_running} completions missing"
                )
            self._num_running -= len(finished)
            rows, raws = zip(*finished, strict=True)
            media = (row.media for row in rows if row.media is not None)
            self.seen_media = next(media, self.seen_media)
            self.ledger.append(rows, raws, version, params)
            return [completion_of(row, raw, params, version) for row, raw in finished]
        except BaseException:
            self._num_running = 0
            raise
        finally:
            if self._num_running == 0:
                self.abort()

    def abort(self) -> None:
        """Abort submitted requests that are not yet returned; do nothing if there are none."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _check_params(self, params: SamplingParams) -> None:
        """Raise a ValueError for parameters that this engine cannot sample."""
        if params.stop:
            self._text.load()

    def _encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text prompt."""
        return self._text.encode(text)

    @cached_property
    def _media(self) -> MediaReader:
        # Imported by the first request with media, since most runs are text only.
        from lightrft.engines.media.encoder import MediaReader

        return MediaReader(self._config.model_path, self.name, self._config.media)

    def _encode_media(self, request: GenerationRequest) -> EncodedPrompt | None:
        """Encode a text prompt with its images and videos."""
        return self._media.encode(request)

    @abstractmethod
    def stream_rows(self, rows: Sequence[RequestedSample], params: SamplingParams) -> FinishedRows:
        """Sample one completion for each row; yield batches of at least one finished row.

        When the generator is closed early, the backend drops the remaining rows.
        """

    def _stop_ids(self, params: SamplingParams) -> list[int]:
        """Return all ids that end a completion."""
        return sorted({*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids)})

    def sleep(self, level: int = 1) -> None:
        """Release memory. Level 1 keeps the weights on the host, level 2 drops them.

        Weights that alias the trainer's stay in place.

        Raises:
            ValueError: The level is neither 1 nor 2.
            RuntimeError: A weight update is open, or sleeping was disabled at the start.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level must be 1 or 2: got {level}")
        self._check_idle()
        if self.weights.is_open:
            raise RuntimeError(f"the {self.name} engine cannot sleep while a weight update is open")
        if self.sleeps_on_request_only and not self._config.enable_sleep:
            raise RuntimeError(
                f"the {self.name} engine was started without sleep; set enable_engine_sleep"
            )
        self._release_memory(level, [tag for tag in TAGS if tag not in self._sleeping_tags])
        self._fall_asleep(level)

    def _fall_asleep(self, level: int) -> None:
        self.weights.release(level)
        self._sleeping_tags = set(TAGS)
        self.status = EngineStatus.SLEEPED

    def _release_memory(self, level: int, awake: Sequence[str]) -> None:  # noqa: B027
        """Release the backend's memory; the parts in `awake` are resident."""

    def wake_up(self, tags: tuple[str, ...] | None = None) -> None:
        """Take memory back; the engine is awake once both tags, "weights" and "kv_cache", are.

        Raises:
            ValueError: A tag is unknown.
        """
        tags = TAGS if tags is None else tags
        unknown = sorted(set(tags) - set(TAGS))
        if unknown:
            raise ValueError(f"unknown wake-up tags {unknown}; known: {', '.join(TAGS)}")
        woken = [tag for tag in TAGS if tag in self._sleeping_tags and tag in tags]
        if woken:
            self._resume_memory(woken)
        if "weights" in woken:
            self.weights.restore()
        self._sleeping_tags -= set(woken)
        if not self._sleeping_tags:
            self.status = EngineStatus.WAKEUP

    def _resume_memory(self, tags: Sequence[str]) -> None:  # noqa: B027
        """Take the backend's memory back."""

    @property
    def weights_were_dropped(self) -> bool:
        """Return whether some parameter holds no weights, or no update was ever sent."""
        return self.weights_version < 0 or bool(self.weights.unwritten)

    def parameter_manifest(self) -> tuple[EngineParameter, ...]:
        """Return all parameters that the engine needs, under checkpoint names, in a fixed order."""
        return self.weights.manifest

    def begin_weight_update(self) -> None:
        """Open an update; `generate` raises until it is finished."""
        self._check_idle()
        self.weights.begin()

    def load_weights(self, pieces: Iterable[WeightPiece]) -> None:
        """Write pieces; a parameter may arrive in several pieces and in several calls.

        Raises:
            KeyError: A name is not in the manifest.
            ValueError: A shape or dtype differs from the manifest.
        """
        self.weights.load(pieces)

    def finish_weight_update(self) -> None:
        """Close the update (post-processing, repacking). Caches stay invalid until reset.

        Raises:
            ValueError: A parameter was written in part.
        """
        self.weights.finish()

    def reset_caches(self) -> None:
        """Drop every cached activation (prefix cache, encoder cache), which ends an update."""
        self.drop_caches()
        self.weights.reset_caches()

    def drop_caches(self) -> None:  # noqa: B027 - an engine may have no cache
        """Drop the backend's caches."""

    def hash_parameters(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Return the position-keyed 64-bit hash of verifiable parameters, from final storage.

        Args:
            names: Names of the parameters; None for all that can be read back.

        Returns:
            Checkpoint name -> signed 64-bit hash by `lightrft.kernels.hash_tensors`.
        """
        return self.weights.hashes(names)

    def alias_weights(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Use full tensors of the trainer as the engine's storage.

        Returns:
            Whether it did; False changes nothing: this engine cannot alias, or names, shapes,
            dtypes or devices disagree.
        """
        return self.weights.alias(tensors)

    def lend_weights(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device
    ) -> Mapping[str, torch.Tensor]:
        """Return storage of the engine that the trainer uses in place of tensors with such values.

        From then on it stays in place: sleep frees caches alone. `lent_names` are the names.

        Args:
            tensors: Checkpoint name -> full tensor of the trainer.
            device: Device where the trainer needs them.
        """
        del tensors, device
        return {}

    def shared_names(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Return names of the parameters whose storage in the engine is the trainer's.

        Args:
            tensors: Checkpoint name -> full tensor of the trainer.
        """
        return self.weights.shared_names(tensors)

    def check_usable(self) -> None:
        """Raise unless the engine is open, awake, idle, and holds a complete set of weights."""
        _ = self.native
        self._check_weights()
        self._check_idle()

    def _check_idle(self) -> None:
        if self._running is not None:
            raise RuntimeError(
                f"the {self.name} engine still samples {self._num_running} completions; "
                "poll() until it gives none, or abort()"
            )

    def _check_weights(self) -> None:
        self.weights.check_settled()
        if self._stale_reason is not None:
            raise StaleEngineError(
                f"the {self.name} engine must not generate: {self._stale_reason}; "
                "call strategy.update_engine_weights(actor) first"
            )
        if self.status is EngineStatus.SLEEPED:
            raise RuntimeError(f"the {self.name} engine sleeps; call wake_up() before generate()")

    def close(self) -> None:
        """Free the weights; `generate` raises from now on."""
        self.abort()
        self._fall_asleep(2)
