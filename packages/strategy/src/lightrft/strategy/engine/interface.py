"""The rollout engine beside the trainer: the part of a strategy that generates."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from lightrft.engines.types import EngineStatus
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.engine import multimodal
from lightrft.strategy.engine import session as engine_session
from lightrft.strategy.engine.session import EngineSession, PromptBatch, PromptItem
from lightrft.strategy.engine.statistics import GenLenAnalyser
from lightrft.strategy.model_preparation import ModelPreparation
from lightrft.strategy.weight_sync.parameter_source import checkpoint_module

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from torch.distributed import ProcessGroup

    from lightrft.engines.base import RolloutEngine
    from lightrft.engines.types import Completion
    from lightrft.strategy.prepared import AnyModel, Arguments
    from lightrft.strategy.strategy_base import StrategyBase
    from lightrft.strategy.weight_sync.sync import WeightSyncReport


class EngineInterface(ModelPreparation):
    """Engine methods; they need the groups that `StrategyBase` creates."""

    engine_mp_group: ProcessGroup | None

    def _start_session(self) -> None:
        """To be called once the engine groups exist."""
        self.inference_engine_type: str | None = None
        self.broadcast_manager: object | None = None
        self.last_weight_sync: WeightSyncReport | None = None
        self._profile_step = 0
        self._session = EngineSession(
            group=self._group_or_alone(self.engine_mp_group),
            world=self.world_group,
            free_memory=self.sync_and_clear_cache,
        )
        self.genlen_analyser = GenLenAnalyser(
            plot_every=self.config.plot_every, log_dir=self.config.log_dir, group=self.world_group
        )

    def close(self) -> None:
        """Closes the engine, and the process group if this strategy started it. Idempotent."""
        self._close_engine()
        super().close()

    def _close_engine(self) -> None:
        if self._session.engine is not None:
            self._session.engine.close()
            self._session.engine = None

    @property
    def inference_engine(self) -> RolloutEngine | None:
        """The rollout engine, or None before `setup_inference_engine`."""
        return self._session.engine

    @inference_engine.setter
    def inference_engine(self, engine: RolloutEngine | None) -> None:
        self._session.engine = engine
        self.inference_engine_type = None if engine is None else engine.name

    @property
    def inference_engine_status(self) -> EngineStatus:
        """Asleep or awake; SLEEPED without an engine."""
        return self._session.status

    def setup_inference_engine(
        self,
        args: Arguments | None,
        engine_type: str = "vllm",
        actor: AnyModel | None = None,
    ) -> RolloutEngine:
        """Starts the rollout engine; afterwards it sleeps if sleeping is enabled.

        An engine that was started before is closed first: two would not fit beside the model.

        Args:
            args: Settings of the engine; None takes the strategy's own.
            engine_type: "vllm", "sglang", "hf", "fake" or "auto". From here on the only one.
            actor: If given, its weights are sent at once.

        Raises:
            ValueError: Unknown `engine_type`, or no model is known.
        """
        from lightrft.engines.factory import build_engine

        config = self.config
        if args is not None and args is not self.args:
            config = StrategyConfig.from_args(args)
        kind = engine_session.check_engine_type(engine_type)
        if kind != config.engine_type:
            self.print(f"engine type is {kind} (the configuration said {config.engine_type})")
        self.config.engine_type = self.engine_type = kind
        module = None if actor is None else self._inner_model(actor)
        wanted = engine_session.engine_config(
            config, kind, has_gpu=self.device.type == "cuda", module=module
        )
        if config.engine_tp_size > wanted.tensor_parallel_size:
            self.print(
                f"the {kind} engine is not tensor-parallel: engine_tp_size "
                f"{config.engine_tp_size} only forms groups, each rank generates its own prompts"
            )
        self._close_engine()
        with phase("start the inference engine", self._timeout):
            engine = self._session.start(lambda: build_engine(wanted, module=module))
        self.inference_engine = engine
        if actor is not None:
            self.update_engine_weights(actor)
        self.maybe_sleep_inference_engine()
        return engine

    def _inner_model(self, model: AnyModel) -> nn.Module:
        """The Hugging Face model inside an actor or critic."""
        return checkpoint_module(self.unwrap_model(model))

    def maybe_sleep_inference_engine(self) -> None:
        """Puts the engine to sleep if there is one, sleeping is enabled and it is awake."""
        if not self.config.enable_engine_sleep:
            return
        self._sleep(level=1)

    def sleep_until_weight_sync(self) -> None:
        """The same where the next use of the engine is `update_engine_weights`.

        The engine drops its weights instead of copying them to the host (sleep level 2); it
        refuses to generate until they have been sent again.
        """
        if self.config.enable_engine_sleep:
            self._sleep(level=2)

    def _sleep(self, *, level: int) -> None:
        with phase("put the inference engine to sleep", self._timeout):
            slept = self._session.sleep(level)
        if slept:
            self.print("Sleeped inference engine")

    def wakeup_inference_engine(self) -> None:
        """Frees the trainer's cached memory, then wakes the engine if it sleeps."""
        self._wake(None)

    def _wake(self, tags: tuple[str, ...] | None) -> None:
        begin = time.monotonic()
        with phase("wake up the inference engine", self._timeout):
            slept = self._session.wake_up(tags)
        if slept and self._session.status is EngineStatus.WAKEUP:
            self.report_memory("after wakeup inference engine")
            took = time.monotonic() - begin
            self.print(f"Finished {self.inference_engine_type} wakeup, TIMECOST {took:.3f}")

    def engine_generate_local(
        self,
        sampling_params: object,
        prompt_token_ids: Sequence[PromptItem] | Sequence[int] | None = None,
        multi_modal_inputs: Sequence[Mapping[str, object]] | None = None,
    ) -> list[Completion]:
        """Generates on this rank's engine without gathering prompts.

        Args:
            sampling_params: `SamplingParams`, a mapping of its fields, or the engine's own object.
            prompt_token_ids: Token ids per prompt; a flat list of ids is one prompt.
            multi_modal_inputs: Items `{"prompt": text, "multi_modal_data": {"image": [...],
                "video": [...]}}`.

        Returns:
            Completions, prompt-major.

        Raises:
            ValueError: Neither or both inputs were given.
            NotImplementedError: There is no engine.
        """
        if prompt_token_ids is None and multi_modal_inputs is None:
            raise ValueError("Either prompt_token_ids or multi_modal_inputs must be provided.")
        if prompt_token_ids is not None and multi_modal_inputs is not None:
            raise ValueError(
                "Both prompt_token_ids and multi_modal_inputs can not be provided at the same time."
            )
        params = engine_session.as_sampling_params(sampling_params, self._session.engine)
        if multi_modal_inputs is not None:
            requests = engine_session.multimodal_requests(multi_modal_inputs, 0)
        else:
            requests = engine_session.text_requests(_as_prompts(prompt_token_ids or ()), 0)
        return self._session.generate_local(requests, params)

    @classmethod
    def _build_multimodal_inputs(
        cls,
        all_prompts: Sequence[str],
        all_images: Sequence[object] | None,
        images_num: Sequence[int] | None,
        all_videos: Sequence[object] | None,
        videos_num: Sequence[int] | None,
    ) -> list[dict[str, object]]:
        """Pairs prompts with images and videos; see `multimodal.build_multimodal_inputs`."""
        return multimodal.build_multimodal_inputs(
            all_prompts,
            images=all_images,
            images_num=images_num,
            videos=all_videos,
            videos_num=videos_num,
        )

    def gather_and_generate(
        self,
        sampling_params: object,
        all_prompt_token_ids: Sequence[PromptItem] | None = None,
        all_prompts: Sequence[str] | None = None,
        all_images: Sequence[object] | None = None,
        sleep_engine: bool = True,
        images_num: Sequence[int] | None = None,
        all_videos: Sequence[object] | None = None,
        videos_num: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Generates for the prompts of all ranks; each rank gets its own completions.

        Collective: every rank must call it, with lists that may differ in length and may be empty.
        Prompts are gathered within the group of ranks that share an engine. The engine is woken
        before and, with `sleep_engine`, put to sleep after, also if generation fails.

        Args:
            sampling_params: `SamplingParams`, a mapping of its fields, or the engine's own object.
            all_prompt_token_ids: Token ids (or `GenerationRequest`s), one per prompt.
            all_prompts: Prompts as text; needed with images or videos.
            all_images, all_videos: Nested (a list per prompt) or flat (cut by the counts).
            sleep_engine: Whether to put the engine to sleep afterwards (if enabled).
            images_num, videos_num: Media per prompt; inferred if None.

        Returns:
            This rank's completions, prompt-major: `n` consecutive ones for each prompt.

        Raises:
            NotImplementedError: There is no engine.
            ValueError, TypeError: This rank's arguments are wrong.
            RuntimeError: Another rank failed; the message names it. All ranks raise.
        """
        if self._session.engine is None:
            raise NotImplementedError("Inference engine is not initialized.")
        self.wakeup_inference_engine()
        batch = PromptBatch(
            all_prompt_token_ids, all_prompts, all_images, images_num, all_videos, videos_num
        )
        try:
            with phase("generate", self._timeout):
                completions = self._session.gather_and_generate(batch, sampling_params)
        finally:
            if sleep_engine:
                self.maybe_sleep_inference_engine()
        lengths = [len(completion.output_token_ids) for completion in completions]
        found = self.genlen_analyser.collect(
            lengths, self._profile_step, writes_files=self.is_rank_0()
        )
        if found is not None:
            self.print(f"step {self._profile_step} generation lengths: {found}")
        self._profile_step += 1
        return completions

    def update_engine_weights(self, actor: AnyModel) -> WeightSyncReport | None:
        """Sends the actor's weights to the engine, which is awake afterwards.

        Returns:
            What was sent and verified (also kept as `last_weight_sync`); None without an engine.

        Raises:
            RuntimeError: The engine does not hold the actor's weights; the message names them.
        """
        if self._session.engine is None:
            self.print("Skip update engine weights since inference engine is not initialized.")
            return None
        from lightrft.strategy.weight_sync.sync import sync_engine_weights

        # The cache needs most memory, so it comes last: buckets and gathered weights are gone then.
        self._wake(("weights",))
        with phase("update the engine's weights", self._timeout):
            report = sync_engine_weights(
                cast("StrategyBase", self),
                self._session.engine,
                actor,
                wake_cache=self.wakeup_inference_engine,
            )
        self.last_weight_sync = report
        self.sync_and_clear_cache()
        return report

    def _mark_engine_stale(self) -> None:
        """To be called by every `optimizer_step` that changed weights."""
        if self._session.engine is not None:
            self._session.engine.mark_stale("the trainer's weights changed since its last update")


def _as_prompts(items: Sequence[PromptItem] | Sequence[int]) -> list[PromptItem]:
    if items and all(isinstance(item, int) for item in items):
        return [cast("Sequence[int]", items)]
    return [cast("PromptItem", item) for item in items]
