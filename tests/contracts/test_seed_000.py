"""The strategy usage guide: its Python blocks run as printed, on both backends, on two ranks.

`BLOCKS` holds each block with the substitutions that the harness makes, and why. Free names are
bound in `names_of`. A literal `...` among arguments is dropped, and where there is no GPU
`torch.cuda.synchronize` does nothing. The guide's tables, flags and recipes are in test_seed_001.
"""

import re
import textwrap
import time
import traceback
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.engines.fake_engine import FakeEngine
from tests.ranks import run_multiprocess
from tests.runs import TextReward
from torch import nn

from lightrft.datasets.types import Prompt
from lightrft.engines.types import EngineConfig, EngineStatus
from lightrft.models import Actor, Critic
from lightrft.models.loading import load_tokenizer
from lightrft.strategy import get_strategy
from lightrft.strategy.fsdp2.strategy import FSDPV2Strategy
from lightrft.tools.model_presets import write_tiny_model
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer

BASIC_SETUP = """
from lightrft.strategy import get_strategy
from lightrft.utils import add_arguments

def train(args):
    # Create strategy (automatically selects DeepSpeed or FSDP based on args)
    strategy = get_strategy(args)

    # Setup inference engine for generation
    strategy.setup_inference_engine(args, engine_type='vllm')

    # Access the engine if needed
    vllm_engine = strategy.inference_engine

    # Create trainer
    trainer = SPMDPPOTrainer(
        strategy=strategy,
        actor=actor,
        critic=critic,
        reward_model=reward_model,
        initial_model=initial_model,
        ema_model=ema_model,
        actor_optim=actor_optim,
        critic_optim=critic_optim,
        actor_scheduler=actor_scheduler,
        critic_scheduler=critic_scheduler,
        ...
    )
"""
TRAINING_OPERATIONS = """
# Backward pass
strategy.backward(loss, model, optimizer)

# Optimizer step with gradient clipping
strategy.optimizer_step(optimizer, model, scheduler, name="actor")

# Distributed communication
averaged_value = strategy.all_reduce(local_value, op="mean")
gathered_values = strategy.all_gather(local_value)
"""
MEMORY_OPTIMIZED = """
def ppo_train(self, global_steps=0):
    torch.cuda.synchronize()
    train_begin = time.time()

    # Load optimizer states from CPU to GPU (FSDP only)
    self.strategy.maybe_load_optimizer(self.actor_optim)

    # Perform training
    train_ret = super().ppo_train(global_steps)

    # Offload optimizer states from GPU to CPU (FSDP only)
    self.strategy.maybe_offload_optimizer(self.actor_optim)

    torch.cuda.synchronize()
    self.strategy.print(f"PPO Train TIMECOST {time.time() - train_begin}")

    # Synchronize actor weights to inference engine
    self.strategy.update_engine_weights(self.actor)

    return train_ret
"""
WEIGHT_SYNC = """
# Update inference engine with latest actor weights
strategy.update_engine_weights(actor)
"""
TEXT_GENERATION = """
# Tokenize prompts (without padding for efficiency)
all_prompt_token_ids = self.tokenize_fn(
    all_prompts,
    self.prompt_max_len,
    padding=False
)["input_ids"]

# Generate responses with automatic distribution
all_outputs = self.strategy.gather_and_generate(
    sampling_params=sampling_params,
    all_prompt_token_ids=all_prompt_token_ids,
    sleep_engine=True  # Automatically sleep engine after generation
)

if dist.get_rank(self.vllm_mp_group) == 0:
    self.strategy.print(f"Generated {len(all_outputs)} outputs")
"""
MULTIMODAL_GENERATION = """
# Generate with multimodal inputs
all_outputs = self.strategy.gather_and_generate(
    sampling_params=sampling_params,
    all_prompts=all_prompts,        # Text prompts
    all_images=all_images,          # Image data
    images_num=images_num,          # Number of images per prompt
    sleep_engine=True
)
"""
ARGUMENT_PARSER = """
from lightrft.utils import add_arguments
import argparse

# Create parser
parser = argparse.ArgumentParser()

# Add LightRFT arguments
add_arguments(parser)

# Parse arguments
args = parser.parse_args()
"""
SELECTION_LOGIC = """
# In get_strategy() function
if args.fsdp:
    strategy = FSDPV2Strategy(...)
else:
    strategy = DeepspeedStrategy(...)
"""
ENGINE_LIFECYCLE = """
# Engine lifecycle management
strategy.setup_inference_engine(args, engine_type='vllm')  # Creates and wakes engine
strategy.maybe_sleep_inference_engine()                     # Sleep to save memory
strategy.wakeup_inference_engine()                          # Wake for generation
"""
REWARD_MODELS = """
# Multiple reward models
reward_models = [reward_model_1, reward_model_2, reward_model_3]
strategy = get_strategy(args)

# Models are automatically sharded across GPUs
prepared_rms = [strategy.prepare_model(rm, shard_size=8) for rm in reward_models]
"""
BLOCKS = {
    # vLLM needs its own environment: the embedded engine takes its place.
    "basic setup": (BASIC_SETUP, {"engine_type='vllm'": "engine_type='hf'"}),
    "training operations": (TRAINING_OPERATIONS, {}),
    # A method with super(): it stands in a subclass of the trainer.
    "memory optimized": (MEMORY_OPTIMIZED, {}),
    "weight sync": (WEIGHT_SYNC, {}),
    "text generation": (TEXT_GENERATION, {}),
    "multimodal generation": (MULTIMODAL_GENERATION, {}),
    # The test process has a command line of its own.
    "argument parser": (ARGUMENT_PARSER, {"parse_args()": "parse_args(command_line)"}),
    "selection logic": (SELECTION_LOGIC, {}),
    "engine lifecycle": (ENGINE_LIFECYCLE, {"engine_type='vllm'": "engine_type='hf'"}),
    "reward models": (REWARD_MODELS, {}),
}
BACKENDS = ("fsdp", "deepspeed")


def length_reward():
    """Return the reward of the blocks."""
    return TextReward(lambda text: sum(map(ord, text)) % 3)


class World:
    """What the free names of the blocks stand for, on one backend."""

    def __init__(self, backend, path):
        self.args = SimpleNamespace(
            fsdp=backend == "fsdp",
            zero_stage=2,
            pretrain=path,
            bf16=False,
            seed=3,
            train_batch_size=16,
            micro_train_batch_size=8,
            rollout_batch_size=4,
            n_samples_per_prompt=4,
            generate_max_len=4,
            engine_type="hf",
            adam_offload=True,
            init_kl_coef=0.01,
            use_kl_loss=True,
            advantage_estimator="gae",
            actor_learning_rate=1e-3,
            lr_warmup_ratio=0.0,
            enable_engine_sleep=True,
        )
        self.strategy = get_strategy(self.args)
        self.tokenizer = load_tokenizer(path)
        texts = ["one", "two", "three", "four"]
        self.prompts = [
            Prompt(i, t, tuple(self.tokenizer(t)["input_ids"])) for i, t in enumerate(texts)
        ]
        self.actor, self.critic, _, self.reference = self.strategy.prepare_models_and_optimizers(
            Actor.from_pretrained(path),
            Critic.from_pretrained(path),
            None,
            Actor.from_pretrained(path),
            self.args,
            10,
        )
        self.loader = self.strategy.setup_dataloader(self.prompts, 2, collate_fn=list)

    def names(self):
        token_ids = torch.tensor([self.prompts[0].token_ids] * 2)
        return {
            "torch": torch,
            "dist": dist,
            "time": time,
            "get_strategy": get_strategy,
            "args": self.args,
            "strategy": self.strategy,
            "actor": self.actor.model,
            "critic": self.critic.model,
            "reward_model": length_reward(),
            "initial_model": self.reference,
            "ema_model": None,
            "actor_optim": self.actor.optimizer,
            "critic_optim": self.critic.optimizer,
            "actor_scheduler": self.actor.scheduler,
            "critic_scheduler": self.critic.scheduler,
            "SPMDPPOTrainer": SPMDPPOTrainer,
            "model": self.actor.model,
            "optimizer": self.actor.optimizer,
            "scheduler": self.actor.scheduler,
            "token_ids": token_ids,
            "local_value": float(dist.get_rank()),
            "command_line": [],
            "reward_model_1": nn.Linear(4, 4),
            "reward_model_2": nn.Linear(4, 4),
            "reward_model_3": nn.Linear(4, 4),
        }

    def run(self, name, extra=None):
        code, substitutions = BLOCKS[name]
        for printed, replaced in substitutions.items():
            assert printed in code
            code = code.replace(printed, replaced)
        code = re.sub(r"^\s*\.\.\.\n", "", code, flags=re.MULTILINE).replace("(...)", "()")
        if "super()" in code:
            body = textwrap.indent(code, "    ")
            code = f"class Trainer(SPMDPPOTrainer):\n{body}"
        names = {**self.names(), **(extra or {})}
        exec(compile(code, f"seed 000, {name}", "exec"), names)
        return names


def scores(world, token_ids):
    """A loss on the actor."""
    return -world.actor.model(token_ids, torch.ones_like(token_ids).bool()).logprobs.mean()


# ------------------------------------------------------------------ one check per block


def check_basic_setup(world):
    made = []

    def recording(**keywords):
        made.append(SPMDPPOTrainer(**keywords))
        return made[-1]

    names = world.run("basic setup", {"SPMDPPOTrainer": recording})
    names["train"](world.args)
    (trainer,) = made
    expected = "FSDPV2Strategy" if world.args.fsdp else "DeepspeedStrategy"
    assert type(trainer.strategy).__name__ == expected
    assert trainer.strategy.inference_engine.name == "hf"
    # What the block made is complete: it rolls out and trains.
    trainer.make_experience(world.prompts[:2])
    metrics = trainer.ppo_train(1)
    assert metrics["policy_loss"] is not None
    trainer.strategy.inference_engine.close()


def check_training_operations(world):
    strategy = world.strategy
    before = [p.local_shard.clone() for p in strategy.parameter_source(world.actor).parameters()]
    ids = world.names()["token_ids"]
    names = {}
    for _ in range(strategy.accumulated_gradient):
        loss = scores(world, ids)
        names = world.run("training operations", {"loss": loss})
    after = [p.local_shard for p in strategy.parameter_source(world.actor).parameters()]
    assert any(not old.equal(new) for old, new in zip(before, after, strict=True) if old.numel())
    assert names["averaged_value"] == 0.5
    assert names["gathered_values"].tolist() == [0.0, 1.0]


def check_memory_optimized(world):
    trainer_class = world.run("memory optimized")["Trainer"]
    world.strategy.setup_inference_engine(world.args, "hf", actor=world.actor)
    trainer = trainer_class(
        world.strategy,
        world.actor,
        world.critic,
        length_reward(),
        world.reference,
        prompts_dataloader=world.loader,
    )
    trainer.make_experience()
    version = world.strategy.inference_engine.weights_version
    metrics = trainer.ppo_train(global_steps=1)
    assert set(metrics) >= {"policy_loss", "critic_loss"}
    assert world.strategy.inference_engine.weights_version > version
    states = [s["exp_avg"] for s in trainer.actor_optim.state.values() if "exp_avg" in s]
    assert states
    assert all(state.device.type == "cpu" for state in states)
    # "Ensure update_engine_weights() is called after training": generation works at once.
    assert world.strategy.gather_and_generate({"max_tokens": 2}, [[5, 6]])


def check_weight_sync(world):
    engine = world.strategy.setup_inference_engine(world.args, "hf", actor=world.actor)
    optimizer, model = world.actor.optimizer, world.actor.model
    with world.strategy.accumulation(1, optimizer):
        world.strategy.backward(scores(world, world.names()["token_ids"]), model, optimizer)
        world.strategy.optimizer_step(optimizer, model, world.actor.scheduler)
    with pytest.raises(RuntimeError, match="update_engine_weights"):
        world.strategy.gather_and_generate({"max_tokens": 2}, [[5, 6]])
    world.run("weight sync")
    assert world.strategy.last_weight_sync is not None
    assert world.strategy.gather_and_generate({"max_tokens": 2}, [[5, 6]])
    engine.close()


def experience_maker(world):
    def tokenize(texts, max_length, padding):
        ids = world.tokenizer(texts, max_length=max_length, padding=padding, truncation=True)
        return {"input_ids": ids["input_ids"]}

    return SimpleNamespace(
        strategy=world.strategy,
        tokenize_fn=tokenize,
        prompt_max_len=16,
        vllm_mp_group=world.strategy.engine_mp_group,
    )


def check_text_generation(world):
    world.strategy.setup_inference_engine(world.args, "hf", actor=world.actor)
    rank = world.strategy.get_rank()
    # Unequal numbers of prompts per rank.
    texts = ["red", "green", "blue"][: 3 - rank]
    names = world.run(
        "text generation",
        {
            "self": experience_maker(world),
            "all_prompts": texts,
            "sampling_params": {"temperature": 1.0, "max_tokens": 3, "n": 2},
        },
    )
    expected = [tuple(world.tokenizer(t)["input_ids"]) for t in texts for _ in range(2)]
    assert [tuple(o.prompt_token_ids) for o in names["all_outputs"]] == expected
    assert world.strategy.inference_engine_status is EngineStatus.SLEEPED


def check_multimodal_generation(world):
    def script(request, index):
        return [len(request.multi_modal.images), len(request.prompt_text)], [-0.5, -0.5]

    config = EngineConfig(engine_type="fake", model_path="")
    world.strategy.inference_engine = FakeEngine(config, script=script)
    rank = world.strategy.get_rank()
    # Only rank 0 has images.
    images = [["image a", "image b"], []] if rank == 0 else [[], []]
    names = world.run(
        "multimodal generation",
        {
            "self": experience_maker(world),
            "all_prompts": ["both of them", "none"],
            "sampling_params": {"max_tokens": 2},
            "all_images": images,
            "images_num": [len(each) for each in images],
        },
    )
    found = [list(output.output_token_ids) for output in names["all_outputs"]]
    assert found == [[2 if rank == 0 else 0, 12], [0, 4]]
    world.strategy.inference_engine = None


def check_argument_parser(world):
    args = world.run("argument parser")["args"]
    assert (args.engine_tp_size, args.zero_stage, args.fsdp) == (1, 2, False)


def check_selection_logic(world):
    from lightrft.strategy.deepspeed.strategy import DeepspeedStrategy

    # The block's constructors have no arguments: one sample per rank and step.
    classes = {
        "FSDPV2Strategy": lambda: FSDPV2Strategy(train_batch_size=2),
        "DeepspeedStrategy": lambda: DeepspeedStrategy(train_batch_size=2),
    }
    made = world.run("selection logic", classes)["strategy"]
    assert type(made) is type(world.strategy)


def check_engine_lifecycle(world):
    world.run("engine lifecycle")
    assert world.strategy.inference_engine_status is EngineStatus.WAKEUP
    world.strategy.maybe_sleep_inference_engine()
    assert world.strategy.inference_engine_status is EngineStatus.SLEEPED
    world.strategy.maybe_sleep_inference_engine()
    world.strategy.inference_engine.close()
    world.strategy.inference_engine = None


def check_reward_models(world):
    names = world.run("reward models")
    # 8 ranks to shard over are clamped to the two there are.
    for model, ready in zip(names["reward_models"], names["prepared_rms"], strict=True):
        assert ready(torch.ones(1, 4)).shape == (1, 4)
        assert not any(p.requires_grad for p in model.parameters())


CHECKS = {name: globals()["check_" + name.replace(" ", "_")] for name in BLOCKS}


def run_all_blocks(rank, world_size, backends, path):
    """{backend: {block: None or what went wrong}}."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None
    found = {}
    for backend in backends:
        world = World(backend, path)
        found[backend] = {}
        for name, check in CHECKS.items():
            try:
                check(world)
                found[backend][name] = None
            except Exception:  # noqa: BLE001 - reported by the test of this block
                found[backend][name] = traceback.format_exc()
            # A rank that failed alone must not leave the other in the next block's collectives.
            failures = world.strategy.gather_objects(found[backend][name])
            if any(failures):
                found[backend][name] = next(text for text in failures if text)
                break
        world.strategy.close()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    from importlib.util import find_spec

    path = str(tmp_path_factory.mktemp("seed000") / "model")
    write_tiny_model(path, "tiny-qwen3", seed=1)
    backends = BACKENDS if find_spec("deepspeed") is not None else BACKENDS[:1]
    return run_multiprocess(run_all_blocks, 2, timeout_seconds=300, args=(backends, path))


@pytest.mark.parametrize("block", list(BLOCKS))
@pytest.mark.parametrize(
    "backend", ["fsdp", pytest.param("deepspeed", marks=pytest.mark.deepspeed)]
)
def test_the_block_runs_as_printed(found, backend, block):
    for results in found:
        assert block in results[backend], f"an earlier block failed: {results[backend]}"
        assert results[backend][block] is None, results[backend][block]
