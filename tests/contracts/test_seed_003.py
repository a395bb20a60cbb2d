"""lightrft.trainer.spmd_ppo_trainer: the published examples run as they are printed.

The free names of each example are bound below; `SPMDPPOTrainer` is bound together with the data
loader that `make_experience()` takes its prompts from, since the example names none.
"""

import functools
import inspect
from types import SimpleNamespace

import pytest
from tests.runs import TextReward

from lightrft.datasets.types import Prompt
from lightrft.models import Actor, Critic
from lightrft.models.loading import load_tokenizer
from lightrft.strategy import get_fake_strategy
from lightrft.tools.model_presets import write_tiny_model
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer, SPMDPPOTrainerBase, SPMDPPOTrainerVL

BASE = """
trainer_base = SPMDPPOTrainerBase(
    strategy, actor_model, critic_model, reward_model, initial_model, ema_model,
    actor_optim, critic_optim, actor_scheduler, critic_scheduler,
    loss_agg_mode="seq-mean-token-mean", VLM=False, packing_samples=True
)
"""
CLASS = """
trainer = SPMDPPOTrainer(
    strategy=my_strategy, actor=actor_model, critic=critic_model, reward_model=reward_model,
    initial_model=reference_model, ema_model=ema_model,
    actor_optim=actor_optimizer, critic_optim=critic_optimizer,
    actor_scheduler=actor_scheduler, critic_scheduler=critic_scheduler,
    tokenizer=tokenizer,
    # Additional PPO parameters
    max_epochs=5, micro_train_batch_size=16
)
# Train for multiple iterations
for step in range(training_steps):
    trainer.make_experience()
    metrics = trainer.ppo_train(step)
"""
INIT = """
trainer = SPMDPPOTrainer(
    strategy, actor_model, critic_model, reward_model, reference_model, ema_model,
    actor_optimizer, critic_optimizer, actor_scheduler, critic_scheduler,
    tokenizer=my_tokenizer, loss_agg_mode="seq-mean-token-mean", packing_samples=True,
    max_epochs=5, micro_train_batch_size=16
)
"""
VISION = """
trainer = SPMDPPOTrainerVL(
    strategy, vlm_actor, vlm_critic, vlm_reward_model, vlm_reference, vlm_ema_model,
    actor_optimizer, critic_optimizer, actor_scheduler, critic_scheduler,
    tokenizer=my_tokenizer,
    processor=my_image_processor,  # Required!
    loss_agg_mode="seq-mean-token-mean", max_epochs=5, micro_train_batch_size=8
)
"""
VISION_CLASS = """
trainer = SPMDPPOTrainerVL(
    strategy=my_strategy, actor=actor_model, critic=critic_model, reward_model=reward_model,
    initial_model=reference_model, ema_model=ema_model,
    actor_optim=actor_optimizer, critic_optim=critic_optimizer,
    actor_scheduler=actor_scheduler, critic_scheduler=critic_scheduler,
    tokenizer=tokenizer,
    processor=image_processor,  # Required for VLM
    # Additional PPO parameters
    max_epochs=5, micro_train_batch_size=16
)
"""
METRICS = """
metrics = trainer.ppo_train(global_steps=100)
print(f"Policy loss: {metrics['policy_loss']}")
print(f"Critic loss: {metrics['critic_loss']}")
"""


@pytest.fixture
def names(tmp_path):
    """What the examples' free names stand for."""
    path = str(tmp_path / "model")
    write_tiny_model(path, "tiny-qwen3", seed=1)
    strategy = get_fake_strategy(
        SimpleNamespace(
            pretrain=path,
            seed=3,
            train_batch_size=16,
            rollout_batch_size=4,
            n_samples_per_prompt=4,
            generate_max_len=5,
            actor_learning_rate=1e-4,
            critic_learning_rate=1e-4,
            advantage_estimator="gae",
            engine_type="hf",
            init_kl_coef=0.01,
            use_kl_loss=True,
        )
    )
    actor, critic, _, reference = strategy.prepare_models_and_optimizers(
        Actor.from_pretrained(path),
        Critic.from_pretrained(path),
        None,
        Actor.from_pretrained(path),
        None,
        100,
    )
    strategy.setup_inference_engine(None, "hf", actor=actor)
    tokenizer = load_tokenizer(path)
    prompts = [
        Prompt(i, text, tuple(tokenizer(text)["input_ids"]))
        for i, text in enumerate(["one", "two", "three", "four", "five", "six", "seven", "eight"])
    ]
    loader = strategy.setup_dataloader(prompts, 4, collate_fn=list)
    average = Actor.from_pretrained(path)
    bound = {
        "strategy": strategy,
        "actor_model": actor.model,
        "critic_model": critic.model,
        "reward_model": TextReward(lambda text: sum(map(ord, text)) % 2),
        "initial_model": reference,
        "ema_model": average,
        "actor_optim": actor.optimizer,
        "critic_optim": critic.optimizer,
        "actor_scheduler": actor.scheduler,
        "critic_scheduler": critic.scheduler,
        "tokenizer": tokenizer,
        "image_processor": object(),
        "training_steps": 2,
        "SPMDPPOTrainer": functools.partial(SPMDPPOTrainer, prompts_dataloader=loader),
        "SPMDPPOTrainerBase": SPMDPPOTrainerBase,
        "SPMDPPOTrainerVL": SPMDPPOTrainerVL,
    }
    spellings = {
        "my_strategy": "strategy",
        "reference_model": "initial_model",
        "actor_optimizer": "actor_optim",
        "critic_optimizer": "critic_optim",
        "my_tokenizer": "tokenizer",
        "my_image_processor": "image_processor",
        "vlm_actor": "actor_model",
        "vlm_critic": "critic_model",
        "vlm_reward_model": "reward_model",
        "vlm_reference": "initial_model",
        "vlm_ema_model": "ema_model",
    }
    yield bound | {other: bound[name] for other, name in spellings.items()}
    strategy.close()


def run(code, names):
    exec(compile(code, "seed 003", "exec"), names)
    return names


def test_the_base_class_is_constructed(names):
    trainer = run(BASE, names)["trainer_base"]
    assert trainer.config.loss_agg_mode == "seq-mean-token-mean"


@pytest.mark.full
def test_the_language_trainer_trains_for_several_iterations(names, capsys):
    metrics = run(CLASS, names)["metrics"]
    assert isinstance(metrics, dict)
    assert all(isinstance(value, int | float) for value in metrics.values())
    assert names["trainer"].state.num_steps == 2
    names["trainer"].make_experience()
    run(METRICS, names)
    out = capsys.readouterr().out
    assert f"Policy loss: {names['metrics']['policy_loss']}" in out
    assert f"Critic loss: {names['metrics']['critic_loss']}" in out


def test_positional_construction(names):
    assert run(INIT, names)["trainer"].config.max_epochs == 5


@pytest.mark.parametrize("code", [VISION, VISION_CLASS])
def test_the_vision_trainer_is_constructed(names, code):
    assert run(code, names)["trainer"].processor is names["image_processor"]


@pytest.mark.parametrize("change", ["processor=None, #", "#"])
def test_the_vision_trainer_asserts_a_processor_before_anything_else(names, change):
    code = VISION.replace("processor=my_image_processor,", change)
    with pytest.raises(AssertionError, match="processor"):
        run(code.replace("strategy,", "None,", 1), names)


def test_the_engine_group_must_be_positive(names):
    names["strategy"].config.engine_tp_size = 0
    with pytest.raises(AssertionError, match="engine_tp_size"):
        run(BASE, names)


def test_the_aggregation_is_the_seeds_unless_another_is_given(names):
    code = BASE.replace('loss_agg_mode="seq-mean-token-mean", ', "")
    trainer = run(code, names)["trainer_base"]
    assert trainer.config.loss_agg_mode == "seq-mean-token-mean"


def test_defaults_of_the_signatures():
    base = inspect.signature(SPMDPPOTrainerBase.__init__).parameters
    # None is the policy loss's own aggregation, which for the default loss is that of the seed.
    assert base["loss_agg_mode"].default is None
    assert base["use_gspo"].default is False
    assert base["VLM"].default is False
    for trainer in (SPMDPPOTrainerBase, SPMDPPOTrainer, SPMDPPOTrainerVL):
        assert inspect.signature(trainer.ppo_train).parameters["global_steps"].default == 0


def test_the_parents_and_the_maker_that_the_seed_names():
    from lightrft.trainer import spmd_ppo_trainer as door

    assert SPMDPPOTrainer.__bases__ == (SPMDPPOTrainerBase, door.PPOTrainer)
    assert SPMDPPOTrainerVL.__bases__ == (SPMDPPOTrainerBase, door.PPOTrainerVL)
    assert issubclass(SPMDPPOTrainerBase, door.PPOTrainer)
    for trainer in (SPMDPPOTrainer, SPMDPPOTrainerVL):
        # object, and no chain of more than two parents: the door, its base.
        assert max(len(parent.__bases__) for parent in trainer.__mro__) <= 2
        assert {parent.__module__ for parent in trainer.__mro__[:-1]} == {door.__name__}
    assert {"__init__", "fit"} <= vars(door.PPOTrainer).keys()
    assert {"make_experience", "ppo_train"} <= vars(SPMDPPOTrainerBase).keys()


def test_the_fast_experience_maker_makes_the_experience(names):
    from lightrft.trainer.spmd_ppo_trainer import FastExperienceMaker

    trainer = run(CLASS.partition("# Train")[0], names)["trainer"]
    assert type(trainer.stage.maker) is FastExperienceMaker
    step = trainer.loop.next_step()
    prompts = [Prompt(i, "p", (2, 3)) for i in range(4)]
    made = trainer.stage.maker.make(prompts, step, trainer.stage.memory)
    assert len(made.experience.batch.advantages) == 16
