"""The rollout engine beside a trainer: start, sleep, generation over ranks, weights."""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import nn

from lightrft.config import StrategyConfig
from lightrft.config.parts.machine import refused_adapters
from lightrft.engines.adapters import holds_adapters
from lightrft.engines.base import RolloutEngine
from lightrft.engines.factory import build_engine, engine_facts
from lightrft.engines.types import (
    Completion,
    EngineConfig,
    EngineStatus,
    GenerationRequest,
    SamplingParams,
    Vocabulary,
)
from lightrft.strategy.backend import NO_ENGINE, inner_module
from lightrft.strategy.distributed.collectives import group_rank, group_size, run_together
from lightrft.strategy.distributed.context import DistributedContext
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.distributed.failure_sharing import run_without_collective
from lightrft.strategy.distributed.process_groups import engine_group_ranks
from lightrft.strategy.engine.generation import (
    GenerationWork,
    GenLenAnalyser,
    PromptBatch,
    as_sampling_params,
    check_engine_type,
    engine_config,
)
from lightrft.strategy.weight_sync.canary import actor_canary, compute_dtypes, media_seen
from lightrft.strategy.weight_sync.parameter_source import (
    ParameterSource,
    adapters_of,
    checkpoint_module,
    engine_source,
    lent_base,
)
from lightrft.strategy.weight_sync.sync import MEGABYTE, WeightSync, WeightSyncReport

GENERATION_FAILED = "generation failed"
# Receives completions of this rank while others are sampled; must not raise.
OnFinished = Callable[[list[Completion]], None]
NOT_STARTED = "the engine did not start"


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Node of a rank, and the free memory there.

    Args:
        node: Identity of the node; the same for all processes of one running system.
        free_bytes, total_bytes: Memory of the rank's GPU; 0 without one.
    """

    node: str
    free_bytes: int = 0
    total_bytes: int = 0

    @classmethod
    def here(cls, *, has_gpu: bool) -> Self:
        """Return node and memory of this process."""
        boot = Path("/proc/sys/kernel/random/boot_id")
        node = f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}".strip()
        return cls(node, *(torch.cuda.mem_get_info() if has_gpu else ()))


def check_places(places: Sequence[NodeMemory], config: EngineConfig) -> None:
    """Refuse, on all ranks alike, an engine that could not start on one of them or would crawl.

    Args:
        places: Place of every rank, by rank.
        config: Configuration of the engine.

    Raises:
        ValueError: The ranks of an engine are on several nodes, or a GPU has too little memory
            left for vLLM's share; the message lists every such rank.
    """
    engines, _ = engine_group_ranks(len(places), config.tensor_parallel_size)
    for ranks in engines:
        nodes = sorted({places[rank].node.split(" ")[0] for rank in ranks})
        if len({places[rank].node for rank in ranks}) > 1:
            per_node = min(
                sum(place.node == places[rank].node for place in places) for rank in ranks
            )
            raise ValueError(
                f"engine_tp_size {config.tensor_parallel_size} puts ranks {ranks} of one engine on "
                f"several nodes ({', '.join(nodes)}), where each layer waits for the network: "
                f"expected a divisor of the {per_node} processes of a node"
            )
    share, needs_share = config.memory_utilization, engine_facts(config.engine_type).needs_share
    short = [
        f"rank {rank} has {place.free_bytes / 1e9:.1f} of {place.total_bytes / 1e9:.1f} GB"
        for rank, place in enumerate(places)
        if needs_share and place.free_bytes < share * place.total_bytes
    ]
    if short:
        raise ValueError(
            f"engine_mem_util {share:g} of a GPU must be free when the {config.engine_type} engine "
            f"starts: {'; '.join(short)} left; lower engine_mem_util, divide the model over more "
            "ranks (--fsdp, or --zero_stage 3), or end what else uses the GPU"
        )


class EngineSession:
    """One engine and the ranks that use it; created without an engine.

    Args:
        training: Started training.
        context: These ranks on separate process groups, so that rollouts and training never wait
            for each other in a collective. Weight syncs use the groups of training.
        config: Options of the strategy.

    Attributes:
        genlen_analyser: Collector of generation lengths.
        num_calls: Calls of `gather_and_generate` that succeeded.
        weight_sync: Sender of weights to the engine; made at the first update.
        last_weight_sync: Report of the last update.
    """

    def __init__(
        self, training: DistributedContext, context: DistributedContext, config: StrategyConfig
    ) -> None:
        self._training = training
        self._config = config
        self.context = context
        self.genlen_analyser = GenLenAnalyser(
            plot_every=config.plot_every, log_dir=config.log_dir, group=self.context.world_group
        )
        self.num_calls = 0
        self._work = GenerationWork()
        self.engine = None
        self._end_loan: Callable[[], None] = lambda: None  # of weights that the engine lends
        self._next_request_id = 0
        self.last_weight_sync: WeightSyncReport | None = None

    @property
    def engine(self) -> RolloutEngine | None:
        """The engine, or None."""
        return self._engine

    @engine.setter
    def engine(self, engine: RolloutEngine | None) -> None:
        self._engine = engine
        self._has_adapters: bool | None = None  # not asked yet
        self.weight_sync: WeightSync | None = None

    @property
    def running(self) -> RolloutEngine:
        """The engine.

        Raises:
            NotImplementedError: There is none.
        """
        if self._engine is None:
            raise NotImplementedError(NO_ENGINE)
        return self._engine

    @property
    def status(self) -> EngineStatus:
        """Status of the engine; SLEEPED without one."""
        return EngineStatus.SLEEPED if self._engine is None else self._engine.status

    @property
    def shares_engine(self) -> bool:
        """Return whether this rank's engine spans several ranks, which then generate together."""
        return (
            self._engine is not None
            and group_size(self.context.engine_group) > 1
            and engine_facts(self._engine.name).spans_ranks
        )

    def start(
        self,
        config: StrategyConfig,
        engine_type: str,
        actor: nn.Module | None,
        vocabulary: Vocabulary | None = None,
        read: Callable[[], ParameterSource] | None = None,
    ) -> RolloutEngine:
        """Start an engine; if one rank cannot, all end. See `StrategyBase.setup_inference_engine`.

        Args:
            config, engine_type: Configuration and kind of the engine.
            actor: Actor, or None.
            vocabulary: Tokens that are sampled and that end completions; None if unknown.
            read: Function that returns the actor's parameters. Frozen ones use the storage of an
                engine that keeps them beside adapters.

        Raises:
            RuntimeError: Another rank could not start its engine. The failing rank raises its
                original error.
        """
        kind = check_engine_type(engine_type)
        module = None if actor is None else checkpoint_module(actor)
        adapters = adapters_of(actor, config, kind)
        if kind != config.engine_type:
            self.context.print(
                f"engine type is {kind} (the configuration said {config.engine_type})"
            )
        self._config.engine_type = kind
        wanted = engine_config(config, kind, has_gpu=self.context.has_gpu, module=module)
        refusal = adapters and refused_adapters(kind, are_packed=bool(adapters.packed))
        if refusal:
            raise ValueError(refusal)
        wanted = replace(wanted, vocabulary=vocabulary or Vocabulary(), adapters=adapters)
        if config.engine_tp_size > wanted.tensor_parallel_size:
            self.context.print(
                f"the {kind} engine is not tensor-parallel: engine_tp_size "
                f"{config.engine_tp_size} only forms groups, each rank generates its own prompts"
            )
        self.close()
        keeps_base = adapters is not None and engine_facts(kind).has_own_memory
        with (
            phase("start the inference engine", self.context.timeout),
            lent_base(
                actor if keeps_base else None, read, lambda *of: self.running.lend_weights(*of)
            ) as self._end_loan,
        ):
            self.context.free_memory()
            self._check_places(wanted)

            def build() -> None:
                self.engine = build_engine(wanted, module=module)

            # Engines of several ranks wait for each other inside, and vLLM does in any case.
            run_without_collective(build, self.context.world_group, what=NOT_STARTED)
        self.context.print_detail(f"{kind} engine: {self.running.runner_name}")
        return self.running

    def _check_places(self, config: EngineConfig) -> None:
        """Refuse an engine that could not start on one of the ranks; all of them raise."""
        # Before any of them is inside an engine, where the error could not reach it.
        here = partial(NodeMemory.here, has_gpu=self.context.has_gpu)
        places = run_together(here, self.context.world_group, what=NOT_STARTED)
        check_places(places, config)

    def close(self) -> None:
        """Close and forget the engine. Idempotent."""
        if self._engine is not None:
            self._end_loan()
            self._engine.close()
            self.engine = None

    def mark_stale(self, is_load: bool) -> None:
        """Mark the engine's weights as outdated; after a load, frozen ones may be others, too."""
        if self._engine is not None:
            self._engine.mark_stale("the trainer's weights changed since its last update")
        if is_load and self.weight_sync is not None:
            self.weight_sync.forget()

    def sleep(self, level: int) -> None:
        """Put an engine that is awake to sleep, if sleeping is enabled.

        Args:
            level: 1 keeps the weights on the host, 2 drops them.
        """
        if not self._config.enable_engine_sleep or self.status is EngineStatus.SLEEPED:
            return
        if self._holds_adapters:
            # No later sync sends the base.
            level = 1
        with phase("put the inference engine to sleep", self.context.timeout):
            self.running.sleep(level)
            self.context.free_memory()
        self.context.print_detail("Sleeped inference engine")

    def wake_up(self) -> None:
        """Wake a sleeping engine."""
        # No sync follows that would compare the base to which adapters are added.
        if self._wake_up() and self.weight_sync is not None and self._holds_adapters:
            self.weight_sync.check_resident()

    @property
    def _holds_adapters(self) -> bool:
        if self._has_adapters is None:
            self._has_adapters = holds_adapters(self.running.parameter_manifest())
        return self._has_adapters

    def _wake_up(self, tags: tuple[str, ...] | None = None) -> bool:
        """Wake a sleeping engine, or a part of it; return whether it slept."""
        if self._engine is None or self._engine.status is EngineStatus.WAKEUP:
            return False
        begin = time.monotonic()
        with phase("wake up the inference engine", self.context.timeout):
            # First, so that the engine can use the trainer's cached memory.
            self.context.free_memory()
            self._engine.wake_up(tags)
        if self.status is EngineStatus.WAKEUP:
            self.context.note_memory("after wakeup inference engine")
            took = time.monotonic() - begin
            self.context.print_detail(f"Finished {self._engine.name} wakeup, TIMECOST {took:.3f}")
        return True

    def update_weights(self, model: nn.Module, source: ParameterSource) -> WeightSyncReport:
        """Send weights to the engine; see `StrategyBase.update_engine_weights`.

        Args:
            model: Actor as the strategy prepared it.
            source: Parameters of the actor.
        """
        config = self._config
        if self.weight_sync is None:
            self.weight_sync = WeightSync(self.running, world=self._training.world_group)
        self.weight_sync.bucket_bytes = config.weight_bucket_mb * MEGABYTE
        self.weight_sync.verify = config.verify_weight_sync
        # The cache needs most memory, so it comes last, after buckets and gathered weights.
        self._wake_up(("weights",))
        with phase("update the engine's weights", self.context.timeout):
            module = inner_module(model)
            has_adapters = self._holds_adapters
            source = engine_source(module, source, has_adapters=has_adapters)
            canary = None
            if config.verify_weight_sync:
                canary = actor_canary(
                    model,
                    module,
                    dtypes=compute_dtypes(self.context.compute_dtype, self.running, source),
                    max_length=config.max_len,
                    device=self.context.device,
                    media=media_seen(self.running, self._training.world_group),
                    has_adapters=has_adapters,
                )
            report = self.weight_sync.sync(source, canary=canary, wake_cache=self._wake_up)
        self.context.print_detail(report.summary())
        self.last_weight_sync = report
        self._training.free_memory()
        return report

    def generate_local(
        self,
        requests: Sequence[GenerationRequest],
        sampling_params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[Completion]:
        """Generate on this rank's engine, without any communication of ours."""
        if not requests:
            return []
        begin, finishes = time.perf_counter(), list[tuple[float, int]]()

        def report(finished: list[Completion]) -> None:
            now = time.perf_counter() - begin
            finishes.extend((now, len(item.output_token_ids)) for item in finished)
            if on_finished is not None:
                on_finished(finished)

        completions = self.running.generate(requests, sampling_params, on_finished=report)
        self._work.add(finishes, time.perf_counter() - begin)
        return completions

    def take_work(self) -> GenerationWork:
        """Return the work of this rank's engine since the last call."""
        work, self._work = self._work, GenerationWork()
        return work

    def gather_and_generate(
        self,
        batch: PromptBatch,
        sampling_params: object,
        on_finished: OnFinished | None = None,
        *,
        sleep_engine: bool = True,
    ) -> list[Completion]:
        """Return completions of this rank's prompts; see `StrategyBase.gather_and_generate`.

        Raises:
            NotImplementedError: There is no engine.
            RuntimeError: Another rank failed; the message names it. The failing rank raises its
                original error, so every rank raises.
        """
        _ = self.running  # there is one
        self.wake_up()
        try:
            completions = self._gather_and_generate(batch, sampling_params, on_finished)
        finally:
            if sleep_engine:
                self.sleep(level=1)
        lengths = [len(completion.output_token_ids) for completion in completions]
        statistics = self.genlen_analyser.collect(
            lengths, self.num_calls, writes_files=self.context.is_rank_0()
        )
        if statistics is not None:
            self.context.print_detail(f"step {self.num_calls} generation lengths: {statistics}")
        self.num_calls += 1
        return completions

    def _gather_and_generate(
        self, batch: PromptBatch, sampling_params: object, on_finished: OnFinished | None
    ) -> list[Completion]:
        with phase("generate", self.context.timeout):
            world = self.context.world_group

            def check() -> tuple[int, bool]:
                as_sampling_params(sampling_params, self.running)
                return len(batch), batch.is_multimodal

            everyone = run_together(check, world, what=GENERATION_FAILED)
            before = sum(num_prompts for num_prompts, _ in everyone[: self.context.rank])
            first_id = self._next_request_id + before
            self._next_request_id += sum(num_prompts for num_prompts, _ in everyone)
            is_multimodal = any(has_media for _, has_media in everyone)
            completions: list[Completion] = []

            def generate() -> None:
                params = as_sampling_params(sampling_params, self.running)
                completions.extend(
                    self._generate(
                        batch,
                        params,
                        first_id,
                        is_multimodal=is_multimodal,
                        on_finished=on_finished,
                    )
                )

            together = run_without_collective if self.shares_engine else run_together
            together(generate, world, what=GENERATION_FAILED)
        return completions

    def _generate(
        self,
        batch: PromptBatch,
        params: SamplingParams,
        first_id: int,
        *,
        is_multimodal: bool,
        on_finished: OnFinished | None,
    ) -> list[Completion]:
        requests = partial(batch.requests, first_id, is_multimodal=is_multimodal)
        shares, group = self.shares_engine, self.context.engine_group
        gathered = run_together(requests, group, what=GENERATION_FAILED) if shares else [requests()]
        everyone = [request for part in gathered for request in part]
        local_rank = group_rank(group) if shares else 0
        if self.running.runs_on_every_rank or not shares:
            our_ids = {request.request_id for request in gathered[local_rank]}

            def report_own(finished: list[Completion]) -> None:
                if on_finished is not None:
                    on_finished([item for item in finished if item.request_id in our_ids])

            completions = self.generate_local(everyone, params, report_own)
        else:
            completions = run_together(
                lambda: self.generate_local(everyone, params) if local_rank == 0 else [],
                group,
                what=GENERATION_FAILED,
            )[0]
        expected = len(everyone) * params.n
        if len(completions) != expected:
            raise RuntimeError(
                f"the engine returned {len(completions)} completions, expected {expected} "
                "(prompts times n)"
            )
        start = sum(len(part) for part in gathered[:local_rank]) * params.n
        return completions[start : start + len(gathered[local_rank]) * params.n]
