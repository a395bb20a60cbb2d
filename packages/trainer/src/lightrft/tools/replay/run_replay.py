"""`lightrft replay`: the weights before a step, and its journals against them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from lightrft.config import ConfigError, TrainConfig
from lightrft.engines.media.families import family_of
from lightrft.engines.types import Completion, GenerationRequest, SamplingParams
from lightrft.models import load_tokenizer
from lightrft.models.loading import load_config
from lightrft.reporting.files import CONFIG_FILE
from lightrft.rollout.environments.journal import JOURNAL_FOLDER, Recorded, read_journal
from lightrft.rollout.sampler import training_params
from lightrft.stages.policy.models import load_policy
from lightrft.strategy import get_strategy
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.tools.audit.record import named, read_record, recorded_steps
from lightrft.tools.replay.journal_rounds import Replay, replay_journal
from lightrft.tools.report.run_data import NotARunError


def replay_run(run: Path, step: int | None) -> tuple[int, Replay]:
    """Samples the episodes of a step again, in this one process.

    Args:
        run: Folder of the run.
        step: Which; None takes the newest with a journal.

    Returns:
        The step, and what was compared.

    Raises:
        NotARunError: There is no such run or journal.
        ConfigError: The weights before the step are not there, or not those that sampled it.
    """
    if not (run / CONFIG_FILE).is_file():
        raise NotARunError(f"{run} holds no run: {CONFIG_FILE} is missing")
    step, journals = _journals(run, step)
    config = replace(
        TrainConfig.load(run / CONFIG_FILE), sp_size=1, engine_tp_size=1, fsdp=True, zero_stage=0
    )
    family = family_of(load_config(str(config.pretrain)))
    if family is not None:
        raise ConfigError(
            f"journals name images and do not hold them: {run} trained a model of type "
            f"{family.model_type}, and only runs of models of text can be replayed"
        )
    tokenizer = load_tokenizer(str(config.pretrain), chat_template=config.chat_template)
    found = Replay()
    with get_strategy(config) as strategy:
        actor = _prepared_actor(run, step, config, strategy)
        strategy.setup_inference_engine(config, config.engine_type, actor=actor)
        strategy.update_engine_weights(actor)
        for recorded in journals:
            _check_weights(recorded, strategy, step)

        def generate(params: SamplingParams, requests: list[GenerationRequest]) -> list[Completion]:
            made: list[Completion] = strategy.gather_and_generate(
                params, requests, sleep_engine=False
            )
            return made

        params = replace(training_params(config), n=1)
        for recorded in journals:
            replay_journal(
                recorded, params, config=config, tokenizer=tokenizer, generate=generate, into=found
            )
    return step, found


def _journals(run: Path, step: int | None) -> tuple[int, list[Recorded]]:
    """The journals of all ranks and batches of a step."""
    folder = run / JOURNAL_FOLDER
    steps = sorted({int(path.name[5:11]) for path in folder.glob("step-*.jsonl")})
    if not steps:
        raise NotARunError(
            f"{run} has no journal of a step: runs with --environment or --tools write them"
        )
    if step is not None and step not in steps:
        raise NotARunError(
            f"--step: {run} has no journal of step {step}: expected one of "
            f"{', '.join(map(str, steps))}"
        )
    step = steps[-1] if step is None else step
    try:
        found = [read_journal(path) for path in sorted(folder.glob(f"step-{step:06d}.*jsonl"))]
    except ValueError as error:
        raise NotARunError(f"{error}; replay another step with --step") from error
    return step, found


def _prepared_actor(run: Path, step: int, config: TrainConfig, strategy: StrategyBase) -> nn.Module:
    """The actor with the weights before a step: of the start, of an audit, of a checkpoint."""
    with strategy.init_model_context():
        actor = load_policy(str(config.pretrain), config)
    if step > 1 and step in recorded_steps(run):
        state = read_record(run, step).state("before", "actor")
        actor.load_state_dict(named(state, "weight"), strict=False)
        return strategy.prepare_model(actor)
    model = strategy.prepare_model(actor)
    if step > 1:
        folder, tag = Path(config.checkpoint_dir) / "_actor", f"global_step{step - 1}"
        if not (folder / tag).is_dir():
            raise ConfigError(
                f"step {step} was sampled with weights that are gone: train with --audit_every K, "
                f"or keep checkpoint {tag}; step 1 can always be replayed"
            )
        strategy.load_ckpt(model, str(folder), tag, load_module_only=True)
    return model


def _check_weights(recorded: Recorded, strategy: StrategyBase, step: int) -> None:
    """Raises unless the engine holds the weights that sampled the journal."""
    sync, before = strategy.last_weight_sync, recorded.header.get("weights")
    if sync is not None and before and sync.engine_hash and sync.engine_hash != before:
        raise ConfigError(
            f"the weights found for step {step} are not those that sampled it: their hashes are "
            f"{sync.engine_hash % 2**64:016x} and {int(str(before)) % 2**64:016x}"
        )
