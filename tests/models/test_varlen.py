"""A trial on the device decides whether packed rows go through one kernel."""

from types import SimpleNamespace

import pytest
import torch
from tests.models import planted_kernels as kernels
from tests.models.tiny import tiny_model
from torch._subclasses import FakeTensorMode
from transformers import DeepseekV3Config, Qwen3Config, Qwen3NextConfig

from lightrft.config import TrainConfig
from lightrft.models import Actor, attention, varlen
from lightrft.models.varlen import KernelShape, KernelTrial, try_kernel
from lightrft.stages import machine_choices
from lightrft.stages.machine_choices import decide_by_machine, read_model_facts
from lightrft.strategy.fsdp2.sharding import find_blocks

SHAPE = KernelShape("cpu", torch.bfloat16, 64, 64)
FAILING = {
    "raising": "varlen_attn fails with grouped heads: RuntimeError: Number of heads in key/value",
    "mixing": "varlen_attn computes others than plain attention: error ",
    "losing_gradients": "varlen_attn computes others than plain attention: error ",
}


@pytest.mark.parametrize("kernel", ["without_argument", "with_argument"])
def test_a_kernel_that_works_is_taken_whatever_its_signature(kernel, monkeypatch):
    kernels.plant(monkeypatch, getattr(kernels, kernel))
    trial = try_kernel(SHAPE)
    assert trial.works
    assert trial.packing.startswith("one kernel for all rows: varlen_attn, tried here with error ")


def test_keys_before_the_first_query_are_tried_apart(monkeypatch):
    shared = SHAPE._replace(has_prefixes=True)
    kernels.plant(monkeypatch, kernels.with_argument)
    assert try_kernel(shared).works
    kernels.plant(monkeypatch, kernels.aligning_starts)
    assert try_kernel(SHAPE).works
    assert try_kernel(shared).finding.startswith("varlen_attn computes others than plain attention")


@pytest.mark.parametrize("kernel", FAILING)
def test_a_kernel_that_raises_or_computes_otherwise_is_left_alone(kernel, monkeypatch):
    kernels.plant(monkeypatch, getattr(kernels, kernel))
    trial = try_kernel(SHAPE)
    assert not trial.works
    assert trial.packing.startswith(f"one call for each row: {FAILING[kernel]}")
    assert "\n" not in trial.packing


def test_each_shape_is_tried_once_in_a_process(monkeypatch):
    kernels.plant(monkeypatch, kernels.without_argument)
    tried = []
    real = varlen.run_trial
    monkeypatch.setattr(varlen, "run_trial", lambda shape: (tried.append(shape), real(shape))[1])
    for size in (64, 64, 32):
        rows = torch.zeros(1, 2, 3, size, dtype=torch.bfloat16)
        assert attention.has_varlen_kernel(rows, rows, rows)
    assert tried == [SHAPE, SHAPE._replace(head_dim=32, value_dim=32)]


def test_a_trial_draws_no_random_numbers_and_needs_no_gradients_of_the_caller(monkeypatch):
    kernels.plant(monkeypatch, kernels.without_argument)
    before = torch.get_rng_state()
    with torch.no_grad():
        assert try_kernel(SHAPE).works
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "shape, reason",
    [
        (SHAPE, "is for GPUs, not for cpu"),
        (SHAPE._replace(device_type="cuda", dtype=torch.float32), "half precision, not torch.flo"),
        (SHAPE._replace(device_type="cuda", value_dim=512), "takes heads up to 256 numbers"),
    ],
)
def test_where_no_kernel_can_be_nothing_is_tried(shape, reason, monkeypatch):
    monkeypatch.setattr(varlen, "known_trials", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    trial = try_kernel(shape)
    assert not trial.works
    assert reason in trial.finding


def test_the_shape_of_a_model_is_that_of_its_heads():
    config = Qwen3Config(hidden_size=64, num_attention_heads=4, head_dim=48)
    shape = KernelShape.of_model(config, "cuda", bf16=True)
    assert shape == KernelShape("cuda", torch.bfloat16, 48, 48)
    latent = DeepseekV3Config(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    shape = KernelShape.of_model(latent, "cpu", bf16=False)
    assert shape == KernelShape("cpu", torch.float32, 192, 128)


def test_recurrent_models_pad_whatever_the_kernel_does(monkeypatch):
    kernels.plant(monkeypatch, kernels.without_argument)
    trial = attention.try_packing(Qwen3NextConfig(num_hidden_layers=4), "cpu", bf16=True)
    reason = "Qwen3NextForCausalLM may have layers that are called once per packed sequence"
    assert trial == KernelTrial(False, reason)


def decided(monkeypatch, kernel):
    """The decision of a run on a GPU whose torch has a kernel; the reason that it keeps."""
    kernels.plant(monkeypatch, getattr(kernels, kernel))
    real = attention.try_packing
    monkeypatch.setattr(machine_choices, "load_config", lambda path: Qwen3Config(head_dim=64))
    monkeypatch.setattr(machine_choices, "count_model", lambda path: 5)
    monkeypatch.setattr(
        machine_choices, "try_packing", lambda c, device, bf16: real(c, "cpu", bf16=bf16)
    )
    context = SimpleNamespace(
        device=torch.device("cuda"),
        has_gpu=True,
        computes_in_bf16=True,
        chosen_options={},
        print_detail=lambda line: None,
        all_reduce=lambda facts, op: facts,
    )
    config = TrainConfig(fsdp=True, pretrain="m", fused_linear_logprob=True, meta_init=False)
    facts = read_model_facts(config, context)
    return decide_by_machine(config, context, facts=facts), context.chosen_options


def test_packing_stays_on_where_only_the_argument_is_missing(monkeypatch):
    config, reasons = decided(monkeypatch, "without_argument")
    assert config.packing_samples
    assert reasons == {"packing_samples": "one kernel for rows of any length"}


@pytest.mark.parametrize("kernel", FAILING)
def test_packing_is_off_with_the_reason_where_the_kernel_fails(kernel, monkeypatch):
    config, reasons = decided(monkeypatch, kernel)
    assert not config.packing_samples
    assert reasons["packing_samples"].startswith(FAILING[kernel])


class Newer:
    """FlashAttention 3 of a planted torch: a kernel takes the place of another one."""

    def __init__(self, monkeypatch, kernel):
        self.active = None

        def activate(name):
            if isinstance(kernel, Exception):
                raise kernel
            self.active = name
            monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)

        def restore():
            self.active = None
            monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernels.with_argument)

        kernels.plant(monkeypatch, kernels.with_argument)
        monkeypatch.setattr(varlen, "activate_flash_attention_impl", activate)
        monkeypatch.setattr(varlen, "restore_flash_attention_impl", restore)
        monkeypatch.setattr(varlen, "current_flash_attention_impl", lambda: self.active)


def test_flash_attention_3_is_taken_where_it_passes_the_same_trial(monkeypatch):
    newer = Newer(monkeypatch, kernels.without_argument)
    varlen.use_newer_kernel([SHAPE])
    assert newer.active == "FA3"
    assert "one kernel for all rows: varlen_attn of FA3, tried here" in try_kernel(SHAPE).packing
    varlen.use_own_kernel()
    assert newer.active is None
    assert "one kernel for all rows: varlen_attn, tried here" in try_kernel(SHAPE).packing


@pytest.mark.parametrize(
    "kernel", [kernels.mixing, kernels.raising, ImportError("no flash_attn_interface")]
)
def test_torchs_own_kernel_is_put_back_where_flash_attention_3_fails(kernel, monkeypatch):
    newer = Newer(monkeypatch, kernel)
    varlen.use_newer_kernel([SHAPE])
    assert newer.active is None
    assert "one kernel for all rows: varlen_attn, tried here" in try_kernel(SHAPE).packing


def test_this_torch_offers_what_the_choice_of_a_kernel_asks_for(monkeypatch):
    monkeypatch.setattr(varlen, "known_trials", {SHAPE: KernelTrial(True, "varlen_attn")})
    # Without the package nothing changes; with it, a CPU passes no trial.
    varlen.use_newer_kernel([SHAPE])
    assert torch.nn.attention.current_flash_attention_impl() is None
    assert try_kernel(SHAPE).finding == "varlen_attn"


@pytest.mark.full
def test_compiled_blocks_take_any_number_of_packed_rows():
    actor = Actor(tiny_model("llama"))
    actor.pack_samples()
    for block in find_blocks(actor):
        block.compile(backend="eager")
    torch.compiler.reset()
    # Fixed and free sizes, each in two calls: layers of transformers 5.24 share a wrapper.
    with torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True):
        for num_rows in range(2, 8):
            token_ids = torch.arange(num_rows * 9).reshape(num_rows, 9) % 90
            mask = torch.arange(9) < 2 + torch.arange(num_rows)[:, None]
            with torch.no_grad():
                assert actor(token_ids, mask).logprobs.isfinite().all()


def test_layers_share_the_masks_of_a_gpu():
    with FakeTensorMode():
        states = torch.empty(3, 1, 2, 9, 8, device="cuda")
        bounds = attention.SequenceBounds((0, 5, 9), states)
        for _ in range(2):
            attention.attend_each(states, bounds, {"sliding_window": 3})
    assert len(bounds.masks) == 2
