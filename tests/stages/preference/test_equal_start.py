"""Before the first step the margin of every pair is 0, and what makes it another one is found."""

import pytest
import torch
from tests.models.tiny import tiny_model
from tests.stages.preference.preference_world import LABELLED, RAGGED, build_stage, noisy_model
from tests.stages.stage_world import STILL

from lightrft.config.registry import PREFERENCE_LOSSES
from lightrft.models.loading import ModelLoadError
from lightrft.strategy import get_fake_strategy

ADAPTERS = {"lora_rank": 2, "target_modules": ("q_proj",), "lora_dropout": 0.5}
# One name of each function.
LOSSES = {str(PREFERENCE_LOSSES.load(name)): name for name in PREFERENCE_LOSSES}.values()


def build(loss, *, model=None, items=RAGGED, **changes):
    return build_stage(
        get_fake_strategy(STILL),
        items,
        model=model or tiny_model(),
        preference_loss=(loss,),
        **changes,
    )


def prove(stage):
    stage.objective.prove_equal_start(stage.data, stage.passes)


def still_adapters(stage):
    """The stage with adapters as they are at first, which add nothing."""
    with torch.no_grad():
        for name, value in stage.models.main.model.named_parameters():
            if ".lora_B." in name:
                value.zero_()
    return stage


WAYS = [("whole", loss) for loss in LOSSES]
WAYS += [(way, loss) for way in ("dropout", "adapters") for loss in ("dpo", "kto", "aot")]


@pytest.mark.parametrize("way, loss", WAYS)
def test_the_margin_is_0_before_the_first_step(way, loss):
    changes = ADAPTERS if way == "adapters" else {}
    model = tiny_model(attention_dropout=0.5) if way == "dropout" else None
    items = LABELLED if loss in ("kto", "apo_zero_unpaired") else RAGGED
    stage = still_adapters(build(loss, model=model, items=items, **changes))
    prove(stage)
    # Also in training mode, of which the metrics of a step are.
    stage.models.main.model.train()
    prove(stage)
    if stage.objective.loss.uses_reference:
        stage.models.main.model.eval()
        batch = stage.batch_of(tuple(items), 1)
        assert batch.known.kl == pytest.approx(0.0, abs=1e-5)
        assert stage.evaluate()["eval/margin"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("changes", [{}, ADAPTERS], ids=["whole", "adapters"])
def test_another_reference_is_found_and_a_loss_without_one_asks_for_none(changes):
    # Adapters that add something at first; a model with other weights than its reference.
    model = None if changes else noisy_model()
    with pytest.raises(ModelLoadError, match="margin is not 0 before the first step") as said:
        prove(build("dpo", model=model, **changes))
    assert "\n" not in str(said.value)
    prove(build("simpo", model=model, **changes))
