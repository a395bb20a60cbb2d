"""One step of a vision-language model is the same however it is carried out."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tests.models.planted_prefixes import count_gradients_once, keep_a_stale_prefix
from tests.models.vision.tiny_families import write_tiny_vision_model
from tests.ranks import run_multiprocess

from lightrft.tools.invariance.batch import NUM_ROWS
from lightrft.tools.invariance.cells import FP32_BOUNDS, Cell
from lightrft.tools.invariance.measure import measure_cells, rows_of, write_reference

pytestmark = pytest.mark.shard("invariance_vision")

PRESETS = ("tiny-qwen2.5-vl", "tiny-qwen3-vl", "tiny-gemma3", "tiny-internvl")
ALONE = [
    Cell(micro_batch_size=2),
    Cell(micro_batch_size=1, packs_samples=True, recomputes=True),
    Cell(micro_batch_size=4, packs_samples=True, is_fused=True, loss_inside=True),
    Cell(micro_batch_size=4, packs_samples=True, shares_prefixes=True),
    Cell(micro_batch_size=2, role="critic"),
]
TOGETHER = [
    replace(cell, backend=backend, world_size=2)
    for backend in ("fsdp", "zero3")
    for cell in (
        Cell(micro_batch_size=2),
        # Each rank's passes differ in having pictures.
        Cell(micro_batch_size=1, recomputes=True),
        Cell(micro_batch_size=2, packs_samples=True),
        Cell(micro_batch_size=4, packs_samples=True, sp_size=2),
        Cell(micro_batch_size=4, packs_samples=True, sp_size=2, shares_prefixes=True),
        Cell(micro_batch_size=4, packs_samples=True, shares_prefixes=True, recomputes=True),
        Cell(micro_batch_size=2, packs_samples=True, role="critic"),
    )
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Path of a model, with the reference of each role beside it."""
    folder, made = tmp_path_factory.mktemp("pictures"), set()

    def path(preset):
        if preset not in made:
            # Gradients of larger weights are rounded by more than the bounds allow.
            write_tiny_vision_model(folder / preset, preset, seed=1, initializer_range=0.05)
            for role in ("actor", "critic"):
                write_reference(str(folder / preset), role, folder / f"{preset}.{role}")
            made.add(preset)
        return folder / preset

    return path


def work_of(path, cells):
    return [(cell, str(path), f"{path}.{cell.role}") for cell in cells]


def violations(cells, results):
    return [
        f"{cell}: " + ", ".join(f"{name}={each.value(name):.3g}" for name in names)
        for cell, each in zip(cells, results, strict=True)
        if (names := each.above(FP32_BOUNDS))
    ]


def measure_on_ranks(rank, world_size, work):
    return measure_cells(rank, world_size, work)


@pytest.mark.full
def test_rows_differ_in_having_pictures(models):
    for rows in rows_of(str(models("tiny-qwen2.5-vl"))):
        held = [prompt is not None for prompt in rows.media.prompts]
        assert len(held) == NUM_ROWS
        # Of both ranks, and of neighbouring rows of one rank.
        assert {any(held[0::2]), any(held[1::2])} == {True, False}
        assert rows.media.prompts[6] is rows.media.prompts[4]
        for row, prompt in enumerate(rows.media.prompts):
            if prompt is not None:
                start = rows.token_ids[row, : len(prompt.token_ids)]
                assert tuple(start.tolist()) == prompt.token_ids
                assert not rows.response_mask[row, : len(prompt.token_ids)].any()


@pytest.mark.cover(1)
@pytest.mark.parametrize("cell", ALONE[:4], ids=str)
def test_one_process_gives_the_reference(cell, models):
    work = work_of(models("tiny-qwen2.5-vl"), [cell])
    assert not violations([cell], measure_cells(0, 1, work))


@pytest.mark.parametrize("fault", [count_gradients_once, keep_a_stale_prefix])
def test_planted_faults_of_shared_pictures_are_caught(fault, models, monkeypatch):
    cell = Cell(micro_batch_size=8, packs_samples=True, shares_prefixes=True)
    work = work_of(models("tiny-qwen2.5-vl"), [cell])
    fault(monkeypatch)
    assert "gradient" in measure_cells(0, 1, work)[0].above(FP32_BOUNDS)


@pytest.mark.parametrize("planted", ["exchanged pictures", "a tower without gradient"])
def test_planted_faults_are_caught(planted, models, monkeypatch):
    from lightrft.tools.invariance import measure

    cell = Cell(micro_batch_size=4)
    # The references are written before the fault is planted.
    work = work_of(models("tiny-qwen2.5-vl"), [cell])
    if planted == "exchanged pictures":
        draw = measure.draw_prompts

        def exchanged(path, seed):
            return draw(path, seed + 1)

        monkeypatch.setattr(measure, "draw_prompts", exchanged)
    else:
        prepare = measure.prepare

        def frozen(*args):
            ready = prepare(*args)
            ready.model.model.base_model.visual.requires_grad_(False)
            return ready

        monkeypatch.setattr(measure, "prepare", frozen)
    (measured,) = measure_cells(0, 1, work)
    assert "gradient" in measured.above(FP32_BOUNDS)


def test_the_tower_takes_part_in_the_reference(models):
    reference = load_file(f"{models('tiny-qwen2.5-vl')}.actor")
    tower = [tensor for name, tensor in reference.items() if "gradient/model.visual" in name]
    whole = [tensor for name, tensor in reference.items() if name.startswith("gradient/")]
    norms = [torch.cat([t.flatten() for t in part]).norm() for part in (tower, whole)]
    assert norms[0] > 1e-3 * norms[1]


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_every_family_gives_the_reference_alone(preset, models):
    assert not violations(ALONE, measure_cells(0, 1, work_of(models(preset), ALONE)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_every_family_gives_the_reference_on_two_ranks(backend, preset, models):
    cells = [cell for cell in TOGETHER if cell.backend == backend]
    work = work_of(models(preset), cells)
    first, second = run_multiprocess(measure_on_ranks, 2, timeout_seconds=1100, args=(work,))
    assert first == second
    assert not violations(cells, first)
