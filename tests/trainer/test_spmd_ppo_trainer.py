import pytest
from tests.models.batches import copies, relative_norm

from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer, SPMDPPOTrainerVL

ALWAYS = [
    "policy_loss",
    "entropy",
    "ratio_mean",
    "ratio_max",
    "clip_fraction_low",
    "clip_fraction_high",
    "approx_kl",
    "grad_norm",
    "actor_lr",
    "logprob_diff_mean",
    "logprob_diff_max",
    "weights_version",
    "engine_hash",
    "rollout_seconds",
    "train_seconds",
    "weight_sync_seconds",
    "step_seconds",
    "tokens_per_second",
    "reward",
    "reward_std",
    "reward/vowels",
    "reward/lower",
    "response_length",
    "response_length_max",
    "truncated_share",
    "constant_group_share",
]


def change(world, before):
    return {name: value - before[name] for name, value in world.weights().items()}


def test_two_steps_change_the_model_and_the_engine_follows(build_world):
    world = build_world()
    before = world.weights()
    for step in range(2):
        metrics = world.step()
        assert set(metrics) >= set(ALWAYS)
        assert all(isinstance(value, int | float) for value in metrics.values())
        assert metrics["weights_version"] == step + 1
        assert metrics["logprob_diff_max"] < 1e-4
        assert metrics["ratio_mean"] == pytest.approx(1, abs=0.2)
        assert metrics["num_samples"] == 16
    assert relative_norm(world.weights(), before) > 1e-3
    engine = world.strategy.inference_engine.hash_parameters()
    report = world.strategy.last_weight_sync
    assert engine
    assert metrics["engine_hash"] == report.engine_hash


def test_critic_and_reference_add_their_metrics(build_world):
    world = build_world(with_critic=True, with_reference=True, advantage_estimator="gae")
    critic = copies(world.trainer.critic)
    metrics = world.step()
    assert {"critic_loss", "critic_lr", "critic_grad_norm", "kl", "kl_coef"} <= set(metrics)
    assert metrics["kl"] == pytest.approx(0, abs=1e-9)
    assert metrics["critic_loss"] > 0
    assert relative_norm(copies(world.trainer.critic), critic) > 0
    assert world.step()["kl"] > 1e-6


def test_without_a_critic_there_is_no_critic_loss(build_world):
    world = build_world()
    assert not any(name.startswith(("critic", "kl")) for name in world.step())


def test_a_reference_model_without_a_penalty_is_named(build_world, capsys):
    world = build_world(with_reference=True, init_kl_coef=0.0)
    assert world.trainer.stage.maker.models.reference is None
    assert "initial_model is not used: init_kl_coef is 0" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"use_kl_loss": True, "entropy_coef": 0.01}])
def test_the_step_does_not_depend_on_how_micro_batches_are_cut(build_world, options):
    results = []
    rows = [{"micro_train_batch_size": n, "micro_rollout_batch_size": n} for n in (8, 1, 2, 4)]
    tokens = [{"micro_batch_tokens": budget} for budget in (1, 40, 100_000)]
    for cut in (*rows, *tokens):
        world = build_world(
            with_reference=bool(options),
            with_critic=True,
            loss_agg_mode="token-mean",
            max_epochs=2,
            **cut,
            **options,
        )
        before = world.weights()
        metrics = world.step()
        results.append((change(world, before), metrics))
    reference, expected = results[0]
    for moved, metrics in results[1:]:
        assert relative_norm(moved, reference) < 1e-3
        for name in ("policy_loss", "grad_norm", "approx_kl", "entropy", "critic_loss"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_a_budget_of_tokens_sets_the_number_of_backward_passes(build_world, monkeypatch):
    world = build_world(micro_batch_tokens=1)
    training = world.strategy.training
    count, backward = [], training.backward
    monkeypatch.setattr(
        training, "backward", lambda *args, **kw: (count.append(1), backward(*args, **kw))
    )
    world.step()
    assert len(count) == 16  # every row alone


def test_a_wrong_share_would_be_noticed(build_world):
    """Positive control of the test above: the mean of local means differs."""
    updates = []
    for mode in ("token-mean", "seq-mean-token-mean"):
        world = build_world(loss_agg_mode=mode, generate_max_len=12)
        before = world.weights()
        world.step()
        updates.append(change(world, before))
    assert relative_norm(*updates) > 1e-2


def test_ppo_train_needs_fresh_experience(build_world):
    world = build_world()
    with pytest.raises(RuntimeError, match="make_experience"):
        world.trainer.ppo_train()
    world.step()
    with pytest.raises(RuntimeError, match="make_experience"):
        world.trainer.ppo_train()


def test_make_experience_takes_prompts_of_the_caller(build_world):
    world = build_world(prompts_dataloader=None)
    with pytest.raises(ValueError, match="prompts_dataloader"):
        world.trainer.make_experience()
    batch = world.trainer.make_experience(world.prompts[:2])
    assert len(batch.advantages) == 8
    with pytest.raises(ValueError, match="multiple of train_batch_size"):
        world.trainer.make_experience(world.prompts[:3])


def test_order_of_one_update(build_world):
    world = build_world()
    calls = []
    for name in ("maybe_load_optimizer", "maybe_offload_optimizer", "update_engine_weights"):
        original = getattr(world.strategy, name)
        setattr(
            world.strategy,
            name,
            lambda *a, original=original, name=name: calls.append(name) or original(*a),
        )
    original_step = world.strategy.training.optimizer_step
    world.strategy.training.optimizer_step = lambda *a, **k: (
        calls.append("optimizer_step") or original_step(*a, **k)
    )
    world.step()
    assert calls == [
        "maybe_load_optimizer",
        *["optimizer_step"] * 4,
        "maybe_offload_optimizer",
        "update_engine_weights",
    ]


def test_a_vision_trainer_asks_for_its_processor_first(build_world):
    with pytest.raises(AssertionError, match="processor"):
        SPMDPPOTrainerVL(None, None)
    with pytest.raises(AssertionError, match="processor"):
        SPMDPPOTrainer(None, None, VLM=True)
    world = build_world(trainer_class=SPMDPPOTrainerVL, processor=object())
    assert "policy_loss" in world.step()


@pytest.mark.parametrize(
    "keywords, error, message",
    [
        ({"eps_clp": 0.1}, TypeError, "eps_clip"),
        ({"kl_estimator": "k9"}, ValueError, "k3"),
        ({"advantage_estimator": "gae"}, ValueError, "critic"),
        ({"train_batch_size": 6, "args": {"train_batch_size": 8}}, ValueError, "nearest legal"),
        ({"use_kl_loss": True}, ValueError, "reference"),
        (
            {
                "dynamic_sampling": True,
                "n_samples_per_prompt": 1,
                "advantage_estimator": "reinforce++",
            },
            ValueError,
            "dynamic_sampling",
        ),
    ],
)
def test_wrong_arguments_are_named(build_world, keywords, error, message):
    with pytest.raises(error, match=message):
        build_world(**keywords)


def test_what_is_missing_is_named(build_world):
    world = build_world()
    parts = (world.strategy, world.trainer.actor)
    with pytest.raises(ValueError, match="actor has no optimizer"):
        SPMDPPOTrainer(*parts)
    optimizer = {"actor_optim": world.trainer.actor_optim}
    world.strategy.config.pretrain = None  # which has a tokenizer
    with pytest.raises(ValueError, match="tokenizer"):
        SPMDPPOTrainer(*parts, **optimizer)
    with pytest.raises(ValueError, match="reward"):
        SPMDPPOTrainer(*parts, **optimizer, tokenizer=world.trainer.tokenizer)
    with pytest.raises(TypeError, match="got int"):
        SPMDPPOTrainer(*parts, None, 3, **optimizer, tokenizer=world.trainer.tokenizer)


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_old_logprobs_follow_the_law_the_engine_sampled_from(build_world, temperature):
    world = build_world(temperature=temperature)
    assert world.step()["logprob_diff_max"] < 1e-4


def test_options_without_effect_are_named_and_long_prompts_refused(build_world, capsys):
    world = build_world(kl_target=0.1, prompt_max_len=5)
    printed = capsys.readouterr().out
    assert "kl_target" in printed
    with pytest.raises(ValueError, match=r"rows \[.*prompt_max_len = 5"):
        world.trainer.make_experience()


def test_stages_have_speed_and_memory_and_the_critic_its_explained_variance(build_world):
    world = build_world(with_critic=True, advantage_estimator="gae", max_epochs=2)
    world.trainer.make_experience()
    step = world.experience
    tokens = float(step.table.lengths.sum())
    mask, values = step.batch.rollouts.response_mask, step.batch.outputs.values
    returns = step.batch.returns[mask].double()
    errors = returns - values[mask].double()
    metrics = world.trainer.ppo_train(1)
    assert metrics["explained_variance"] == pytest.approx(
        float(1 - errors.var(correction=0) / returns.var(correction=0)), abs=1e-6
    )
    assert metrics["train_tokens_per_second"] * metrics["train_seconds"] == pytest.approx(
        2 * tokens
    )
    assert metrics["forward_tokens_per_second"] * metrics["forward_seconds"] == pytest.approx(
        2 * tokens  # actor and critic
    )
    sampled = float(step.table.response_lengths.sum())
    assert metrics["rollout_tokens_per_second"] * metrics["rollout_seconds"] == pytest.approx(
        sampled
    )
    for stage in ("rollout", "forward", "train", "weight_sync"):
        assert metrics[f"memory/{stage}_gb"] > 0
