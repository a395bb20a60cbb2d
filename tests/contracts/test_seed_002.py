"""The design philosophy of the strategy module: its code blocks run, its principles hold.

The page has lost the indentation of its loops and classes; it is restored here. Further
substitutions stand beside the block they are made in.
"""

import ast
import inspect
from types import SimpleNamespace

import pytest
import torch
from tests.ranks import run_multiprocess

from lightrft.strategy import FakeStrategy, StrategyBase, get_fake_strategy
from lightrft.strategy.config import StrategyConfig

FACTORY = """
from lightrft.strategy import get_strategy
# Automatically selects DeepSpeed or FSDP based on args.fsdp
strategy = get_strategy(args)
"""
CONFIGURATION = """
from lightrft.strategy.config import StrategyConfig
config = StrategyConfig.from_args(args)
# Access parameters with type safety
learning_rate = config.actor_learning_rate
use_bf16 = config.bf16
"""
INTERFACE = """
class StrategyBase(ABC):
    def setup_distributed(self, timeout=None) -> None: ...
    def create_optimizer(self, model, **kwargs) -> Optimizer: ...
    def prepare(self, *models, is_rlhf=False) -> Any: ...
    def backward(self, loss, model, optimizer, **kwargs) -> None: ...
    def optimizer_step(self, optimizer, model, scheduler, **kwargs) -> None: ...
    def save_ckpt(self, model, save_dir, **kwargs) -> None: ...
    def load_ckpt(self, model, load_dir, **kwargs) -> Any: ...
"""
BASIC_USAGE = """
from lightrft.strategy import get_strategy
# Initialize strategy
strategy = get_strategy(args)
# Prepare models and optimizers
actor, critic, reward_models, initial_model = strategy.prepare_models_and_optimizers(
    actor, critic, reward_models, initial_model, args, max_steps
)
"""
# `actor_optimizer` and `actor_scheduler`, which the page never defines, are those that
# prepare_models_and_optimizers gave the actor. The page's loop follows its preparation directly.
TRAINING_LOOP = """
# Training loop
for batch in dataloader:
    loss = compute_loss(batch)
    strategy.backward(loss, actor, actor_optimizer)
    strategy.optimizer_step(actor_optimizer, actor, actor_scheduler)
"""
CONFIGURED_USAGE = """
from lightrft.strategy.config import StrategyConfig
# Create configuration
config = StrategyConfig(
    seed=42,
    max_norm=1.0,
    micro_train_batch_size=4,
    train_batch_size=32,
    bf16=True,
    zero_stage=2
)
# Use configuration to create strategy
strategy = get_strategy(config)
"""
FAKE_USAGE = """
from lightrft.strategy import get_fake_strategy
# Use fake strategy for testing
strategy = get_fake_strategy()
# All operations work without distributed environment
strategy.setup_distributed()
strategy.backward(loss, model, optimizer)
strategy.save_ckpt(model, "checkpoints")
"""
BEFORE = """
seed = getattr(args, "seed", 42) # Type: Any
max_norm = getattr(args, "max_norm", 1.0) # Type: Any
"""
AFTER = """
config = StrategyConfig.from_args(args)
seed = config.seed # Type: int
max_norm = config.max_norm # Type: float
"""


def run(code, names):
    exec(compile(code, "seed 002", "exec"), names)
    return names


def strategies():
    from lightrft.strategy.deepspeed.strategy import DeepspeedStrategy
    from lightrft.strategy.fsdp2.strategy import FSDPV2Strategy

    return FakeStrategy, FSDPV2Strategy, DeepspeedStrategy


def train_like_the_page(args):
    """The usage of the page; losses and final weights."""
    torch.manual_seed(7)
    names = {
        "args": args,
        "actor": torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 1)),
        "critic": None,
        "reward_models": None,
        "initial_model": None,
        "max_steps": 10,
    }
    names = run(BASIC_USAGE, names)
    actor = names["actor"]
    losses = []

    def compute_loss(batch):
        loss = actor.model(batch).square().mean()
        losses.append(loss.item())
        return loss

    generator = torch.Generator().manual_seed(1)
    names |= {
        "actor_optimizer": actor.optimizer,
        "actor_scheduler": actor.scheduler,
        "compute_loss": compute_loss,
        "dataloader": torch.randn(6, 2, 3, generator=generator),
    }
    run(TRAINING_LOOP, names)
    assert len(losses) == 6
    with names["strategy"] as strategy:
        return type(strategy).__name__, losses


def on_both_backends(rank, world_size):
    """Zero code changes: the same program, only `args` differ."""
    torch.distributed.init_process_group("gloo")
    found = {}
    for fsdp in (True, False):
        args = SimpleNamespace(
            fsdp=fsdp, bf16=False, train_batch_size=2, actor_learning_rate=0.1, lr_warmup_ratio=0.0
        )
        name, losses = train_like_the_page(args)
        found[name] = losses
        strategy = run(FACTORY, {"args": args})["strategy"]
        # "Original args object is preserved for compatibility"
        assert strategy.args is args
        strategy.close()
    from lightrft.strategy import get_strategy

    names = run(CONFIGURED_USAGE, {"get_strategy": get_strategy})
    assert names["strategy"].args is names["config"]
    assert names["strategy"].accumulated_gradient == 8
    return found


@pytest.mark.full
@pytest.mark.deepspeed
def test_backends_are_switched_with_zero_code_changes():
    (found,) = run_multiprocess(on_both_backends, 1, timeout_seconds=180)
    assert set(found) == {"FSDPV2Strategy", "DeepspeedStrategy"}
    left, right = found.values()
    assert left == pytest.approx(right, rel=1e-5)
    assert left[-1] != left[0]


def test_configuration_is_typed():
    args = SimpleNamespace(seed=5, actor_learning_rate=2e-5, bf16=False, anything="else")
    names = run(CONFIGURATION, {"args": args})
    assert names["learning_rate"] == 2e-5
    assert names["use_bf16"] is False
    names = {"args": args, "StrategyConfig": StrategyConfig}
    before, after = run(BEFORE, dict(names)), run(AFTER, dict(names))
    assert (before["seed"], before["max_norm"]) == (after["seed"], after["max_norm"]) == (5, 1.0)
    assert (type(after["seed"]), type(after["max_norm"])) == (int, float)
    # The page: the method get_extra_arg gives access to non-standard parameters.
    assert names["StrategyConfig"].from_args(args).get_extra_arg("anything") == "else"


def test_every_strategy_inherits_from_the_base_and_implements_the_interface():
    page = ast.parse(INTERFACE).body[0]
    assert isinstance(page, ast.ClassDef)
    for strategy in strategies():
        assert issubclass(strategy, StrategyBase)
        assert not inspect.isabstract(strategy)
        for method in page.body:
            assert isinstance(method, ast.FunctionDef)
            own = inspect.signature(getattr(strategy, method.name)).parameters
            positional = [
                parameter
                for parameter in method.args.args
                # `*models` of this page is `*models_or_model_optim_pairs` in the source, seed 004.
                if parameter.arg != "models"
            ]
            assert [p.arg for p in positional] == list(own)[: len(positional)], method.name
            assert (method.args.vararg is None) or any(
                p.kind is p.VAR_POSITIONAL for p in own.values()
            )


def test_the_fake_strategy_works_without_a_distributed_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(torch.ones(1, 2)).sum()
    names = run(FAKE_USAGE, {"loss": loss, "model": model, "optimizer": optimizer})
    assert not torch.distributed.is_initialized()
    assert model.weight.grad is not None
    strategy = names["strategy"]
    expected = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    strategy.load_ckpt(model, "checkpoints", load_module_only=True)
    assert model.weight.equal(expected)


def test_strategies_clean_up_as_context_managers():
    with get_fake_strategy() as strategy:
        assert strategy.get_rank() == 0
    strategy.close()


def test_messages_of_unsupported_operations_are_clear(tmp_path):
    strategy = get_fake_strategy()
    with pytest.raises(TypeError, match=r"optimizer_step got unknown options: clip"):
        strategy.optimizer_step(torch.optim.SGD([torch.zeros(1)], 1.0), None, None, clip=1)
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        strategy.load_ckpt(torch.nn.Linear(1, 1), str(tmp_path))
