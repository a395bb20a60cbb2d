"""One training step gives the same loss, outputs, gradient and weights however it is carried out.

The reference is one process with one padded micro-batch of all rows. By default a cover of all
pairs of options runs, and with `-m slow` a sample of their whole product.
"""

import itertools
import random
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.planted_prefixes import FAULTS as PREFIX_FAULTS, SEEN as SEEN_FAULTS
from tests.pairwise import pairs_of, pairwise_cover
from tests.ranks import run_multiprocess

from lightrft.strategy.backend import inner_module
from lightrft.tools.invariance import measure
from lightrft.tools.invariance.batch import ENTROPY_COEF, KL_COEF, make_rows
from lightrft.tools.invariance.cells import (
    FP32_BOUNDS,
    Cell,
    Deviations,
    doctor_cells,
    rounding_bounds,
)
from lightrft.tools.invariance.measure import measure_cells, write_reference

pytestmark = pytest.mark.shard("invariance")

MODELS = ("qwen3", "qwen3-tied", "llama", "llama-tied", "moe")
# Largest values in bfloat16 over the cover, on a CPU: outputs 0.030, loss 0.011, gradient and
# weights 0.018, one tensor 0.143, update 0.21, moments 0.022; over plain layouts: outputs 0.026,
# loss 0.0031, gradient and weights 0.0166, one tensor 0.030, update 0.154, moments 0.019.
# Processors differ.
BF16_BOUNDS = Deviations(
    outputs=0.06, loss=0.02, weights=0.03, gradient=0.03, gradient_tensor=0.25, update=0.35
)
NOTHING = Deviations(*[0.0] * 6)
PLAIN_BF16_BOUNDS = replace(BF16_BOUNDS, loss=0.01, gradient_tensor=0.07)
BACKENDS = {
    # backend: (numbers of processes, smallest is what one process can tell)
    "fake": (1,),
    "zero1": (1, 2, 4),
    "zero2": (1, 2, 4),
    "zero3": (1, 2, 4),
    "fsdp": (1, 2, 4),
    "hsdp": (4,),
}
OPTIONS = {
    "model": MODELS,
    "backend": tuple(BACKENDS),
    "world_size": (1, 2, 4),
    "micro_batch_size": (1, 2, 4),
    "packs_samples": (False, True),
    "shares_prefixes": (False, True),
    "sp_size": (1, 2),
    "recomputes": (False, True),
    "is_fused": (False, True),
    "loss_inside": (False, True),
    "role": ("actor", "critic"),
    "bf16": (False, True),
    "offloads": (False, True),
    "keeps_masters": (False, True),
}
# The layout in which dtypes, offloads and master weights are tried.
PLAIN = {
    "model": "qwen3-tied",
    "packs_samples": False,
    "shares_prefixes": False,
    "sp_size": 1,
    "recomputes": False,
    "is_fused": False,
    "loss_inside": False,
    "role": "actor",
}


def is_meaningful(choice):
    backend, world_size = choice["backend"], choice["world_size"]
    is_alike = PLAIN.items() <= choice.items() and world_size == (4 if backend == "hsdp" else 2)
    return (
        world_size in BACKENDS[backend]
        and world_size % choice["sp_size"] == 0
        # Each of four ranks has two rows, so that larger micro-batches are the same.
        and not (choice["micro_batch_size"] == 4 and world_size // choice["sp_size"] == 4)
        and not (choice["role"] == "critic" and choice["is_fused"])
        and not (choice["loss_inside"] and not choice["is_fused"])
        and not (choice["shares_prefixes"] and choice["micro_batch_size"] == 1)
        and not (choice["shares_prefixes"] and not choice["packs_samples"])
        and not ((choice["bf16"] or choice["offloads"]) and not is_alike)
        and not (choice["keeps_masters"] and not (choice["bf16"] and backend in ("fsdp", "hsdp")))
    )


def product():
    """Every meaningful choice, one value of each option."""
    for values in itertools.product(*OPTIONS.values()):
        choice = dict(zip(OPTIONS, values, strict=True))
        if is_meaningful(choice):
            yield choice


def with_model(choice):
    values = dict(choice)
    return values.pop("model"), Cell(**values)


def moments_of(training, ready):
    """Adam's two moments of every parameter, whole, by name; collective."""
    from torch.distributed.tensor import DTensor

    found = {}
    for name, parameter in inner_module(ready).named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            if training.backend.name == "Deepspeed":
                from deepspeed.utils import safe_get_full_optimizer_state

                # Stages 1 and 2 link parts of their flat states to parameters before there are any.
                part, zero = vars(parameter).get("_hp_mapping"), ready.model.optimizer
                if part is not None:
                    flats = vars(zero).get("single_partition_of_fp32_groups")
                    flats = flats or zero.fp32_groups_flat_partition  # of stage 1 in bfloat16
                    flat = flats[part.param_group_index]
                    part.set_optim_state_fragment(flat, zero.optimizer.state[flat])
                value = safe_get_full_optimizer_state(parameter, moment)
            else:
                value = ready.optimizer.state[parameter][moment]
                value = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{moment}/{name}"] = value.detach().float().reshape(-1).cpu().clone()
    return found


def moment_deviations(found, expected):
    """||a - b|| / ||b|| of both moments, over all parameters."""
    result = []
    for moment in ("exp_avg/", "exp_avg_sq/"):
        names = [name for name in expected if name.startswith(moment)]
        difference = sum(float((found[n] - expected[n]).double().square().sum()) for n in names)
        norm = sum(float(expected[n].double().square().sum()) for n in names)
        result.append((difference / norm) ** 0.5)
    return result


def measure_with_moments(rank, world_size, work):
    """Deviations of each cell with the larger one of Adam's moments."""
    left, largest = iter(work), []

    def look(training, ready):
        expected = load_file(f"{next(left)[2]}.moments")
        largest.append(max(moment_deviations(moments_of(training, ready), expected)))

    with after_adam(look):
        return list(zip(measure_cells(rank, world_size, work), largest, strict=True))


@contextmanager
def after_adam(look):
    """Shows every model after its steps of AdamW."""
    take_steps = measure.adam_steps

    def take_and_look(training, cell, path):
        ready, moved = take_steps(training, cell, path)
        look(training, ready)
        return ready, moved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "adam_steps", take_and_look)
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folder of each model, with the reference of each role beside it."""
    folder = tmp_path_factory.mktemp("invariance")
    for name in MODELS:
        write_model(name, folder / name)
        for role in ("actor", "critic"):
            moments = {}
            with after_adam(lambda *found, into=moments: into.update(moments_of(*found))):
                write_reference(str(folder / name), role, folder / f"{name}.{role}")
            save_file(moments, folder / f"{name}.{role}.moments")
    return folder


def write_model(name, folder):
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

    sizes = {
        "vocab_size": 203,
        "hidden_size": 64,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "initializer_range": 0.1,
        "tie_word_embeddings": name.endswith("-tied"),
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = {
        "qwen3": lambda: Qwen3Config(**sizes),
        "llama": lambda: LlamaConfig(**sizes),
        "moe": lambda: Qwen3MoeConfig(**sizes, **experts, decoder_sparse_step=2),
    }[name.removesuffix("-tied")]()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def run(choices, models, *, timeout_seconds=280):
    """Deviations of each choice; one start of processes for each number of them."""
    found = []
    for world_size, group in itertools.groupby(
        sorted(choices, key=lambda c: c["world_size"]), key=lambda c: c["world_size"]
    ):
        cells = sorted(map(with_model, group), key=lambda item: str(item[1]))
        work = [
            (cell, str(models / name), str(models / f"{name}.{cell.role}")) for name, cell in cells
        ]
        ranks = run_multiprocess(
            measure_with_moments, world_size, timeout_seconds=timeout_seconds, args=(work,)
        )
        assert all(rank == ranks[0] for rank in ranks)
        found += [(item, *result) for item, result in zip(cells, ranks[0], strict=True)]
    return found


def bounds_of(cell):
    """Bounds of the deviations, and of Adam's moments."""
    if not cell.bf16:
        return FP32_BOUNDS, 1e-5
    return PLAIN_BF16_BOUNDS if cell in PLAIN_CELLS else BF16_BOUNDS, 0.04


def violations(found):
    # In bfloat16 it was computed, where that was asked for.
    odd = [name for name, d, _ in found if ("gradient" in d.above(FP32_BOUNDS)) != name[1].bf16]
    assert not odd
    return [
        f"{model}: {cell}: moments={moment:.3g}, "
        + ", ".join(f"{name}={d.value(name):.3g}" for name in d.above(bounds))
        for (model, cell), d, moment in found
        for bounds, moments in [bounds_of(cell)]
        if d.above(bounds) or not moment <= moments
    ]


def available(choice):
    return find_spec("deepspeed") is not None or not choice["backend"].startswith("zero")


CHOICES = list(product())
PLAIN_CELLS = {with_model(c)[1] for c in CHOICES if c["bf16"] or c["offloads"]}
COVER = pairwise_cover(CHOICES)
# Dtypes have more code of their own than pairs tell: FSDP in bfloat16 without master weights.
COVER += [c for c in CHOICES if c["bf16"] and c["micro_batch_size"] == 1 and c not in COVER]


def test_the_cover_has_every_pair_of_options():
    wanted = set().union(*map(pairs_of, CHOICES))
    assert set().union(*map(pairs_of, COVER)) == wanted
    assert 20 <= len(COVER) <= 70


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_cover_of_all_pairs_of_options_gives_the_reference(world_size, models):
    choices = [c for c in COVER if c["world_size"] == world_size and available(c)]
    found = run(choices, models, timeout_seconds=850)
    assert len(found) == len(choices)
    assert not violations(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_ninth_of_all_choices_gives_the_reference(backend, models):
    """Another one in every session, with many cells of any four options."""
    choices = [c for c in CHOICES if c["backend"] == backend and available(c)]
    print("seed", seed := random.randrange(2**32))
    chosen = random.Random(seed).sample(choices, len(choices) // 9)
    assert not violations(run(chosen, models, timeout_seconds=3500))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_bfloat16_stays_within_measured_bounds(models):
    choices = [{**c, "bf16": True} for c in COVER if available(c)]
    assert not violations(run(choices, models, timeout_seconds=1700))


def test_the_reference_is_what_autograd_says_row_by_row_in_float64(models):
    from transformers import AutoModelForCausalLM

    rows = make_rows(203)
    model = AutoModelForCausalLM.from_pretrained(models / "qwen3", dtype=torch.float64)
    loss, num_tokens = 0.0, int(rows.response_mask.sum())
    for row in range(len(rows.token_ids)):
        token_ids = rows.token_ids[row][rows.attention_mask[row]]
        logits = model(input_ids=token_ids[None]).logits[0]
        for column in rows.response_mask[row].nonzero().flatten().tolist():
            law = torch.log_softmax(logits[column - 1], -1)
            logprob = law[token_ids[column]]
            loss = loss - rows.advantages[row, column].double() * logprob
            loss = loss + KL_COEF * (logprob - rows.ref_logprobs[row, column].double()) ** 2 / 2
            loss = loss + ENTROPY_COEF * (law.exp() * law).sum()
    (loss / num_tokens).backward()
    reference = load_file(models / "qwen3.actor")
    assert float(loss / num_tokens) == pytest.approx(float(reference["numbers"][0]), rel=1e-5)
    difference, norm = 0.0, 0.0
    for name, parameter in model.named_parameters():
        difference += float((reference[f"gradient/{name}"] - parameter.grad).square().sum())
        norm += float(parameter.grad.square().sum())
    assert (difference / norm) ** 0.5 <= 1e-6


@pytest.mark.parametrize(
    "planted, caught",
    [
        ("one row left out", {"loss", "gradient", "gradient_tensor", "weights", "update"}),
        ("gradient scaled", {"gradient", "weights"}),
        ("one weight transposed", {"outputs", "loss", "gradient", "update"}),
        ("one small tensor off", {"gradient_tensor"}),
    ],
)
def test_planted_differences_are_caught(planted, caught, models, monkeypatch):
    prepare, share = measure.prepare, measure.loss_share
    if planted == "one row left out":

        def patched(model, role, micro, normalizer):
            kept = micro.response_mask.clone()
            kept[0] = False
            return share(model, role, replace(micro, response_mask=kept), normalizer)

        monkeypatch.setattr(measure, "loss_share", patched)
    elif planted == "gradient scaled":
        factor = 1 + 3e-6
        monkeypatch.setattr(
            measure,
            "loss_share",
            lambda *args: (lambda loss, out: (loss * factor, out))(*share(*args)),
        )
    elif planted == "one weight transposed":

        def transposed(*args):
            ready = prepare(*args)
            weight = ready.model.model.model.layers[0].self_attn.o_proj.weight
            with torch.no_grad():
                weight[:64, :64] = weight[:64, :64].T.clone()
            return ready

        monkeypatch.setattr(measure, "prepare", transposed)
    else:

        def scaled(*args):
            ready = prepare(*args)
            norm = ready.model.model.model.layers[0].self_attn.q_norm.weight
            norm.register_hook(lambda gradient: gradient * (1 + 2e-5))
            return ready

        monkeypatch.setattr(measure, "prepare", scaled)
    ((found),) = measure_cells(0, 1, [(Cell(), str(models / "qwen3"), str(models / "qwen3.actor"))])
    assert caught <= set(found.above(FP32_BOUNDS))


@pytest.mark.parametrize("fault", PREFIX_FAULTS)
def test_planted_mistakes_of_shared_prefixes_are_caught(fault, models, monkeypatch):
    cell = Cell(micro_batch_size=8, packs_samples=True, shares_prefixes=True)
    work = [(cell, str(models / "qwen3"), str(models / "qwen3.actor"))]
    assert not measure_cells(0, 1, work)[0].above(FP32_BOUNDS)
    PREFIX_FAULTS[fault](monkeypatch)
    found = set(measure_cells(0, 1, work)[0].above(FP32_BOUNDS))
    assert {"gradient", "weights"} <= found
    assert ("outputs" in found) == (fault in SEEN_FAULTS)


def test_another_moment_is_a_violation(models):
    expected = load_file(models / "llama.critic.moments")
    planted = {n: v * (1 + 2e-5) if "exp_avg_sq" in n else v for n, v in expected.items()}
    deviations = moment_deviations(planted, expected)
    assert deviations == [0.0, pytest.approx(2e-5, rel=0.1)]
    cell = ("llama", Cell(role="critic"))
    assert violations([(cell, NOTHING, max(deviations))])
    assert not violations([(cell, NOTHING, 0.0)])


def test_no_number_is_a_violation():
    assert replace(NOTHING, loss=float("nan")).above(FP32_BOUNDS) == ["loss"]
    assert not NOTHING.above(FP32_BOUNDS)


def test_the_doctor_tries_every_feature():
    cells = doctor_cells(2, has_deepspeed=True)
    for name, values in {
        "backend": {"fake", "fsdp", "zero2", "zero3"},
        "packs_samples": {False, True},
        "shares_prefixes": {False, True},
        "sp_size": {1, 2},
        "recomputes": {False, True},
        "is_fused": {False, True},
        "loss_inside": {False, True},
    }.items():
        assert {getattr(cell, name) for cell in cells} == values
    assert {c.backend for c in doctor_cells(1, has_deepspeed=True)} == {"fake"}


def test_the_doctors_bounds_in_bfloat16_are_thrice_the_plainest_way():
    bounds = rounding_bounds(PLAIN_BF16_BOUNDS)
    assert bounds.gradient == pytest.approx(3 * PLAIN_BF16_BOUNDS.gradient)
    assert rounding_bounds(NOTHING) == FP32_BOUNDS
    cells = doctor_cells(2, has_deepspeed=True, bf16=True)
    assert cells[0] == Cell(bf16=True)
    assert all(cell.bf16 for cell in cells)
    assert any(cell.keeps_masters for cell in cells)
    assert {cell.backend for cell in cells if cell.offloads} == {"fsdp", "zero2"}
