"""A step with prompts computed once for their samples is the step without, in every form of it."""

import pytest
from tests.models.batches import relative_norm

from lightrft.models import proof
from lightrft.models.layout import TokenLayout

METRICS = ("policy_loss", "grad_norm", "ratio_mean", "ratio_max", "approx_kl", "logprob_diff_mean")
PACKED = {"packing_samples": True, "micro_batch_tokens": 200}
ONE_BATCH = {"train_batch_size": 16}


@pytest.fixture
def step_of(build_world, monkeypatch):
    """Takes a step: its metrics, the movement of the weights, and the tokens in streams."""
    # Prompts of these tests are short.
    monkeypatch.setattr(proof, "MIN_SHARED_TOKENS", 2)
    packed = TokenLayout.packed

    def step(how, args, **options):
        widths = []

        def counted(cls, *inputs, **named):
            layout = packed(*inputs, **named)
            widths.append(layout.input_ids.shape[1])
            return layout

        world = build_world(args={**PACKED, **args, "shared_prefix": how}, **options)
        monkeypatch.setattr(TokenLayout, "packed", classmethod(counted))
        before = world.weights()
        metrics = world.step()
        moved = {name: value - before[name] for name, value in world.weights().items()}
        return metrics, moved, sum(widths)

    return step


@pytest.mark.parametrize(
    "args, options",
    [
        ({}, {"with_critic": True, "with_reference": True, "use_kl_loss": True}),
        ({**ONE_BATCH, "fused_linear_logprob": True}, {"entropy_coef": 0.01}),
        ({**ONE_BATCH, "lora_rank": 4}, {"with_reference": True, "use_kl_loss": True}),
        ({"gradient_checkpointing": True, "max_epochs": 2}, {"off_policy_correction": "tis"}),
        (ONE_BATCH, {"policy_loss": "gspo", "loss_agg_mode": "token-mean"}),
    ],
)
def test_a_step_is_that_of_separate_samples(step_of, args, options):
    metrics, moved, num_tokens = step_of("auto", args, **options)
    expected, wanted, num_separate = step_of("off", args, **options)
    assert num_tokens < 0.9 * num_separate
    for name in METRICS:
        if name in expected:
            assert metrics[name] == pytest.approx(expected[name], rel=2e-5, abs=2e-6), name
    # AdamW: the first update of a weight is the sign of its gradient.
    assert relative_norm(moved, wanted) <= 1e-3
