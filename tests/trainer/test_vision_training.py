"""Whole runs of vision-language models: the same step whatever the strategy and the layout."""

from importlib import import_module

import pytest
from tests.models.vision import wrong_cuts
from tests.models.vision.tiny_families import TINY_FAMILIES, write_tiny_vision_model
from tests.ranks import run_multiprocess
from tests.runs import lines
from tests.trainer.vision_world import scorer_folder, vision_options

from lightrft.config import ConfigError, TrainConfig
from lightrft.engines.media.media import Media
from lightrft.engines.media.sources import ImageSource
from lightrft.models.vision import forward, proof
from lightrft.run.assembly import run_training
from lightrft.stages.start_checks import load_modality
from lightrft.tools.audit.findings import DIFFERS, EQUAL
from lightrft.tools.audit.report import audit_step

pytestmark = pytest.mark.shard("vision")

COMPARED = ("reward", "policy_loss", "grad_norm", "entropy", "logprob_diff_mean")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    found = {}

    def path(preset):
        if preset not in found:
            found[preset] = tmp_path_factory.mktemp("model") / preset
            write_tiny_vision_model(found[preset], preset, seed=1)
        return str(found[preset])

    return path


def train(rank, world_size, options, cut):
    """Verdict of a run, whose rows are cut otherwise if that is given."""
    if cut is not None:
        forward.cut_tokens = cut
    if not options.get("verify_weight_sync", True):
        proof.prove_media = lambda *_: None
    return run_training(TrainConfig(**options)).verdict


def metrics(data, model, output, *, world_size=1, cut=None, **changes):
    """Metrics of both steps."""
    arguments = (vision_options(data, model, output, **changes), cut)
    verdict, *_ = run_multiprocess(train, world_size, timeout_seconds=280, args=arguments)
    assert verdict.startswith("trained")
    steps = lines(output / "metrics.jsonl")
    assert len(steps) == 2
    return [{name: step[name] for name in COMPARED} for step in steps]


def assert_same_steps(found, expected):
    for one, other in zip(found, expected, strict=True):
        for name in COMPARED[:-1]:
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
        assert one["logprob_diff_mean"] < 1e-5


def check_steps(data, model, folder, *, both=(), **changes):
    """Fails unless a run with changes takes the steps of one process."""
    expected = metrics(data, model, folder / "one", **dict(both))
    assert_same_steps(metrics(data, model, folder / "other", **dict(both), **changes), expected)


ON_TWO = {"world_size": 2, "fsdp": True, "micro_train_batch_size": 2}


@pytest.mark.full
def test_a_rank_without_images_takes_the_step_of_one_process(data, models, tmp_path):
    # With one row at a time, ranks often differ in having images.
    options = ON_TWO | {"micro_train_batch_size": 1, "packing_samples": True}
    model = models("tiny-qwen2.5-vl")
    check_steps(data, model, tmp_path, **options, gradient_checkpointing=True)


CELLS = {
    "zero2": {"world_size": 2, "zero_stage": 2},
    "zero3": {"world_size": 2, "zero_stage": 3},
    "sequence parallel": {"world_size": 2, "fsdp": True, "sp_size": 2, "packing_samples": True},
    "fused head": {"fused_linear_logprob": True, "packing_samples": True},
}


def slow(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.full
@pytest.mark.parametrize("cell", ["sequence parallel", *slow("zero2", "zero3", "fused head")])
@pytest.mark.parametrize("preset", ["tiny-qwen2.5-vl", *slow("tiny-qwen3-vl", "tiny-gemma3")])
def test_every_strategy_takes_the_same_step(preset, cell, data, models, tmp_path):
    check_steps(data, models(preset), tmp_path, **CELLS[cell])


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset, cut",
    [
        ("tiny-qwen2.5-vl", wrong_cuts.first_features),
        ("tiny-qwen3-vl", wrong_cuts.inner_features_first),
    ],
)
def test_a_wrong_cut_of_shared_rows_is_seen(preset, cut, data, models, tmp_path):
    """By the proof of the start, and without any check by this comparison."""
    model, cell = models(preset), CELLS["sequence parallel"]
    with pytest.raises(RuntimeError, match=r"rows with images are not computed by"):
        metrics(data, model, tmp_path / "checked", cut=cut, **cell)
    unchecked = {"verify_weight_sync": False, "parity_check_steps": -1}
    expected = metrics(data, model, tmp_path / "one", **unchecked)
    found = metrics(data, model, tmp_path / "other", cut=cut, **cell, **unchecked)
    with pytest.raises(AssertionError):
        assert_same_steps(found, expected)
    assert found[0]["logprob_diff_mean"] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset",
    [
        "tiny-internvl",
        "tiny-llava",
        "tiny-llava-onevision",
        "tiny-smolvlm",
        "tiny-mllama",
        "tiny-qwen2-vl",
    ],
)
def test_every_family_takes_the_same_step_on_two_ranks(preset, data, models, tmp_path):
    packs = preset != "tiny-mllama"
    check_steps(data, models(preset), tmp_path, packing_samples=packs, **ON_TWO)


@pytest.mark.slow
def test_a_reward_model_says_the_same_on_two_ranks(data, models, tmp_path):
    model = models("tiny-qwen2.5-vl")
    path, _ = scorer_folder(model, tmp_path / "scorer")
    options = {"reward_fn": (), "reward_pretrain": (path,)}
    check_steps(data, model, tmp_path, both=options, **ON_TWO)


def audited(data, model, folder, **options):
    """Differences and what is not audited, in the second step of a run with images."""
    options |= {"audit_every": 1, "train_batch_size": 8}
    run_training(TrainConfig(**vision_options(data, model, folder, **options)))
    rows = audit_step(folder, 2).rows
    found = [row.quantity for row in rows if row.verdict == DIFFERS]
    return found, {row.quantity for row in rows if row.verdict == EQUAL}, rows


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"advantage_estimator": "gae", "init_kl_coef": 0.1, "kl_target": 0.1},
        {"init_kl_coef": 0.1, "use_kl_loss": True, "lora_rank": 2, "entropy_coef": 0.01},
    ],
    ids=["critic", "adapters"],
)
def test_an_audit_of_images_leaves_out_the_passes_of_models_alone(data, models, tmp_path, options):
    found, equal, rows = audited(data, models("tiny-qwen2.5-vl"), tmp_path / "run", **options)
    assert found == []
    assert equal > {
        "token ids",
        "prompts of groups",
        "KL weight",
        "states before, actor",
        "engine logprobs",
        "returns",
        "advantages",
        "denominator, actor update 2",
        "policy loss, actor update 2",
        "learning rate, actor update 2",
        "actor frozen weights after",
        *(
            ["value loss, critic update 1"]
            if "kl_target" in options
            else ["kl loss, actor update 1"]
        ),
    }
    left = {row.quantity for row in rows if "images and videos are not recorded" in row.note}
    assert left > {"old logprobs", "gradient norm, actor update 1", "actor weights after"}


@pytest.mark.full
@pytest.mark.parametrize(
    "place, name, fault",
    [
        ("experience.maker", "estimate_row_advantages", "advantages"),
        ("stages.policy.updates", "local_normalizer", "denominator, actor update 1"),
        ("stages.policy.objective", "loss_weights", "policy loss, actor update 1"),
    ],
)
def test_an_audit_of_images_sees_what_is_computed_from_scores(
    data, models, tmp_path, monkeypatch, place, name, fault
):
    module = import_module(f"lightrft.{place}")
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **named: 1.01 * right(*args, **named))
    found, *_ = audited(data, models("tiny-qwen2.5-vl"), tmp_path / "run")
    assert fault in found


def config_of(data, model, **changes):
    return TrainConfig(**vision_options(data, model, "unused", **changes))


@pytest.mark.parametrize(
    "preset", ["tiny-qwen2-vl", "tiny-qwen2.5-vl", "tiny-qwen3-vl", "tiny-glm4v"]
)
def test_limits_of_pixels_scale_images_of_a_saved_processor(preset, models, data):
    image = ImageSource("a photograph", path=data / "0_0.png")
    text = TINY_FAMILIES[preset].image

    def num_tokens(**limits):
        vision = load_modality(config_of(data, models(preset), **limits), None)
        encoded = vision.encoder.encode(text, Media({"image": [image]}))
        counts = 2 if preset == "tiny-glm4v" else 1  # as two frames
        assert (
            encoded.sizes["images_kwargs"]["size"].items()
            >= {
                "longest_edge": counts * limits.get("max_pixels", 112 * 112),
                "shortest_edge": counts * limits.get("min_pixels", 56 * 56),
            }.items()
        )
        return len(encoded.token_ids)

    assert num_tokens(max_pixels=56 * 56) < num_tokens() < num_tokens(min_pixels=112 * 112)


@pytest.mark.parametrize(
    "preset, name", [("tiny-gemma3", "Gemma3Processor"), ("tiny-mistral3", "PixtralProcessor")]
)
def test_limits_of_pixels_are_refused_where_sizes_are_fixed(preset, name, models, data):
    with pytest.raises(ConfigError, match=f"{name} does not support max_pixels and min_pixels"):
        load_modality(config_of(data, models(preset), max_pixels=56 * 56), None)
