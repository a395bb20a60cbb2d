"""Steps of the stages on given rows, with the bytes of their live tensors at the peak."""

import gc

from tests.tools.plan import live_bytes, two_ranks

SIZES = {**two_ranks.SIZES, "rows": 2, "seq": 96}
NUM_ITEMS = 8


def run_config(stage, sizes, options):
    from lightrft.config import TrainConfig

    given = {"teacher": "teacher", "teacher_form": "forward"} if stage == "divergence" else {}
    return TrainConfig(
        train_batch_size=NUM_ITEMS,
        micro_train_batch_size=sizes["rows"],
        max_row_tokens=sizes["seq"],
        actor_learning_rate=1e-4,
        bf16=sizes["bf16"],
        **{"fused_linear_logprob": stage == "divergence", **given, **options},
    )


def build(stage, sizes, config, strategy):
    """A stage whose rows have as many tokens as they may, all but the first trained."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from lightrft.datasets.preference_rows import PreferencePair
    from lightrft.datasets.row_data import RowData, SupervisedRow
    from lightrft.models import Actor, LoraActor, RewardModel
    from lightrft.models.reward_model import LoraRewardModel
    from lightrft.stages.distillation.divergence_objective import DivergenceObjective
    from lightrft.stages.models import configure_model, trained_model
    from lightrft.stages.preference.preference_loss import build_loss
    from lightrft.stages.preference.preference_objective import PreferenceObjective
    from lightrft.stages.reward.reward_objective import RewardObjective
    from lightrft.stages.rows.row_stage import RowStage
    from lightrft.stages.stage import TrainedModels
    from lightrft.stages.supervised.supervised_objective import SupervisedObjective

    random = np.random.default_rng(0)

    def row():
        ids = random.integers(2, sizes["vocab"], sizes["seq"], dtype=np.int32)
        return SupervisedRow(ids, np.arange(sizes["seq"]) > 0)

    def causal():
        torch.manual_seed(0)
        kind, values = AutoModelForCausalLM, two_ranks.model_config(sizes)
        return kind.from_config(values, dtype=torch.float32, attn_implementation="sdpa")

    if stage == "reward":
        values = two_ranks.model_config(sizes)
        values.num_labels = 1
        model = AutoModelForSequenceClassification.from_config(
            values, dtype=torch.float32, attn_implementation="sdpa"
        )
        own = LoraRewardModel(model, config) if config.lora_rank else RewardModel(model)
        configure_model(own, config)
        ready = strategy.prepare_reward_model(own, config, 10)
        reference = None
    else:
        own = LoraActor(causal(), config) if config.lora_rank else Actor(causal())
        reference = None
        if stage == "prefer" and not config.lora_rank:
            reference = Actor(causal())
        for each in (own, reference):
            if each is not None:
                configure_model(each, config)
        ready, _, _, reference = strategy.prepare_models_and_optimizers(
            own, None, None, reference, config, 10
        )
    models = TrainedModels((trained_model("actor", ready),))
    if stage in ("prefer", "reward"):
        pairs = RowData([PreferencePair(row(), row(), None) for _ in range(NUM_ITEMS)], "")
        objective = PreferenceObjective(build_loss(config), reference)
        if stage == "reward":
            objective = RewardObjective.of(config, models.main.model, is_paired=True)
        return RowStage(config, strategy, models, pairs, (), objective)
    rows = RowData([row() for _ in range(NUM_ITEMS)], "")
    if stage == "sft":
        return RowStage(config, strategy, models, rows, (), SupervisedObjective.of(config))
    teacher = Actor(causal())
    configure_model(teacher, config)
    teachers = {"": strategy.prepare_model(teacher)}
    return RowStage(config, strategy, models, rows, (), DivergenceObjective(teachers, {}))


def step(stage, number):
    from lightrft.stages.stage import Step

    model = stage.models.main.model
    model.eval()
    batch = stage.batch_of(tuple(stage.data.rows), number)
    model.train()
    stage.update(batch, Step(number))


def measure_all(rank, world_size, stages, sizes, options):
    """Of each stage, live bytes between steps, and at the peak of the second one."""
    del rank, world_size
    return {stage: measure(stage, sizes, options) for stage in stages}


def measure(stage, sizes, options):
    from lightrft.strategy import get_strategy

    config = run_config(stage, sizes, options)
    with get_strategy(config) as strategy:
        gc.collect()
        live = live_bytes.LiveBytes()
        before = live.total
        with live:
            built = build(stage, sizes, config, strategy)
            step(built, 1)
            gc.collect()
            idle = live.total - before
            live.begin()
            step(built, 2)
        return {"idle": idle, "peak": live.peak - before}
