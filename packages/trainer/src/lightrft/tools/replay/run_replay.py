"""`lightrft replay`: a comparison of a step's journals with the weights before it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from torch import nn

from lightrft.config import ConfigError, SamplingOptions, TrainConfig
from lightrft.config.files import typed
from lightrft.config.options import short
from lightrft.engines.media.families import placeholder_ids
from lightrft.models import load_tokenizer
from lightrft.models.loading import load_config
from lightrft.reporting.files import CONFIG_FILE, METRICS_FILE, JsonLines
from lightrft.rollout.environments.journal import JOURNAL_FOLDER, journal_path, sampling_facts
from lightrft.rollout.environments.journal_reading import Recorded, read_journal
from lightrft.rollout.sampler import training_params
from lightrft.stages.models import load_policy
from lightrft.strategy import get_strategy
from lightrft.strategy.backend import PreparedModel, WantedState
from lightrft.strategy.checkpoints.checkpoints import Checkpoints
from lightrft.tools.audit.record import named, read_record, recorded_steps
from lightrft.tools.replay.journal_rounds import Replay, replay_journal
from lightrft.tools.report.run_data import NotARunError

_NAME = re.compile(r"step-([0-9]{6,18})(?:\.batch-([0-9]{1,18}))?\..*")
_BATCHES = "dynamic/num_gen_batches"


def replay_run(run: Path, step: int | None) -> tuple[int, Replay]:
    """Sample the episodes of a step again, in this process alone.

    Args:
        run: Folder of the run.
        step: Step to replay; None takes the newest with a journal.

    Returns:
        The step and its replay.

    Raises:
        NotARunError: There is no such run or journal.
        ConfigError: The weights before the step do not exist, or did not sample it.
    """
    if not (run / CONFIG_FILE).is_file():
        raise NotARunError(f"{run} holds no run: {CONFIG_FILE} is missing")
    config = TrainConfig.load(run / CONFIG_FILE)
    config = replace(config, sp_size=1, engine_tp_size=1, fsdp=True, strict=False)
    step, journals = read_step(run, step, config)
    # Prompts and answers have marks where images were.
    marks = set(placeholder_ids(load_config(str(config.pretrain))))
    answers = (shown for each in journals for shown in each.observations.values())
    prompts = (ids for each in journals for ids in each.prompts.values())
    if any(map(marks.intersection, chain(prompts, (shown.token_ids for shown in answers)))):
        raise ConfigError(
            f"journals name images and do not hold them: step {step} of {run} has some, and only "
            "steps of text can be replayed"
        )
    tokenizer = load_tokenizer(str(config.pretrain), config)
    replay = Replay()
    with get_strategy(config) as strategy:
        actor = _prepared_actor(run, step, config, strategy.checkpoints)
        strategy.setup_inference_engine(config, config.engine_type, actor=actor)
        sync = strategy.session.update_weights(actor, strategy.parameter_source(actor))
        for recorded in journals:
            _check_weights(recorded, sync.engine_hash, step)
        generate = partial(strategy.gather_and_generate, sleep_engine=False)
        params = replace(training_params(config), n=1)
        for recorded in journals:
            replay_journal(
                recorded, params, config=config, tokenizer=tokenizer, generate=generate, into=replay
            )
    return step, replay


@dataclass(frozen=True, slots=True)
class _Header:
    """Fields of a journal's first line that a replay depends on."""

    step: int
    batch: int
    rank: int
    world_size: int
    sampling: list[float | None]
    environment: Mapping[str, object]
    weights: int = 0

    def __post_init__(self) -> None:
        if self.world_size < 1 or min(self.batch, self.rank) < 0:
            raise ValueError(f"it is of rank {self.rank} of {self.world_size}")
        if not isinstance(self.environment.get("schemas"), list):
            raise ValueError("its environment has no list of schemas")


def read_step(run: Path, step: int | None, config: SamplingOptions) -> tuple[int, list[Recorded]]:
    """Return the journals of all ranks and batches of a step; None takes the newest.

    Raises:
        NotARunError: There are no journals, a rank's is missing, or one is damaged or was written
            with other options.
    """
    by_step: dict[int, list[Path]] = {}
    # A killed attempt may have left further batches of a step.
    num_batches = {
        number: count
        for number, entry in JsonLines(run / METRICS_FILE)
        if isinstance(count := entry.get(_BATCHES), int | float)
    }
    for path in sorted((run / JOURNAL_FOLDER).glob("step-*.jsonl")):
        match = _NAME.fullmatch(path.name)
        if match and int(match[2] or 0) < num_batches.get(int(match[1]), math.inf):
            by_step.setdefault(int(match[1]), []).append(path)
    if not by_step:
        raise NotARunError(
            f"{run} has no journal of a step: runs with --environment or --tools write them, but "
            "not with --stream_chunk"
        )
    step = max(by_step) if step is None else step
    if step not in by_step:
        raise NotARunError(
            f"--step: {run} has no journal of step {step}: expected one of "
            f"{', '.join(map(str, sorted(by_step)))}"
        )
    try:
        journals = [read_journal(path) for path in by_step[step]]
        headers = [
            typed(_Header, recorded.header, path, skips_unknown=True)
            for recorded, path in zip(journals, by_step[step], strict=True)
        ]
    except (ValueError, RecursionError, OSError) as error:
        raise NotARunError(f"{error}; replay another step with --step") from error
    _check_headers(headers, by_step[step], config)
    return step, journals


def _check_headers(
    headers: Sequence[_Header], paths: Sequence[Path], config: SamplingOptions
) -> None:
    """Raise a NotARunError unless the journals cover all ranks and match the options."""
    params = training_params(config)
    sampling = sampling_facts(params)
    world_size, num_batches = headers[0].world_size, 1 + max(each.batch for each in headers)
    places = {(header.batch, header.rank) for header in headers}
    for header, path in zip(headers, paths, strict=True):
        named = journal_path(path.parent, header.step, header.batch, header.rank)
        if named != path or header.world_size != world_size:
            raise NotARunError(
                f"{path} is that of rank {header.rank} of {header.world_size}, step {header.step}: "
                "it was moved or changed; replay another step with --step"
            )
        if header.sampling != sampling:
            settings = short(header.sampling)
            raise NotARunError(
                f"{path} was sampled with seed, temperature, top_p, top_k and min_p {settings}: "
                f"{CONFIG_FILE} says {sampling}; give the run's own {CONFIG_FILE}"
            )
    if len(places) != world_size * num_batches:
        wanted = ((batch, rank) for batch in range(num_batches) for rank in range(world_size))
        batch, rank = next(place for place in wanted if place not in places)
        path = journal_path(paths[0].parent, headers[0].step, batch, rank)
        raise NotARunError(
            f"{path} is missing: the step was sampled by {world_size} ranks, and without rank "
            f"{rank} it would be compared in part; replay another step with --step"
        )


def _prepared_actor(
    run: Path, step: int, config: TrainConfig, checkpoints: Checkpoints
) -> nn.Module:
    """Return the actor with the weights that sampled a step.

    They come from the start, an audit record or a checkpoint.
    """
    asked, step = step, max(1, step - config.rollout_lag)
    backend = checkpoints.training.backend
    with backend.init_model_context():
        actor = load_policy(str(config.pretrain), config)
    is_recorded = step > 1 and step in recorded_steps(run)
    if is_recorded:
        state = read_record(run, step).state("before", "actor")
        actor.load_state_dict(named(state, "weight"), strict=False)
    # Stored as in the run, or merged adapters would round otherwise.
    model = backend.prepare_model(actor, is_training=True)
    if step > 1 and not is_recorded:
        folder, tag = Path(config.checkpoint_dir) / "_actor", f"global_step{step - 1}"
        if not (folder / tag).is_dir():
            raise ConfigError(
                f"step {asked} was sampled with weights that are gone: train with --audit_every K, "
                f"or keep checkpoint {tag}; step 1 can always be replayed"
            )
        wanted = WantedState(optimizer=False, scheduler=False, rng=False)
        checkpoints.load(folder, tag, PreparedModel(model, None, None), wanted)
    return model


def _check_weights(recorded: Recorded, now: int, step: int) -> None:
    """Raise a ConfigError unless the engine holds the weights that sampled the journal."""
    before = recorded.header.get("weights")
    if before and now and now != before:
        raise ConfigError(
            f"the weights found for step {step} are not those that sampled it: their hashes are "
            f"{now % 2**64:016x} and {int(str(before)) % 2**64:016x}"
        )
