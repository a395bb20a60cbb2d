"""One step in several ways, on the ranks that each of them needs, compared with a reference."""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torch.optim import SGD, Optimizer

from lightrft.algorithms.aggregation import local_normalizer
from lightrft.cli.launch import free_port
from lightrft.engines.media.families import placeholder_ids
from lightrft.engines.process_state import replaced_environment
from lightrft.experience.minibatches import micro_slices
from lightrft.models import Actor, ActorOutput, Critic, load_config
from lightrft.models.by_sequence import refuse_gathered_layers
from lightrft.models.proof import random_rows, separate_rows
from lightrft.models.statements import vocabulary_of
from lightrft.models.types import LayoutRefusedError
from lightrft.strategy import get_fake_strategy, get_strategy
from lightrft.strategy.backend import Backend, PreparedModel, inner_module, wrapped_module
from lightrft.strategy.model_training import ModelTraining
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.weight_sync.parameter_source import (
    ParameterSource,
    checkpoint_module,
    local_rank_in,
)
from lightrft.tools.invariance.batch import (
    NUM_ROWS,
    LossRows,
    draw_prompts,
    make_rows,
    policy_share,
    value_share,
)
from lightrft.tools.invariance.cells import REFERENCE, Cell, Deviations, Role, doctor_cells

ADAM_RATE = 1e-3
# How far the step of SGD moves the weights, over their norm: enough to read the gradient off
# them, whatever the strategy keeps of it.
SGD_MOVE = 1e3

RESULTS_NAME = "results.pt"
# Time in which other processes may report their errors after the first.
GRACE_SECONDS = 3.0

# Tensors below this share of the whole norm are judged with the whole only.
SMALLEST_TENSOR = 1e-4


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of one step on this rank.

    Args:
        loss: Loss of the whole batch.
        outputs: [NUM_ROWS, seq] logprobs or values of this rank's rows where the loss counts
            them, 0 elsewhere.
        rows: Indices of those rows.
    """

    loss: float
    outputs: Tensor
    rows: list[int]


def make_strategy(cell: Cell) -> StrategyBase:
    """Return the cell's strategy, which never clips, for NUM_ROWS samples a step."""
    backend = cell.backend
    is_fsdp = backend in ("fsdp", "hsdp")
    args: dict[str, object] = {
        "fsdp": is_fsdp,
        "zero_stage": int(backend[-1]) if backend.startswith("zero") else 2,
        "sp_size": cell.sp_size,
        "bf16": cell.bf16,
        "fsdp_cpu_offload" if is_fsdp else "adam_offload": cell.offloads,
        "use_mp_opt": cell.keeps_masters,
        "compile_backend": cell.compiler,
        "max_norm": 0.0,
        "micro_train_batch_size": 1,
        "train_batch_size": NUM_ROWS,
        "l2": 0.01,
    }
    return get_fake_strategy(args) if backend == "fake" else get_strategy(args)


def prepare(
    training: ModelTraining, cell: Cell, path: str, make_optimizer: Callable[[nn.Module], Optimizer]
) -> PreparedModel:
    """Return the cell's model, laid out, sharded and with its optimizer."""
    model: Actor | Critic
    if cell.role == "actor":
        model = Actor.from_pretrained(path, fused_linear_logprob=cell.is_fused, chunk_size=100)
    else:
        model = Critic.from_pretrained(path)
        # The head is zero at first, so it would pass no gradient on.
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            model.value_head.weight.normal_(0.0, 0.02, generator=generator)
    if cell.packs_samples:
        separate_rows(model, random_rows(model, torch.device("cpu")))
        model.pack_samples()
    if cell.shares_prefixes:
        model.share_prefixes(1)
    if cell.recomputes:
        model.gradient_checkpointing_enable()
    module: nn.Module = model.train()
    if training.backend.wraps_before_optimizer:
        size = 2 if cell.backend == "hsdp" else -1
        module = training.backend.prepare_model(module, is_training=True, shard_size=size)
    ready = training.with_optimizer(module, make_optimizer(module))
    refuse_gathered_layers(wrapped_module(ready))
    return ready


def take_step(
    training: ModelTraining, ready: PreparedModel, cell: Cell, rows: LossRows
) -> StepResult:
    """Run one optimizer step on this rank's rows."""
    model, optimizer = ready.model, ready.optimizer
    if model is None or optimizer is None:
        raise ValueError("a step needs a model and its optimizer")
    context = training.context
    local_rows = list(range(context.data_rank, NUM_ROWS, context.num_data_ranks))
    device = context.device
    num_tokens = local_normalizer(rows.select(local_rows, device).response_mask, "token-mean")
    normalizer = context.reduce_over_data(num_tokens, "sum")
    outputs = torch.zeros_like(rows.advantages)
    slices = micro_slices(0, len(local_rows), cell.micro_batch_size)
    loss = 0.0
    with training.accumulation(len(slices), optimizer):
        for part in slices:
            micro = rows.select(local_rows[part], device)
            share, values = loss_share(model, cell, micro, normalizer)
            training.backward(share, model, optimizer)
            training.optimizer_step(optimizer, model, None)
            loss += share.item()
            values = torch.where(micro.response_mask, values.detach(), 0.0)
            outputs[local_rows[part], : values.shape[1]] = values.cpu()
    return StepResult(context.reduce_over_data(loss, "sum"), outputs, local_rows)


def loss_share(
    model: nn.Module, cell: Cell, micro: LossRows, normalizer: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a micro-batch's share of the loss, and the model's values behind it."""
    if cell.role == "critic":
        values: Tensor = model(micro.token_ids, micro.attention_mask, media=micro.media)
        return value_share(values, micro, normalizer), values

    def share_of(logprobs: Tensor, entropy: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
        entropies = None if entropy is None else entropy[None]
        chosen = ActorOutput(logprobs[None], entropies)
        return policy_share(chosen, micro.at(rows, columns), normalizer)

    output = model(
        micro.token_ids,
        micro.attention_mask,
        scored_mask=micro.response_mask,
        entropy="grad",
        media=micro.media,
        token_loss=share_of if cell.loss_inside else None,
    )
    if output.loss is not None:
        return output.loss, output.logprobs
    return policy_share(output, micro, normalizer), output.logprobs


def write_reference(path: str, role: Role, file: Path) -> None:
    """Run the step in one process with one padded micro-batch, and keep the results.

    Autograd leaves the gradient; the others are computed from weights.

    Args:
        path: Checkpoint of the model.
        role: Role of the trained model.
        file: Output file.
    """
    cell = replace(REFERENCE, role=role)
    training = make_strategy(cell).training
    rows = rows_of(path)[0]
    results: dict[str, Tensor] = {}
    ready = prepare(training, cell, path, lambda model: SGD(model.parameters(), lr=0.0))
    weights = dict(checkpoint_module(inner_module(ready)).named_parameters())
    gradients = {}

    def keep_gradients(*_: object) -> None:
        for name, parameter in weights.items():
            empty = torch.zeros_like(parameter)
            gradients[name] = empty if parameter.grad is None else parameter.grad.detach().clone()

    optimizer = cast("SGD", ready.optimizer)
    optimizer.register_step_pre_hook(keep_gradients)
    step = take_step(training, ready, cell, rows)
    results |= {f"gradient/{n}": g.cpu() for n, g in gradients.items()}
    size = _norm(weights.values()) / _norm(gradients.values())
    rate = 2.0 ** round(math.log2(SGD_MOVE * size))  # exact to multiply with
    optimizer.param_groups[0]["lr"] = rate
    take_step(training, ready, cell, rows)
    results |= {f"weights/{n}": p.detach().cpu().clone() for n, p in weights.items()}
    _, moved = adam_steps(training, cell, path)
    results |= {f"update/{n}": value.cpu() for n, value in moved.items()}
    results["outputs"] = step.outputs
    results["numbers"] = torch.tensor([step.loss, rate], dtype=torch.float64)
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, file)


def rows_of(path: str) -> tuple[LossRows, LossRows]:
    """Return the rows of the first and of the second step."""
    config = load_config(path)
    first, second = (
        make_rows(
            vocabulary_of(path).num_tokens or config.get_text_config().vocab_size,
            seed=seed,
            prompts=draw_prompts(path, seed),
            forbidden_ids=placeholder_ids(config),
        )
        for seed in (0, 1)
    )
    return first, second


def measure(training: ModelTraining, cell: Cell, path: str, reference: Path) -> Deviations:
    """Run the step as the cell says. Collective; the same result on every rank.

    Args:
        training: Training with the cell's backend, number of ranks, `sp_size` and dtype.
        cell: Way to run the step.
        path: Checkpoint of the model.
        reference: File of `write_reference` for this model and role.
    """
    expected = load_file(reference)
    loss, rate = expected["numbers"].tolist()
    ready = prepare(training, cell, path, lambda model: SGD(model.parameters(), lr=rate))
    before = local_values(training.backend.parameter_source(ready))
    step = take_step(training, ready, cell, rows_of(path)[0])
    after = local_values(training.backend.parameter_source(ready))
    weights = deviation(training.backend, ready, after, expected, "weights")
    read_off = {name: (before[name] - value) / rate for name, value in after.items()}
    gradient = deviation(training.backend, ready, read_off, expected, "gradient")
    del ready
    ready, moved = adam_steps(training, cell, path)
    difference = (step.outputs - expected["outputs"])[step.rows].abs().max()
    scale = 1.0 if cell.role == "actor" else float(expected["outputs"].abs().max())
    return Deviations(
        outputs=training.context.all_reduce(float(difference), "max") / scale,
        loss=abs(step.loss - loss) / abs(loss),
        weights=weights[0],
        gradient=gradient[0],
        gradient_tensor=gradient[1],
        update=deviation(training.backend, ready, moved, expected, "update")[0],
    )


def adam_steps(
    training: ModelTraining, cell: Cell, path: str
) -> tuple[PreparedModel, dict[str, Tensor]]:
    """Return the model after two steps of AdamW, and how far this rank's shards have moved."""
    ready = prepare(training, cell, path, lambda m: training.create_optimizer(m, lr=ADAM_RATE))
    before = local_values(training.backend.parameter_source(ready))
    for rows in rows_of(path):
        take_step(training, ready, cell, rows)
    after = local_values(training.backend.parameter_source(ready))
    return ready, {name: value - before[name] for name, value in after.items()}


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(t.detach().double().square().sum()) for t in tensors))


def measure_cells(
    rank: int, world_size: int, cells: list[tuple[Cell, str, str]]
) -> list[Deviations | str]:
    """Measure cells of one number of ranks, one after the other; runs on every rank.

    Args:
        rank, world_size: Rank of this process, and number of ranks.
        cells: Cells, each with the path of its model and of its reference.

    Returns:
        Deviations of each cell, or why its model cannot be laid out so.
    """
    import torch.distributed as dist

    del rank
    # Kept over all strategies: ending one group and starting the next at one address is a race.
    if not dist.is_initialized() and world_size > 1:
        from lightrft.strategy.distributed.process_groups import start_process_group

        start_process_group(None)
    strategies: dict[Cell, StrategyBase] = {}
    results: list[Deviations | str] = []
    for cell, path, reference in cells:
        key = Cell(
            backend=cell.backend,
            sp_size=cell.sp_size,
            bf16=cell.bf16,
            offloads=cell.offloads,
            keeps_masters=cell.keeps_masters,
            compiler=cell.compiler,
        )
        if key not in strategies:
            strategies[key] = make_strategy(key)
        try:
            results.append(measure(strategies[key].training, cell, path, Path(reference)))
        except LayoutRefusedError as refusal:  # by all ranks alike
            results.append(str(refusal))
    return results


def local_values(source: ParameterSource) -> dict[str, Tensor]:
    """Return copies of this rank's shards in float32, by checkpoint name."""
    return {
        entry.checkpoint_name: entry.local_shard.detach().float().clone()
        for entry in source.parameters()
    }


def deviation(
    backend: Backend,
    ready: PreparedModel,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    kind: str,
) -> tuple[float, float]:
    """Return ||found - expected|| / ||expected|| of all parameters and of the worst. Collective.

    Args:
        backend: Backend that prepared the model.
        ready: Model, which says what range of a parameter this rank holds.
        found: Flat shard of each parameter on this rank.
        expected: Whole parameters, of any shape; the same on every rank.
        kind: Prefix of the names in `expected`.
    """
    source = backend.parameter_source(ready)
    rank = local_rank_in(source.group)
    sizes, sums = [], []
    for entry in source.parameters():
        start, stop = entry.shards[rank] if entry.is_sharded else (0, entry.numel)
        expected_shard = expected[f"{kind}/{entry.checkpoint_name}"].flatten()[start:stop]
        expected_shard = expected_shard.to(entry.local_shard.device)
        difference = found[entry.checkpoint_name] - expected_shard
        squares = [difference.double().square().sum(), expected_shard.double().square().sum()]
        sizes.append(entry.numel)
        sums.append(
            torch.stack([*squares, squares[0].new_tensor(float(expected_shard.numel()))]).cpu()
        )
    total = backend.context.all_reduce(torch.stack(sums), "sum")  # [parameters, 3]
    # Ranks that hold the same values are counted once.
    copies = total[:, 2] / torch.tensor(sizes, dtype=torch.float64).clamp(min=1)
    differences, norms = (total[:, 0] / copies).sqrt(), (total[:, 1] / copies).sqrt()
    whole = float(torch.linalg.vector_norm(norms))
    deviation_of_all = float(torch.linalg.vector_norm(differences)) / whole
    is_judged = norms > SMALLEST_TENSOR * whole
    return deviation_of_all, float((differences / norms)[is_judged].max())


# A cell with its deviations, or with the reason why this model cannot be laid out so.
CellResult = tuple[Cell, Deviations | str]


def examine(
    path: str, *, num_processes: int, timeout_seconds: float, bf16: bool = False
) -> Iterator[CellResult]:
    """Run one step of a model in many ways, and compare each with the plainest.

    Args:
        path: Checkpoint of a causal language model.
        num_processes: Processes of the distributed ways; 1 leaves them out.
        timeout_seconds: Deadline of the ways with one number of processes.
        bf16: Whether to run them in bfloat16; the comparison stays with float32.

    Yields:
        The results, once all with one number of processes are there.

    Raises:
        ModelLoadError: The checkpoint cannot be read.
        ProcessException: A process failed; the message has its traceback.
        TimeoutError: The ways with one number of processes took too long.
    """
    load_config(path)
    has_deepspeed = find_spec("deepspeed") is not None
    cells = doctor_cells(num_processes, has_deepspeed=has_deepspeed, bf16=bf16)
    with tempfile.TemporaryDirectory() as folder:
        for world_size in sorted({cell.world_size for cell in cells}):
            chosen = [cell for cell in cells if cell.world_size == world_size]
            run_on_ranks(examine_cells, world_size, timeout_seconds, (chosen, path, Path(folder)))
            results = torch.load(Path(folder, RESULTS_NAME), weights_only=False)
            yield from zip(chosen, results, strict=True)


def run_on_ranks(
    function: Callable[..., None],
    world_size: int,
    timeout_seconds: float,
    work: tuple[list[Cell], str, Path],
) -> None:
    """Run a function of rank, number of ranks and work in new processes, which end with this one.

    Raises:
        ProcessException: One of them failed.
        TimeoutError: They took longer than `timeout_seconds`.
    """
    launcher = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    deadline = time.monotonic() + timeout_seconds
    with replaced_environment(launcher):
        ranks = start_processes(function, (world_size, *work), world_size, join=False, daemon=True)
    while not ranks.join(max(0.0, deadline - time.monotonic()), grace_period=GRACE_SECONDS):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{world_size} processes took more than {timeout_seconds:g} s")


def examine_cells(rank: int, world_size: int, cells: list[Cell], path: str, folder: Path) -> None:
    """Measure cells on one rank; the first writes results, and the reference if it is missing."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    reference = folder / "reference.safetensors"
    if not reference.exists():
        write_reference(path, "actor", reference)
    results = measure_cells(rank, world_size, [(cell, path, str(reference)) for cell in cells])
    if rank == 0:
        torch.save(results, folder / RESULTS_NAME)
