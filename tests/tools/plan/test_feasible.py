"""What a plan calls feasible against sums that are written down here once more."""

import random
import re
from dataclasses import replace

import pytest

from lightrft.cli.errors import ExitCode
from lightrft.cli.main import main
from lightrft.config import TrainConfig
from lightrft.run.gpus import GPUS
from lightrft.tools.plan.advice import advise
from lightrft.tools.plan.engine_room import engine_room
from lightrft.tools.plan.memory import fitting_share, plan_memory
from lightrft.tools.plan.setup import Setup
from lightrft.tools.plan.sizes import SHAPES, ModelSize, VisionSize
from lightrft.tools.plan.start_check import settle

LLAMA_70B = ModelSize(80, 8192, 28672, 128_256, 64, 8, 128, is_tied=False)
MIXTURE = ModelSize(
    48, 2048, 768, 151_936, 32, 4, 128, False,
    has_qk_norm=True, num_experts=128, num_active_experts=8,
)  # fmt: skip
QWEN_VL = replace(
    SHAPES["qwen2.5-7b"], vision=VisionSize(32, 1280, 3420, 3, 3 * 14 * 14 * 2, 4, 3584)
)
MODELS = {
    "0.6b": SHAPES["qwen3-0.6b"],
    "7b": SHAPES["qwen2.5-7b"],
    "32b": SHAPES["qwen2.5-32b"],
    "70b": LLAMA_70B,
    "30b-a3b": MIXTURE,
    "7b-vl": QWEN_VL,
}


def setup_of(name, gpus, gpu, *, host=None, **options):
    config = TrainConfig(engine_type="vllm", **options)
    memory = GPUS[gpu].memory_bytes
    return Setup(config, MODELS[name], gpus, 8, True, memory, "vllm", node_bytes=host)


def phase(plan, name):
    return next(p for p in plan.phases if p.name == name)


def terms(plan, name):
    return {term.name: term.num_bytes for term in phase(plan, name).terms}


# Of findings: model, GPUs, kind, options; whether it fits; and what the first proposal must have.
CASES = {
    "0.6b on one 24 GB": (("0.6b", 1, "rtx4090-24g", {"engine_mem_util": 0.45}), True, set()),
    "7b ZeRO-2 on 8 x 80": (("7b", 8, "h100-80g", {"engine_mem_util": 0.4}), True, set()),
    "32b on 8 x 141": (
        ("32b", 8, "h200-141g", {"fsdp": True, "gradient_checkpointing": True}),
        False,
        {"engine_tp_size"},
    ),
    "70b on 16 x 80": (("70b", 16, "h100-80g", {"fsdp": True}), False, {"fsdp_cpu_offload"}),
    "30b-a3b on 8 x 80": (
        ("30b-a3b", 8, "h100-80g", {"fsdp": True, "gradient_checkpointing": True}),
        False,
        {"engine_tp_size"},
    ),
    "7b-vl on 8 x 80": (("7b-vl", 8, "h100-80g", {"fsdp": True}), True, set()),
}


@pytest.mark.parametrize("name", CASES)
def test_a1_the_answer_for_common_runs_is_that_of_the_arithmetic(name):
    (model, gpus, gpu, options), fits, needed = CASES[name]
    setup = setup_of(model, gpus, gpu, **options)
    assert plan_memory(setup).fits is fits
    found = advise(setup)
    assert found.plan.fits
    assert needed <= found.changes.keys()


def test_a1_an_engine_whose_weights_exceed_its_share_is_refused_at_the_start():
    options = {"fsdp": True, "gradient_checkpointing": True, "bf16": True}
    setup = setup_of("30b-a3b", 8, "h100-80g", **options)
    # 30.53e9 numbers of two bytes in half of 80 GB.
    assert engine_room(setup).weight_bytes == pytest.approx(61.1e9, rel=2e-3)
    with pytest.raises(MemoryError, match="the engine cannot start: its share is 40"):
        settle(setup, lambda text: None)
    divided = setup_of("30b-a3b", 8, "h100-80g", **options, engine_tp_size=4)
    config = settle(divided, lambda text: None)
    assert plan_memory(replace(divided, config=config)).fits


def test_a1_a_share_with_room_for_few_rows_is_called_cramped_and_divided():
    options = {"fsdp": True, "gradient_checkpointing": True}
    setup = setup_of("32b", 8, "h200-141g", **options)
    room = engine_room(setup)
    # By hand: 70.5 GB less 65.5 of weights, 64 x 25 MB of graphs and a batch of 16,384 tokens.
    wide = 16_384 * 2 * (2 * 5120 + 3 * 27_648)
    left = 70.5e9 - 2 * 32.76e9 - 64 * 0.025e9 - wide
    assert room.share_bytes - room.fixed_bytes == pytest.approx(left, abs=0.05e9)
    larger = setup_of("32b", 8, "h200-141g", **options, engine_mem_util=0.54)
    assert 1 <= engine_room(larger).rows < 32
    assert "the engine is cramped" in engine_room(larger).problem()
    found = advise(setup)
    assert found.changes["engine_tp_size"] > 1


def test_a1_the_start_gives_an_engine_more_where_the_trainer_leaves_it():
    lines = []
    setup = setup_of("7b", 8, "h200-141g", fsdp=True, engine_mem_util=0.11)
    config = settle(setup, lines.append)
    assert config.engine_mem_util > 0.11
    assert "its weights and rows need it" in lines[0]


def test_a1_no_advised_change_can_be_left_out():
    rng = random.Random(22)
    num_changes = 0
    for _ in range(6):
        setup = random_setup(rng)
        found = advise(setup)
        for name in found.changes if found.plan.fits else ():
            if name == "adam_offload" and "fsdp_cpu_offload" in found.changes:
                continue  # the latter takes its place
            others = {n: value for n, value in found.changes.items() if n != name}
            plan = plan_memory(replace(setup, config=setup.config.replaced(others)))
            assert not plan.fits, (setup, found.changes, name)
            num_changes += 1
    assert num_changes > 3


def test_a1_zero_3_is_advised_where_it_is_enough():
    setup = setup_of("7b", 2, "h100-80g", gradient_checkpointing=True)
    assert not plan_memory(setup).fits
    assert not replace(setup, engine="").has_server_engine
    changes = [advise(replace(setup, engine=engine)).changes for engine in ("vllm", "hf")]
    assert all("zero_stage" in c or "fsdp" in c or "adam_offload" in c for c in changes)


def test_what_other_options_exclude_is_not_advised():
    setup = setup_of("32b", 1, "rtx4090-24g", fsdp=True, lora_rank=16, quantize="nf4")
    assert "cpu_offload" not in advise(setup).flags


def test_a2_whole_models_on_the_host_are_counted():
    lora = {"fsdp": True, "lora_rank": 64, "engine_tp_size": 8}
    setup = setup_of("70b", 8, "h100-80g", **lora, meta_init=False)
    plan = plan_memory(setup)
    # 70.55e9 numbers of four bytes, and adapters, on each of eight ranks.
    assert plan.host_bytes == pytest.approx(285.5e9, rel=2e-3)
    less, enough = (plan_memory(replace(setup, node_bytes=x)) for x in (2.2e12, 2.4e12))
    assert any("the host needs 2284" in text for text in less.problems)
    assert not any("host" in text for text in enough.problems)


def test_a2_ranks_read_their_own_rows_with_adapters_and_a_tower_too():
    lora = {"fsdp": True, "lora_rank": 64, "engine_tp_size": 8}
    adapted = setup_of("70b", 8, "h100-80g", **lora)
    # Adapters are in no file: each rank makes them whole, in float32.
    load = phase(plan_memory(adapted), "load").host_bytes
    assert load == 4 * adapted.actor.adapters
    assert 0 < load < 4e9
    for name in ("70b", "7b-vl"):
        whole = setup_of(name, 8, "h100-80g", fsdp=True, engine_tp_size=8)
        assert phase(plan_memory(whole), "load").host_bytes == 0
    # A reward model has a head in no file, and is read whole.
    rewards = replace(setup_of("70b", 8, "h100-80g", fsdp=True), stage="reward")
    assert phase(plan_memory(rewards), "load").host_bytes > 270e9


def test_a2_one_rank_collects_what_it_exports():
    whole = setup_of("70b", 8, "h100-80g", fsdp=True, engine_tp_size=8)
    assert phase(plan_memory(whole), "save").host_bytes == pytest.approx(141e9 / 8, rel=2e-3)
    less, enough = (plan_memory(replace(whole, node_bytes=x)) for x in (130e9, 150e9))
    assert any("the host needs 141" in text for text in less.problems)
    assert not any("host" in text for text in enough.problems)


def test_a2_models_that_are_read_together_count_together():
    size = MODELS["7b"].parameters
    one = phase(plan_memory(setup_of("7b", 8, "h100-80g")), "load").host_bytes
    assert one == 4 * size
    # A reference is read when the actor is on the device; a critic is read beside the actor.
    with_reference = setup_of("7b", 8, "h100-80g", init_kl_coef=0.01)
    assert phase(plan_memory(with_reference), "load").host_bytes == one
    with_critic = setup_of("7b", 8, "h100-80g", advantage_estimator="gae")
    head = SHAPES["qwen2.5-7b"].embedding_parameters
    assert phase(plan_memory(with_critic), "load").host_bytes == 2 * one - 4 * head


def test_a2_host_memory_is_an_option_of_the_command(capsys):
    argv = ["plan", "--pretrain", "qwen2.5-7b", "--gpus", "8", "--engine_mem_util", "0.4"]
    assert main([*argv, "--host_memory", "250"]) == ExitCode.OK
    assert "fits: these settings" in capsys.readouterr().out
    assert main([*argv, "--host_memory", "200"]) == ExitCode.OUT_OF_MEMORY
    text = capsys.readouterr().out
    assert "does not fit: the host needs 243.7 GB of 200.0 GB for the 8 ranks of a node" in text
    assert "feasible settings: --fsdp" in text


def test_the_mean_length_of_responses_is_an_option_of_the_command(capsys):
    argv = ["plan", "--pretrain", "qwen2.5-7b", "--gpus", "1", "--gpu", "b200-180g"]
    argv += ["--fsdp", "--lora_rank", "16", "--rollout_batch_size", "1024"]
    rows = []
    for share in ("0.25", "1"):
        assert main([*argv, "--mean_length_share", share]) == ExitCode.OK
        rows += re.findall(r"keys and values of (\d+) rows", capsys.readouterr().out)
    assert int(rows[0]) > int(rows[1]) > 0


def random_setup(rng):
    name = rng.choice(list(MODELS))
    gpus = rng.choice([1, 2, 4, 8, 16, 64])
    options = {
        "fsdp": rng.random() < 0.5,
        "zero_stage": rng.choice([1, 2, 3]),
        "gradient_checkpointing": rng.random() < 0.7,
        "init_kl_coef": rng.choice([0.0, 0.01]),
        "lora_rank": rng.choice([0, 0, 16]),
        "engine_tp_size": rng.choice([t for t in (1, 2, 4, 8) if t <= min(8, gpus)]),
        "engine_mem_util": rng.choice([0.1, 0.3, 0.5, 0.7]),
        "enable_engine_sleep": rng.random() < 0.8,
        "advantage_estimator": rng.choice(["group_norm", "gae"]),
        "enable_ema": rng.random() < 0.2,
        "generate_max_len": rng.choice([512, 2048, 8192]),
        "adam_offload": rng.random() < 0.3,
    }
    host = rng.choice([None, 250e9, 1e12, 4e12])
    return setup_of(
        name, gpus, rng.choice(["h100-80g", "h200-141g", "l4-24g"]), host=host, **options
    )


def least_needs(setup):
    """What a run needs at the very least, from nothing but parameters: (device, engine, host)."""
    config, size, world = setup.config, setup.actor_size, setup.world_size
    vision = size.vision.parameters if size.vision else 0
    layer = 2 * size.hidden * (size.num_heads + size.num_kv_heads) * size.head_dim
    layer += 3 * size.hidden * size.intermediate * size.num_experts
    numbers = vision + size.num_layers * layer + size.vocab * size.hidden * (2 - size.is_tied)
    divides = config.fsdp or config.zero_stage == 3
    trained = 0.0 if config.lora_rank else 1.0
    has_critic = config.advantage_estimator == "gae"
    rank, host_states = 0.0, 0.0
    for share in (trained, 1.0) if has_critic else (trained,):
        own = numbers - (size.vocab * size.hidden if share and has_critic else 0)
        stored = 4 if config.fsdp else 2
        rank += stored * own / (world if divides else 1)
        states = (8 if config.fsdp else 12) * share * own / world
        if config.fsdp and config.fsdp_cpu_offload:
            rank -= stored * own / world
            host_states += states + stored * own / world
        elif config.adam_offload:
            host_states += states
        else:
            rank += states
    others = (config.init_kl_coef > 0) + config.enable_ema
    rank += others * 2 * numbers / (world if divides else 1)
    row = 2 * 2 * size.num_layers * size.num_kv_heads * size.head_dim / config.engine_tp_size
    longest = config.prompt_max_len + config.generate_max_len
    engine = 2 * numbers / config.engine_tp_size + row * longest
    meta = config.fsdp and 2 * numbers > 2e9
    host = 0.0 if meta else 4 * numbers
    return rank, engine, max(host, host_states)


@pytest.mark.full
def test_nothing_that_cannot_fit_is_called_feasible():
    rng = random.Random(20)
    feasible = 0
    for _ in range(500):
        setup = random_setup(rng)
        if not plan_memory(setup).fits:
            continue
        feasible += 1
        rank, engine, host = least_needs(setup)
        share = setup.config.engine_mem_util * setup.capacity_bytes
        assert engine < share, setup
        assert rank + share < setup.capacity_bytes, setup
        assert setup.host_bytes is None or host <= setup.host_bytes, setup
    assert 40 < feasible < 460


def test_nothing_that_is_advised_cannot_fit():
    rng = random.Random(21)
    for _ in range(6):
        found = advise(random_setup(rng))
        if found.plan.fits:
            rank, engine, _ = least_needs(found.plan.setup)
            share = found.plan.setup.config.engine_mem_util * found.plan.setup.capacity_bytes
            assert engine < share
            assert rank + share < found.plan.setup.capacity_bytes


def test_adapters_alone_keep_the_engine_s_weights_on_the_host():
    given = {"fsdp": True, "lora_rank": 16}
    merged = plan_memory(setup_of("7b", 8, "h100-80g", **given))
    apart = plan_memory(setup_of("7b", 8, "h100-80g", **given, lora_sync="adapter"))
    setup = apart.setup
    held = setup.compute_bytes * (setup.actor_size.parameters + setup.actor.adapters)
    of_phase = [{p.name: p for p in plan.phases}["train"] for plan in (merged, apart)]
    assert of_phase[1].host_bytes - of_phase[0].host_bytes == pytest.approx(held)
    assert of_phase[1].device_bytes == pytest.approx(of_phase[0].device_bytes)


def test_a_base_that_both_read_is_counted_once():
    lora = {"fsdp": True, "lora_rank": 16, "lora_sync": "adapter"}
    alone, shared = setup_of("7b", 1, "h100-80g", **lora), setup_of("7b", 2, "h100-80g", **lora)
    assert alone.shares_base
    base = alone.compute_bytes * alone.actor.stored
    for setup, others in ((alone, base), (shared, 0)):
        plan = {phase.name: phase for phase in plan_memory(setup).phases}
        weights = {t.name: t for p in plan.values() for t in p.terms if "engine: weights" in t.name}
        held = engine_room(setup).weight_bytes - others
        assert [t.num_bytes for t in weights.values()] == [pytest.approx(held)] * len(weights)
        assert weights["engine: weights, asleep"].is_on_host == (others == 0)
    # What is not held twice may be the engine's.
    wanted = {"engine_mem_util": 0.9, "init_kl_coef": 0.01}
    largest = [
        fitting_share(plan_memory(setup_of("7b", 1, "h100-80g", **wanted, **options)))
        for options in (lora | {"lora_sync": "merged"}, lora)
    ]
    assert largest[1] - largest[0] == pytest.approx(base / alone.capacity_bytes, abs=0.011)
    for options, is_shared in (
        ({"zero_stage": 2, "fsdp": False}, True),
        ({"zero_stage": 3, "fsdp": False}, False),
        ({"fsdp_cpu_offload": True}, False),
        ({"lora_sync": "merged"}, False),
    ):
        assert setup_of("7b", 1, "h100-80g", **lora | options).shares_base == is_shared
