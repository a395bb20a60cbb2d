"""The source of `lightrft.strategy.strategy_base`: signatures, errors and order of operations.

What it says of the rollout engine's behaviour is checked beside the engines; its signatures are
checked here with all others.
"""

import ast
import inspect
import math
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from lightrft.strategy import FakeStrategy, get_fake_strategy
from lightrft.strategy.backend import Backend
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.distributed import collectives
from lightrft.strategy.distributed.context import DistributedContext
from lightrft.strategy.distributed.process_groups import start_process_group
from lightrft.strategy.strategy_base import (
    EngineStatus,
    ModelOptimPair,
    ModelOrModelOptimPair,
    StrategyBase,
    is_actor,
)

# Annotations, which name types of libraries that are not ours, are left out.
SIGNATURES = """
class StrategyBase:
    def __init__(self, seed, max_norm, micro_train_batch_size, train_batch_size, args=None): ...
    def set_seed(self, seed): ...
    def setup_distributed(self, timeout=None, num_gpu_per_node=8): ...
    def create_optimizer(self, model, **kwargs): ...
    def prepare(self, *models_or_model_optim_pairs, is_rlhf=False): ...
    def backward(self, loss, model, optimizer, **kwargs): ...
    def optimizer_step(self, optimizer, model, scheduler, name="model", **kwargs): ...
    def setup_dataloader(self, replay_buffer, batch_size, pin_memory=False, shuffle=True,
                         collate_fn=None, drop_last=True, sampler=None, consumed_samples=0): ...
    def save_ckpt(self, model, save_dir, tag=None, max_num=3, max_mem=1000, client_state=None,
                  save_latest=True): ...
    def load_ckpt(self, model, load_dir, tag=None, load_module_strict=True,
                  load_optimizer_states=True, load_lr_scheduler_states=True,
                  load_module_only=False): ...
    def all_reduce(self, data, op="mean"): ...
    def all_gather(self, data): ...
    def print(cls, *msg): ...
    def is_rank_0(cls): ...
    def get_rank(self): ...
    def unwrap_model(self, model): ...
    def prepare_models_and_optimizers(self, actor, critic, reward_models, initial_model, args,
                                      max_steps): ...
    def prepare_reward_model(self, reward_model, args=None, max_steps=100000000): ...
    def report_memory(cls, prefix=""): ...
    def setup_inference_engine(self, args, engine_type="vllm", actor=None): ...
    def maybe_sleep_inference_engine(self): ...
    def wakeup_inference_engine(self): ...
    def engine_generate_local(self, sampling_params, prompt_token_ids=None,
                              multi_modal_inputs=None): ...
    def _build_multimodal_inputs(cls, all_prompts, all_images, images_num, all_videos,
                                 videos_num): ...
    def gather_and_generate(self, sampling_params, all_prompt_token_ids=None, all_prompts=None,
                            all_images=None, sleep_engine=True, images_num=None, all_videos=None,
                            videos_num=None): ...
    def update_engine_weights(self, actor): ...
    def sync_and_clear_cache(cls): ...
    def init_model_context(self): ...
    def maybe_offload_optimizer(self, optimizer): ...
    def maybe_load_optimizer(self, optimizer, device="torch.cuda.current_device()"): ...
"""
ABSTRACT = {"create_optimizer", "backward", "optimizer_step", "save_ckpt", "load_ckpt"}
CLASS_METHODS = {"print", "is_rank_0", "report_memory", "sync_and_clear_cache"}
# Defaults that depend on the machine: GPUs are counted, and the current device is asked for when
# the method runs instead of when the module is imported.
DECIDED = {
    ("setup_distributed", "num_gpu_per_node"): None,
    ("maybe_load_optimizer", "device"): None,
}
METHODS = {method.name: method for method in ast.parse(SIGNATURES).body[0].body}


def strategies():
    from lightrft.strategy.deepspeed.strategy import DeepspeedStrategy
    from lightrft.strategy.fsdp2.strategy import FSDPV2Strategy

    return StrategyBase, FakeStrategy, FSDPV2Strategy, DeepspeedStrategy


def promised(method):
    """(names of positional parameters, defaults of all named ones)."""
    arguments = method.args
    names = [a.arg for a in arguments.args if a.arg not in ("self", "cls")]
    late = names[len(names) - len(arguments.defaults) :] if arguments.defaults else []
    defaults = dict(zip(late, map(ast.literal_eval, arguments.defaults), strict=True))
    for name, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        defaults[name.arg] = ast.literal_eval(value)
    return names, defaults


@pytest.mark.parametrize("name", [name for name in METHODS if name != "__init__"])
def test_signatures_and_defaults(name):
    names, defaults = promised(METHODS[name])
    for strategy in strategies():
        own = dict(inspect.signature(getattr(strategy, name)).parameters)
        own.pop("self", None)
        assert list(own)[: len(names)] == names, strategy
        for parameter, value in defaults.items():
            expected = DECIDED.get((name, parameter), value)
            assert own[parameter].default == expected, (strategy, parameter)
        # Whatever was added has a default, so that calls of the published interface still work.
        for parameter in list(own.values())[len(names) :]:
            is_optional = parameter.default is not parameter.empty
            assert is_optional or parameter.kind in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            )


def test_the_constructor_takes_the_four_numbers_first():
    names, _ = promised(METHODS["__init__"])
    assert list(inspect.signature(StrategyBase.__init__).parameters)[1:6] == names
    for strategy in strategies()[1:]:
        own = inspect.signature(strategy.__init__).parameters
        assert list(own)[1:5] == names[:4]
        assert own["args"].default is None


def test_abstract_and_class_methods_are_those_of_the_source():
    # What the source leaves to subclasses is the backend's, and there is no strategy without one.
    with pytest.raises(TypeError, match="backend"):
        StrategyBase(1, 1.0, 1, 1)
    assert Backend.__abstractmethods__
    for name in ABSTRACT:
        assert callable(getattr(StrategyBase, name)), name
    for name in CLASS_METHODS:
        assert inspect.ismethod(getattr(StrategyBase, name)), name


def test_names_of_the_module():
    assert {s.name: s.value for s in EngineStatus} == {"SLEEPED": 0, "WAKEUP": 1}
    assert ModelOptimPair == tuple[torch.nn.Module, torch.optim.Optimizer]
    assert ModelOrModelOptimPair == torch.nn.Module | ModelOptimPair
    model = torch.nn.Linear(1, 1)
    assert not is_actor(model)
    model.is_actor = True
    assert is_actor(model)


def test_construction_stores_configures_and_starts_in_the_published_order(monkeypatch):
    calls = []
    for owner, name in (
        (FakeStrategy, "setup_distributed"),
        (DistributedContext, "form_groups"),
        (DistributedContext, "beside"),
    ):
        original = getattr(owner, name)

        def recorded(self, *args, _name=name, _original=original, **kwargs):
            calls.append((_name, args, kwargs))
            if isinstance(self, FakeStrategy):
                # 1-3: stored, configured and copied before anything is started.
                assert (self.seed, self.max_norm) == (7, 0.5)
                assert isinstance(self.config, StrategyConfig)
                assert self.adam_offload is True
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, recorded)
    args = SimpleNamespace(adam_offload=True, zpg=2, overlap_comm=True, grad_accum_dtype="fp32")
    strategy = FakeStrategy(7, 0.5, 2, 8, args)
    assert [name for name, _, _ in calls] == ["setup_distributed", "form_groups", "beside"]
    assert calls[0][2] == {"timeout": timedelta(minutes=60)}
    assert (strategy.zpg, strategy.grad_accum_dtype, strategy.overlap_comm) == (2, "fp32", True)
    assert strategy.args is args
    assert strategy.inference_engine is None
    assert strategy.inference_engine_status is EngineStatus.SLEEPED
    assert strategy.broadcast_manager is None
    assert strategy.time_steps["anything"] == 0
    assert strategy._profile_step == 0
    assert strategy.sp_data_processor is not None
    assert strategy.genlen_analyser is not None


def test_without_args_the_configuration_has_its_defaults():
    assert FakeStrategy(1, 0.0, 1, 1).config.adam_betas == StrategyConfig().adam_betas


def test_the_message_about_batch_sizes_has_the_published_lines():
    with pytest.raises(ValueError, match="train_batch_size must be divisible by") as caught:
        FakeStrategy(1, 1.0, 3, 8)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(
        "train_batch_size must be divisible by (micro_train_batch_size * world_size)"
    )
    assert "  train_batch_size: 8" in lines
    assert "  micro_train_batch_size: 3" in lines
    assert "  world_size: 1" in lines
    assert "  Required: 8 % (3 * 1) == 0" in lines


def test_accumulated_gradient_is_the_quotient():
    assert FakeStrategy(1, 1.0, 2, 8).accumulated_gradient == 4


@pytest.mark.parametrize("given, missing", [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_a_missing_environment_variable_is_named(monkeypatch, given, missing):
    monkeypatch.setenv(given, "1")
    monkeypatch.delenv(missing, raising=False)
    with pytest.raises(RuntimeError, match=f"Could not find {missing} in the torch env.*torchrun"):
        start_process_group(None)


def test_unsupported_engine_types_are_refused():
    with pytest.raises(ValueError, match="engine_type: got 'triton'"):
        get_fake_strategy({"engine_type": "triton"})
    with pytest.raises(ValueError, match="Unsupported engine type: triton"):
        get_fake_strategy().setup_inference_engine(None, "triton")


@pytest.mark.parametrize("op", ["min", "avg", "prod"])
def test_all_reduce_asserts_its_operation(op):
    with pytest.raises(AssertionError, match=op):
        get_fake_strategy().all_reduce(1.0, op)


def test_reductions_return_what_they_got_and_leave_it_unchanged():
    strategy = get_fake_strategy()
    given = {"a": torch.tensor([1.0, 2.0]), "b": {"c": 3}, "d": True}
    result = strategy.all_reduce(given, "sum")
    assert result["a"].tolist() == [1.0, 2.0]
    assert result["a"] is not given["a"]
    assert result["b"]["c"] == 3
    assert isinstance(strategy.all_reduce(2.5), float)
    assert strategy.all_gather(2.5).shape == (1,)
    assert strategy.all_gather({"x": torch.ones(2, 3)})["x"].shape == (2, 3)


def test_printing_has_the_published_prefix(capsys):
    StrategyBase.print("hello", 3)
    assert capsys.readouterr().out.startswith("[StrategyINFO ")
    FakeStrategy.report_memory("now")
    out = capsys.readouterr().out
    assert out.startswith("MEMORY STATUS: now, DRIVER_USED=")
    assert " GB, ALLOCATED=" in out


def test_unwrapping_takes_the_module_inside():
    inner = torch.nn.Linear(1, 1)
    wrapper = torch.nn.Module()
    wrapper.module = inner
    strategy = get_fake_strategy()
    assert strategy.unwrap_model(wrapper) is inner
    assert strategy.unwrap_model(inner) is inner


def test_schedules_warm_up_and_fall_to_a_tenth():
    strategy = get_fake_strategy(
        {
            "actor_learning_rate": 1e-3,
            "critic_learning_rate": 2e-3,
            "lr_warmup_ratio": 0.25,
            "train_batch_size": 1,
            "critic_pretrain": "somewhere",
        }
    )
    max_steps = 10
    actor, critic, rewards, reference = strategy.prepare_models_and_optimizers(
        torch.nn.Linear(2, 1),
        torch.nn.Linear(2, 1),
        [torch.nn.Linear(2, 1)],
        torch.nn.Linear(2, 1),
        None,
        max_steps,
    )
    assert isinstance(rewards, list)
    assert not reference.weight.requires_grad
    for ready, peak in ((actor, 1e-3), (critic, 2e-3)):
        model, optimizer, scheduler = ready
        assert optimizer.defaults["betas"] == (0.9, 0.95)
        rates = []
        for _ in range(max_steps + 1):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        warmup = math.ceil(max_steps * 0.25)
        for step, rate in enumerate(rates):
            if step < warmup:
                # The first step trains: ceil(max_steps * ratio) steps lie below the peak.
                expected = (step + 1) / (warmup + 1)
            else:
                cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (max_steps - warmup)))
                expected = 0.1 + 0.9 * cosine
            assert rate == pytest.approx(peak * expected)
        assert isinstance(model, torch.nn.Module)
    assert is_actor(actor.model)


def test_a_remote_reward_leaves_reward_models_alone():
    strategy = get_fake_strategy({"remote_rm_url": "http://nowhere", "train_batch_size": 1})
    reward = torch.nn.Linear(1, 1)
    ready = strategy.prepare_models_and_optimizers(
        torch.nn.Linear(1, 1), None, reward, None, None, 1
    )
    assert ready[2] is reward
    assert reward.weight.requires_grad
    assert ready[1] == (None, None, None)


def test_a_reward_model_is_prepared_as_a_triple():
    args = SimpleNamespace(
        fsdp=False, actor_learning_rate=1e-3, adam_betas=(0.9, 0.95), l2=0.1, lr_warmup_ratio=0.0
    )
    model, optimizer, scheduler = get_fake_strategy().prepare_reward_model(
        torch.nn.Linear(2, 2), args, 4
    )
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert scheduler is not None
    assert model.weight.requires_grad


def test_the_loader_is_sharded_and_resumable():
    loader = get_fake_strategy().setup_dataloader(list(range(8)), 2, consumed_samples=4)
    assert sum(len(batch) for batch in loader) == 4
    sampler = list(range(3))
    assert get_fake_strategy().setup_dataloader([5, 6, 7], 1, sampler=sampler).sampler is sampler


def test_models_are_built_in_a_context_that_logs_memory(caplog):
    caplog.set_level("INFO")
    with get_fake_strategy().init_model_context():
        pass
    assert "Finished init_model_context" in caplog.text


def test_ranks_synchronise_before_memory_is_cleared(monkeypatch):
    calls = []
    monkeypatch.setattr(collectives, "barrier", lambda *_: calls.append("barrier"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    StrategyBase.sync_and_clear_cache()
    assert calls == ["synchronize", "barrier", "empty_cache"]
