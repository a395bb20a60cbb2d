"""Flags and TOML files become one configuration."""

import pytest

from lightrft.cli.options import merge_options, normalise, unknown_flags
from lightrft.cli.train import build_parser
from lightrft.utils.arguments import from_text


def parse(line, files=()):
    parsed, unknown = build_parser().parse_known_args(normalise(line.split()))
    flags = vars(parsed)
    del flags["config"], flags["nproc_per_node"]
    config, problems = merge_options(files, flags)
    return config, unknown_flags(unknown) + problems


def test_flags_become_values_of_their_type():
    config, problems = parse(
        "--temperature 0.5 --max_steps 3 --max_samples 1e3 --kl_target none --reward_fn boxed_math "
        "r.py:f --adam_betas 0.8 0.9 --bf16 --fsdp --engine_args max_num_seqs=4 enforce_eager=true "
        "name=x --pretrain 12 --critic_pretrain m"
    )
    assert problems == []
    assert (config.temperature, config.max_steps, config.max_samples) == (0.5, 3, 1000)
    assert config.kl_target is None
    assert config.reward_fn == ("boxed_math", "r.py:f")
    assert config.adam_betas == (0.8, 0.9)
    assert config.bf16 is True
    assert config.fsdp is True
    assert config.engine_args == {"max_num_seqs": 4, "enforce_eager": True, "name": "x"}
    assert (config.pretrain, config.critic_pretrain) == ("12", "m")


def test_engine_options_may_come_one_by_one():
    config, problems = parse("--engine_arg a=1 --engine_arg b=x --engine-args c=2.5")
    assert problems == []
    assert config.engine_args == {"a": 1, "b": "x", "c": 2.5}


def test_flags_of_several_values_may_be_repeated():
    line = (
        "--reward_fn a b --reward_fn=c --adam_betas 0 0 --adam_betas 0.8 0.9 --config x --config y"
    )
    assert build_parser().parse_args(line.split()).config == ["x", "y"]
    config, _ = parse(line)
    assert (config.reward_fn, config.adam_betas) == (("a", "b", "c"), (0.8, 0.9))


def test_hyphens_and_equals_signs_are_the_same_flag():
    config, problems = parse("--reward-fn a-b.py:f --output-dir=some-where=x --top-k -1")
    assert problems == []
    assert config.reward_fn == ("a-b.py:f",)
    assert config.output_dir == "some-where=x"
    assert config.top_k == -1


def test_later_files_win_and_flags_win_over_files(tmp_path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("temperature = 1\nmax_steps = 1\ntop_k = 1\n")
    second.write_text("max_steps = 2\ntop_k = 2\nreward_fn = ['gsm8k']\n")
    config, problems = parse("--top_k 3", files=(first, second))
    assert problems == []
    assert (config.temperature, config.max_steps, config.top_k) == (1.0, 2, 3)
    assert isinstance(config.temperature, float)
    assert config.reward_fn == ("gsm8k",)


@pytest.mark.parametrize(
    "text, hint, value",
    [
        ("1e6", int, 1_000_000),
        ("1.5", int, "1.5"),
        ("many", int, "many"),
        ("inf", float, float("inf")),
        ("inf", int, "inf"),
        ("nan", int, "nan"),
        ("None", int | None, None),
        ("None", str, "None"),
        ("8", str | int | None, 8),
        (True, float, True),
        (3, float, 3.0),
        ([1, 2], tuple[float, float], (1.0, 2.0)),
        (["a"], str, ["a"]),
    ],
)
def test_values_that_fit_are_converted_and_others_left_to_the_configuration(text, hint, value):
    made = from_text(text, hint)
    assert made == value
    assert type(made) is type(value)


def test_shares_of_sources_may_be_separated_by_commas(tmp_path):
    for shares in ("0.7,0.3", "0.7 0.3"):
        config, problems = parse(f"--prompt_data a.jsonl,b.jsonl --prompt_data_probs {shares}")
        assert (config.prompt_data_probs, problems) == ((0.7, 0.3), [])
    _, problems = parse("--prompt_data a.jsonl,b.jsonl --prompt_data_probs 0.7,x")
    assert any("prompt_data_probs" in problem for problem in problems)
    _, (problem,) = parse("--prompt_data a.jsonl --prompt_data_probs 0.5,0.5")
    assert problem.startswith("prompt_data_probs must have one number per source")
    (tmp_path / "a.jsonl").write_text("")
    config, _ = parse(f"--prompt_data {tmp_path / 'a.jsonl'} --prompt_split dev")
    assert config.unused_options() == [
        "prompt_split acts only with a folder or data set in prompt_data"
    ]
