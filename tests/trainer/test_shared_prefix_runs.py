"""Whole steps with prefixes computed once, of every source of rows: they are those of each row."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.models.batches import relative_norm
from tests.models.vision.tiny_families import write_tiny_vision_model
from tests.runs import (
    assert_same,
    calling,
    rollout_options,
    row_options,
    steps,
    tiny_models,
    train,
    write_inputs,
)
from tests.stages.vision.test_vision_runs import pair_rows
from tests.stages.vision.vision_rows_world import write_rows as write_image_rows
from tests.trainer.test_environment_run import TEMPLATE
from tests.trainer.test_image_episodes import AGENT as IMAGE_AGENT, options_of, write_rows
from tests.trainer.vision_world import vision_options, write_data

from lightrft.config import TrainConfig
from lightrft.experience import delivery
from lightrft.models import proof
from lightrft.models.sequence_model import SequenceModel
from lightrft.rollout.environments.calls import ToolCall
from lightrft.trainer import DistillationTrainer

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

CASES = Path(__file__).parent.parent / "rollout/environment_cases.py"
TEXT_AGENT = Path(__file__).with_name("agent_of_run.py")
EXACT = {"packing_samples": True, "max_steps": 1}
CRITIC = {"advantage_estimator": "gae", "init_kl_coef": 0.05, "critic_learning_rate": 1e-3}
HOW = ("off", "auto")


@pytest.fixture
def folder(tmp_path):
    rows = [
        {"prompt": f"now say {text}", "hint": f"as {text}"} for text in ("aeiou", "1", "e", "o")
    ]
    write_inputs(tiny_models(tmp_path, "model", "teacher"), rows)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return tmp_path


def distilled(folder, name, **changes):
    """Learns from a teacher on samples."""
    options = rollout_options(
        folder, name, reward_fn=(), teacher=str(folder / "teacher"), **changes
    )
    DistillationTrainer(TrainConfig(**options)).train()


def prompted(folder, name, **changes):
    """Learns from a teacher that reads prompts of its own."""
    distilled(folder, name, teacher_prompt_column="hint", **changes)


def called(folder, name, **changes):
    """Learns from the branches of an agent's calls."""
    settings = {"agent": f"{TEXT_AGENT}:run", "apply_chat_template": True, "environment_workers": 1}
    sizes = {"reward_fn": (), "prompt_max_len": 64, "max_observation_tokens": 64}
    train(rollout_options(folder, name, **settings | sizes | changes))


def acted(folder, name, **changes):
    """Learns from the turns of episodes, with a reference and a critic."""
    settings = {
        "environment": f"{CASES}:Counter",
        "chat_template": str(folder / "template.jinja"),
        "apply_chat_template": True,
        "environment_workers": 1,
        "max_turns": 3,
        "prompt_max_len": 64,
        "max_observation_tokens": 32,
    }
    with calling(ToolCall("count_up")):
        train(rollout_options(folder, name, **settings | CRITIC | changes))


def vision_model(folder, name="vision"):
    write_tiny_vision_model(folder / name, "tiny-qwen2.5-vl", seed=1)
    return folder / name


def shown(folder, name, **changes):
    """Learns from prompts with images, with a reference and a critic."""
    model, data = vision_model(folder), folder / "data"
    data.mkdir(exist_ok=True)
    write_data(data)
    train(vision_options(data, model, folder / name, **CRITIC | changes))


def shown_later(folder, name, **changes):
    """Learns from the branches of an agent that shows images, some of one size."""
    vision_model(folder, "model")
    write_rows(folder)
    train(options_of(folder, name, **IMAGE_AGENT | changes))


def preferred(folder, name, **changes):
    """Learns from pairs behind images."""
    write_image_rows(folder, pair_rows())
    files = vision_model(folder), folder / "rows.jsonl", folder / name
    train(row_options(*files, max_row_tokens=200) | {"stage": "prefer"} | changes)


@pytest.mark.parametrize(
    "learn, num_models",
    [
        (distilled, 2),
        (prompted, 2),
        (called, 1),
        (acted, 3),
        (shown, 3),
        (shown_later, 1),
        (preferred, 2),
    ],
)
def test_a_step_is_that_of_separate_rows(learn, num_models, folder, monkeypatch):
    for module in (proof, delivery):
        monkeypatch.setattr(module, "MIN_SHARED_TOKENS", 2)
    lay_out = SequenceModel.lay_out
    # Numbers of real and of shared tokens of each model.
    tokens = {}

    def counted(model, *inputs, **named):
        layout = lay_out(model, *inputs, **named)
        total, shared = tokens.get(model, (0, 0))
        tokens[model] = total + layout.is_real.sum(), shared + layout.num_shared.sum()
        return layout

    monkeypatch.setattr(SequenceModel, "lay_out", counted)
    for how in HOW:
        tokens.clear()
        learn(folder, how, **EXACT, shared_prefix=how, micro_batch_tokens=1500)
        shares = [shared / total for total, shared in tokens.values()]
        assert len(shares) >= num_models
        # Proofs and random rows count, too.
        assert (min(shares) > 0.15) if how == "auto" else (max(shares) == 0)
    (separate,), (once,) = (steps(folder / how) for how in HOW)
    assert_same(separate, once, rel=2e-4, small=2e-6)
    weights = [load_file(folder / how / "model/model.safetensors") for how in HOW]
    pretrain = TrainConfig.load(folder / "off/config.toml").pretrain
    start = load_file(f"{pretrain}/model.safetensors")
    moved, expected = ({n: w[n] - start[n] for n in start} for w in reversed(weights))
    # AdamW: the first update of a weight is the sign of its gradient.
    assert relative_norm(moved, expected) <= 1e-3
