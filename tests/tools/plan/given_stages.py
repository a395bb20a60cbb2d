"""Steps of the stages on given rows, with the bytes of their live tensors at the peak."""

import gc

from tests.tools.plan import two_ranks

SIZES = {**two_ranks.SIZES, "rows": 2, "seq": 96}
NUM_ITEMS = 8


def run_config(stage, **options):
    from lightrft.config import TrainConfig

    is_divergence = stage == "divergence"
    if is_divergence:
        options |= {"teacher": "teacher", "teacher_form": "forward"}
    return TrainConfig(
        train_batch_size=NUM_ITEMS,
        micro_train_batch_size=SIZES["rows"],
        max_row_tokens=SIZES["seq"],
        actor_learning_rate=1e-4,
        bf16=SIZES["bf16"],
        fused_linear_logprob=is_divergence,
        fsdp=True,
        **options,
    )


def build(stage, config, strategy):
    """A stage whose rows have as many tokens as they may, all but the first trained."""
    import numpy as np
    import torch
    from transformers import AutoModelForSequenceClassification

    from lightrft.datasets.preference_rows import PreferencePair
    from lightrft.datasets.row_data import RowData, SupervisedRow
    from lightrft.models import Actor, RewardModel
    from lightrft.stages.distillation.divergence_objective import DivergenceObjective
    from lightrft.stages.models import trained_model
    from lightrft.stages.preference.preference_loss import build_loss
    from lightrft.stages.preference.preference_objective import PreferenceObjective
    from lightrft.stages.reward.reward_objective import RewardObjective
    from lightrft.stages.rows.row_stage import RowStage
    from lightrft.stages.stage import TrainedModels
    from lightrft.stages.supervised.supervised_objective import SupervisedObjective

    def row():
        ids = np.full(SIZES["seq"], 5, dtype=np.int32)
        return SupervisedRow(ids, np.arange(SIZES["seq"]) > 0)

    def actor():
        return Actor(two_ranks.build_model(SIZES))

    if stage == "reward":
        values = two_ranks.model_config(SIZES)
        values.num_labels = 1
        model = AutoModelForSequenceClassification.from_config(
            values, dtype=torch.float32, attn_implementation="sdpa"
        )
        ready, reference = strategy.prepare_reward_model(RewardModel(model), config, 10), None
    else:
        reference = actor() if stage == "prefer" else None
        ready, _, _, reference = strategy.prepare_models_and_optimizers(
            actor(), None, None, reference, config, 10
        )
    models = TrainedModels((trained_model("actor", ready),))
    objective = {
        "sft": lambda: SupervisedObjective.of(config),
        "prefer": lambda: PreferenceObjective(build_loss(config), reference),
        "reward": lambda: RewardObjective.of(config, models.main.model, is_paired=True),
        "divergence": lambda: DivergenceObjective({"": strategy.prepare_model(actor())}, {}),
    }[stage]()
    has_pairs = stage in ("prefer", "reward")
    items = [PreferencePair(row(), row()) if has_pairs else row() for _ in range(NUM_ITEMS)]
    return RowStage(config, strategy, models, RowData(items, ""), (), objective)


def step(stage, number):
    from lightrft.stages.stage import Step

    model = stage.models.main.model
    model.eval()
    batch = stage.batch_of(tuple(stage.data.rows), number)
    model.train()
    stage.update(batch, Step(number))


def measure_all(rank, world_size, stages):
    """Of each stage, live bytes between steps, and at the peak of the second one."""
    del rank, world_size
    return {stage: measure(stage) for stage in stages}


def measure(stage):
    from tests.tools.plan.live_bytes import LiveBytes

    from lightrft.strategy import get_strategy

    config = run_config(stage)
    with get_strategy(config) as strategy:
        gc.collect()
        live = LiveBytes()
        before = live.total
        with live:
            built = build(stage, config, strategy)
            step(built, 1)
            gc.collect()
            idle = live.total - before
            live.begin()
            step(built, 2)
        return {"idle": idle, "peak": live.peak - before}
