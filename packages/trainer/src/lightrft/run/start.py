"""The files of a run's folder before its first step and after its last."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from torch import nn

from lightrft.config import ConfigError, FolderOptions, RunControlOptions, TrainConfig
from lightrft.config.files import file_sha256
from lightrft.models import SequenceModel
from lightrft.models.varlen import KernelShape, KernelTrial, try_kernel
from lightrft.reporting.files import (
    CONFIG_FILE,
    START_FILE,
    STEP_FILES,
    SUMMARY_FILE,
    drop_steps_after,
    write_event,
    write_start,
)
from lightrft.run.loop import Loop
from lightrft.run.provenance import describe_models, run_hash
from lightrft.run.resume import Change, RunPlan, decided_options, describe_inputs
from lightrft.strategy.backend import inner_module
from lightrft.strategy.distributed.context import DistributedContext
from lightrft.strategy.optimizers import PlannedLR

LOCK_FILE = ".lock"
Batch = TypeVar("Batch")


def start_run(
    config: TrainConfig,
    loop: Loop[Batch],
    plan: RunPlan,
    stage: str,
    media: str = "",
    *,
    given: TrainConfig,
) -> int:
    """Continue from a checkpoint if that is the plan, and write the first files of the run.

    Lines of steps after the checkpoint are removed: these steps will run again.

    Args:
        config: Options of the run.
        loop, plan, stage: Loop, plan and stage of the run.
        media: Hash of the media of its rows.
        given: Options of the command; this start decided what differs in `config`.

    Returns:
        Steps from the checkpoint.
    """
    strategy = loop.strategy
    attention = describe_attention(strategy.context, loop.stage.models.main.model)
    if attention:
        strategy.print(f"attention: {attention}")
    resumed = plan.resumes and loop.load_checkpoint()
    num_steps = loop.state.num_steps
    rows = resume_rows(config, loop, plan.changes) if resumed else []
    if resumed:
        strategy.print(resume_table(config, num_steps, rows))
    if strategy.is_rank_0():
        folder = Path(config.output_dir)
        _of_any_folder(config).save(folder / CONFIG_FILE)
        inputs, models = describe_inputs(config, media), describe_models(config)
        digest = file_sha256(folder / CONFIG_FILE)
        write_start(
            folder / START_FILE,
            world_size=strategy.world_size,
            inputs=inputs,
            stage=stage,
            models=models,
            config_sha256=digest,
            run_sha256=run_hash(digest, inputs, models),
            decided=decided_options(given, config),
            attention=attention,
            planned_bytes=strategy.context.planned_bytes,
        )
        (folder / SUMMARY_FILE).unlink(missing_ok=True)
        for name in STEP_FILES:
            # The evaluation before the first step runs again, too.
            drop_steps_after(folder / name, num_steps or -1)
        details: dict[str, object] = {"world_size": strategy.world_size}
        if resumed:
            details["restored"] = dict(rows)
            details["changes"] = [asdict(change) for change in plan.changes]
        write_event(folder, "resumed" if resumed else "started", step=num_steps, details=details)
    strategy.barrier()
    return num_steps


def describe_attention(context: DistributedContext, model: nn.Module) -> str:
    """Return how rows pass through the attention of a prepared model, and why; collective.

    Returns:
        A line; "" for a model from outside lightrft.models.
    """
    module = inner_module(model)
    if not isinstance(module, SequenceModel):
        return ""
    if not module.layout_policy.is_packed:
        return f"padded rows: {context.chosen_options.get('packing_samples', 'by the options')}"
    device, bf16 = context.device.type, context.computes_in_bf16
    trial = try_kernel(KernelShape.of_model(module.config, device, bf16=bf16))
    fails_somewhere = context.all_reduce(int(not trial.works), op="max") > 0
    if trial.works and fails_somewhere:
        trial = KernelTrial(False, "the kernel fails on another rank")
    shares = module.layout_policy.min_shared_tokens is not None
    return f"packed, {trial.packing}" + ("; shared prefixes once" if shares else "")


def _of_any_folder(config: TrainConfig) -> TrainConfig:
    """Return the configuration without values from `output_dir`: its file may begin other runs."""
    without_folder = config.replaced({"ckpt_path": None})
    return without_folder if without_folder.checkpoint_dir == config.checkpoint_dir else config


def end_run(config: FolderOptions, context: DistributedContext, event: str, num_steps: int) -> None:
    """Record how a run ended; no rank returns before that."""
    if context.is_rank_0():
        write_event(Path(config.output_dir), event, step=num_steps, details={})
    context.barrier()


def resume_rows(
    config: RunControlOptions, loop: Loop[Batch], changes: Sequence[Change]
) -> list[tuple[str, str]]:
    """Return name and state of everything that a checkpoint restored."""
    state, strategy, stage = loop.state, loop.strategy, loop.stage
    main = stage.models.main
    folder = config.checkpoint_dir / f"_{main.name}" / f"global_step{state.num_steps}"
    num_files = sum(path.is_file() for path in folder.rglob("*"))
    num_generators = len(list((folder / "rng").glob("*.json")))
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(folder.stat().st_mtime))
    models = " and ".join(trained.name for trained in stage.models.trained)
    engine = strategy.inference_engine
    rows = [
        ("checkpoint", f"{folder}: complete, {num_files} files, written {written}"),
        ("weights", f"{models}, hashes of all files as written"),
        ("optimizer", f"{models}, with learning rate schedule"),
        (
            "generators",
            f"{min(num_generators, strategy.world_size)} of {strategy.world_size} processes",
        ),
        ("data", f"pass {state.episode + 1}, {state.num_consumed} of its {stage.item_name} used"),
        *stage.memory.rows(),
    ]
    if stage.syncs_engine:
        version = "" if engine is None else f", version {engine.weights_version}"
        rows.append(("engine", f"holds the restored weights{version}"))
    if isinstance(main.scheduler, PlannedLR) and main.scheduler.change:
        rows.append(("learning rate", main.scheduler.change))
    for change in changes:
        kind = "changed" if change.is_free else "changed, exactness lost"
        rows.append((kind, str(change)))
    return rows


def resume_table(config: FolderOptions, num_steps: int, rows: Sequence[tuple[str, str]]) -> str:
    """Return the rows below a headline."""
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:{width}}  {text}" for name, text in rows]
    return "\n".join([f"continuing {config.output_dir} after step {num_steps}", *lines])


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Lock the folder; the system drops the lock when the process ends, however it does.

    A file system without locks is accepted.

    Raises:
        ConfigError: Another process holds it; the message names that process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            raise ConfigError(
                f"--output_dir: {folder} is being written by {stream.read().strip()}: wait for "
                "that run to end, or give another folder"
            ) from None
        except OSError:  # network file systems may lack locks
            yield
            return
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        stream.flush()
        yield
