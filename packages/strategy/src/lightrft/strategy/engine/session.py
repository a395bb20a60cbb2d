"""The rollout engine's life beside a trainer: start, sleep and wake, generation over ranks."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from lightrft.engines.types import (
    Completion,
    EngineConfig,
    EngineStatus,
    GenerationRequest,
    MultiModalInputs,
    SamplingParams,
)
from lightrft.strategy.config import ENGINE_TYPES
from lightrft.strategy.distributed.collectives import Group, gather_objects, group_rank, group_size
from lightrft.strategy.engine.multimodal import build_multimodal_inputs, has_media, media_of

if TYPE_CHECKING:
    from torch import nn

    from lightrft.engines.base import RolloutEngine
    from lightrft.strategy.config import StrategyConfig

# Whether the ranks of a tensor-parallel group share one engine of this name. The embedded engines
# live in each rank alone, so each rank generates for its own prompts.
SHARED_BY_GROUP: dict[str, bool] = {"vllm": True, "sglang": True, "hf": False, "fake": False}

T = TypeVar("T")
PromptItem = Sequence[int] | GenerationRequest


def check_engine_type(engine_type: str) -> str:
    """Resolves "auto" and refuses unknown names.

    Raises:
        ValueError: No engine has this name.
    """
    from lightrft.engines.factory import ENGINES, resolve_engine_type

    known = {*ENGINE_TYPES, *ENGINES}
    if engine_type not in known:
        raise ValueError(f"Unsupported engine type: {engine_type}; known types: {sorted(known)}")
    return resolve_engine_type(engine_type)


def engine_config(
    config: StrategyConfig, engine_type: str, *, has_gpu: bool, module: nn.Module | None
) -> EngineConfig:
    """What the factory needs, from a strategy's configuration.

    Raises:
        ValueError: Neither a checkpoint directory (`pretrain`) nor a module is known.
    """
    if config.pretrain is None and module is None and engine_type != "fake":
        raise ValueError(
            f"the {engine_type} engine needs a model: set pretrain (a checkpoint directory) or "
            "pass actor= to setup_inference_engine"
        )
    is_shared = SHARED_BY_GROUP.get(engine_type, True)
    return EngineConfig(
        engine_type=engine_type,
        model_path=config.pretrain or "",
        dtype="bfloat16" if config.computes_in_bf16(has_gpu=has_gpu) else "float32",
        tensor_parallel_size=config.engine_tp_size if is_shared else 1,
        memory_utilization=config.engine_mem_util,
        max_model_len=config.max_len,
        seed=config.seed,
        enable_sleep=config.enable_engine_sleep,
        options=dict(config.engine_args or {}),
    )


def as_sampling_params(given: object, engine: RolloutEngine | None = None) -> SamplingParams:
    """Our `SamplingParams` from itself, a mapping of its field names or the engine's own object.

    Raises:
        ValueError: The mapping has unknown names, or the engine's object sets what cannot be used.
        TypeError: It is none of them.
    """
    if isinstance(given, SamplingParams):
        return given
    if not isinstance(given, Mapping):
        converted = None if engine is None else engine.params_of_native(given)
        if converted is not None:
            return converted
        raise TypeError(
            "sampling_params must be a lightrft.engines.SamplingParams or a mapping with its field "
            "names, or the engine's own object, got "
            f"{type(given).__module__}.{type(given).__qualname__}"
        )
    known = [entry.name for entry in dataclasses.fields(SamplingParams)]
    unknown = [str(name) for name in given if name not in known]
    if unknown:
        near = {name: difflib.get_close_matches(name, known, n=1) for name in unknown}
        hints = [f"{name} (did you mean {hit[0]}?)" if hit else name for name, hit in near.items()]
        raise ValueError(f"unknown sampling parameters: {', '.join(hints)}; known: {known}")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return dataclasses.replace(SamplingParams(), **values)  # type: ignore[arg-type]


def text_requests(items: Sequence[PromptItem], first_id: int) -> list[GenerationRequest]:
    """Requests from token ids or ready requests.

    Args:
        items: Lists of token ids, or requests, which keep their ids.
        first_id: Request id of the first bare list; the next ones follow.
    """
    return [
        item
        if isinstance(item, GenerationRequest)
        else GenerationRequest(tuple(int(t) for t in item), request_id=first_id + i)
        for i, item in enumerate(items)
    ]


def multimodal_requests(
    inputs: Sequence[Mapping[str, object]],
    first_id: int,
    token_ids: Sequence[PromptItem] | None = None,
) -> list[GenerationRequest]:
    """Requests from `{"prompt", "multi_modal_data"?}` items.

    Args:
        inputs: As `build_multimodal_inputs` makes them.
        first_id: Request id of the first item.
        token_ids: Token ids of the same prompts, if known.
    """
    requests = []
    for i, item in enumerate(inputs):
        ids = () if token_ids is None else token_ids[i]
        requests.append(
            GenerationRequest(
                prompt_token_ids=(
                    ids.prompt_token_ids if isinstance(ids, GenerationRequest) else tuple(ids)
                ),
                request_id=ids.request_id if isinstance(ids, GenerationRequest) else first_id + i,
                prompt_text=str(item["prompt"]),
                multi_modal=MultiModalInputs(media_of(item, "image"), media_of(item, "video")),
            )
        )
    return requests


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """The arguments of `gather_and_generate`: this rank's prompts in one of two forms.

    Args:
        token_ids: Token ids (or requests), one per prompt.
        texts: Prompts as text, needed with images or videos.
        images, images_num, videos, videos_num: See `build_multimodal_inputs`.
    """

    token_ids: Sequence[PromptItem] | None
    texts: Sequence[str] | None = None
    images: Sequence[object] | None = None
    images_num: Sequence[int] | None = None
    videos: Sequence[object] | None = None
    videos_num: Sequence[int] | None = None

    @property
    def is_multimodal(self) -> bool:
        """Whether this rank has any image or video."""
        return has_media(self.images) or has_media(self.videos)

    def __len__(self) -> int:
        for prompts in (self.token_ids, self.texts):
            if prompts is not None:
                return len(prompts)
        return 0

    def requests(self, first_id: int, *, is_multimodal: bool) -> list[GenerationRequest]:
        """This rank's requests; multimodal if any rank of the call has images or videos.

        Raises:
            ValueError: The needed form is missing, or counts do not agree.
        """
        if self.texts is not None and (is_multimodal or self.token_ids is None):
            if self.token_ids is not None and len(self.token_ids) != len(self.texts):
                raise ValueError(
                    "all_prompts and all_prompt_token_ids must have the same length: got "
                    f"{len(self.texts)} and {len(self.token_ids)}"
                )
            inputs = build_multimodal_inputs(
                self.texts,
                images=self.images,
                images_num=self.images_num,
                videos=self.videos,
                videos_num=self.videos_num,
            )
            return multimodal_requests(inputs, first_id, self.token_ids)
        if self.is_multimodal:
            raise ValueError("images and videos need all_prompts (the prompts as text)")
        if self.token_ids is None:
            raise ValueError("either all_prompt_token_ids or all_prompts must be given")
        return text_requests(self.token_ids, first_id)


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank tells the others before or after generating."""

    num_prompts: int = 0
    is_multimodal: bool = False
    error: str | None = None


class EngineSession:
    """One engine and its state; created without an engine.

    Args:
        group: Ranks that share one tensor-parallel engine.
        world: All ranks.
        free_memory: Waits for all ranks and frees cached device memory.
    """

    def __init__(self, *, group: Group, world: Group, free_memory: Callable[[], None]) -> None:
        self.engine: RolloutEngine | None = None
        self.group = group
        self.world = world
        self._free_memory = free_memory
        self._next_request_id = 0

    @property
    def rank(self) -> int:
        """This rank among all ranks."""
        return group_rank(self.world)

    @property
    def status(self) -> EngineStatus:
        """SLEEPED without an engine."""
        return EngineStatus.SLEEPED if self.engine is None else self.engine.status

    @property
    def shares_engine(self) -> bool:
        """Whether this rank's engine spans several ranks, which then generate together."""
        return (
            self.engine is not None
            and group_size(self.group) > 1
            and SHARED_BY_GROUP.get(self.engine.name, True)
        )

    def start(self, build: Callable[[], RolloutEngine]) -> RolloutEngine:
        """Builds the engine; a rank that cannot ends all of them with its message.

        Raises:
            RuntimeError: Another rank could not start its engine. The failing rank raises its own
                error.
        """
        problem: Exception | None = None
        engine: RolloutEngine | None = None
        try:
            engine = build()
        except Exception as err:  # noqa: BLE001 - shared with the other ranks, then raised
            problem = err
        self.gather_status(RankStatus(), problem, what="the engine did not start")
        if engine is None:
            raise RuntimeError("the engine did not start")
        return engine

    def sleep(self, level: int = 1) -> bool:
        """Puts an engine that is awake to sleep; returns whether it was.

        Args:
            level: 1 keeps the weights on the host, 2 drops them.
        """
        if self.engine is None or self.engine.status is EngineStatus.SLEEPED:
            return False
        self.engine.sleep(level)
        self._free_memory()
        return True

    def wake_up(self, tags: tuple[str, ...] | None = None) -> bool:
        """Wakes an engine that sleeps, or a part of it; returns whether it slept."""
        if self.engine is None or self.engine.status is EngineStatus.WAKEUP:
            return False
        # First, so that the trainer's cached memory is there for the engine.
        self._free_memory()
        self.engine.wake_up(tags)
        return True

    def generate_local(
        self, requests: Sequence[GenerationRequest], sampling_params: SamplingParams
    ) -> list[Completion]:
        """Generates on this rank's engine, without any communication of our own."""
        if self.engine is None:
            raise NotImplementedError("Inference engine is not initialized.")
        return self.engine.generate(requests, sampling_params) if requests else []

    def gather_and_generate(self, batch: PromptBatch, sampling_params: object) -> list[Completion]:
        """This rank's completions, prompt-major; see `StrategyBase.gather_and_generate`.

        Raises:
            RuntimeError: Another rank failed; the message names it. The failing rank raises its
                own error, so every rank raises.
        """
        if self.engine is None:
            raise NotImplementedError("Inference engine is not initialized.")
        problem: Exception | None = None
        params = SamplingParams()
        try:
            params = as_sampling_params(sampling_params, self.engine)
            if batch.token_ids is None and batch.texts is None:
                raise ValueError("either all_prompt_token_ids or all_prompts must be given")
        except (TypeError, ValueError) as err:
            problem = err
        statuses = self.gather_status(RankStatus(len(batch), batch.is_multimodal), problem)
        first_id = self._next_request_id + sum(a.num_prompts for a in statuses[: self.rank])
        self._next_request_id += sum(a.num_prompts for a in statuses)
        is_multimodal = any(a.is_multimodal for a in statuses)
        completions: list[Completion] = []
        try:
            completions = self._generate(batch, params, first_id, is_multimodal=is_multimodal)
        except Exception as err:  # noqa: BLE001 - shared with the other ranks, then raised
            problem = err
        self.gather_status(RankStatus(), problem)
        return completions

    def gather_status(
        self,
        own: RankStatus,
        problem: Exception | None,
        *,
        what: str = "generation failed",
    ) -> list[RankStatus]:
        """Hears all ranks; raises on every rank if one has a problem."""
        if problem is not None:
            own = dataclasses.replace(own, error=f"{type(problem).__name__}: {problem}")
        statuses = gather_objects(own, self.world)
        failed = [(rank, a.error) for rank, a in enumerate(statuses) if a.error is not None]
        if not failed:
            return statuses
        text = "; ".join(f"rank {rank}: {error}" for rank, error in failed)
        if problem is not None:
            problem.add_note(f"{what} on {text}")
            raise problem
        raise RuntimeError(f"{what} on {text}")

    def _generate(
        self,
        batch: PromptBatch,
        params: SamplingParams,
        first_id: int,
        *,
        is_multimodal: bool,
    ) -> list[Completion]:
        if not self.shares_engine:
            requests = batch.requests(first_id, is_multimodal=is_multimodal)
            return self._checked(self.generate_local(requests, params), len(requests) * params.n)
        gathered = self._gather_results(
            lambda: batch.requests(first_id, is_multimodal=is_multimodal)
        )
        everyone = [request for part in gathered for request in part]
        if self.engine is not None and self.engine.runs_on_every_rank:
            completions = self.generate_local(everyone, params)
        else:
            is_leader = group_rank(self.group) == 0
            answers = self._gather_results(
                lambda: self.generate_local(everyone, params) if is_leader else []
            )
            completions = answers[0]
        self._checked(completions, len(everyone) * params.n)
        own = group_rank(self.group)
        start = sum(len(part) for part in gathered[:own]) * params.n
        return completions[start : start + len(gathered[own]) * params.n]

    def _gather_results(self, produce: Callable[[], list[T]]) -> list[list[T]]:
        """Every group member's result; a failure of one is raised by all of them."""
        problem: Exception | None = None
        result: list[T] = []
        try:
            result = produce()
        except Exception as err:  # noqa: BLE001 - shared with the group, then raised
            problem = err
        error = None if problem is None else f"{type(problem).__name__}: {problem}"
        answers = gather_objects((result, error), self.group)
        if problem is not None:
            raise problem
        for member, (_, text) in enumerate(answers):
            if text is not None:
                raise RuntimeError(f"member {member} of the engine group failed: {text}")
        return [part for part, _ in answers]

    @staticmethod
    def _checked(completions: list[Completion], expected: int) -> list[Completion]:
        if len(completions) != expected:
            raise RuntimeError(
                f"the engine returned {len(completions)} completions, expected {expected} "
                "(prompts times n)"
            )
        return completions
