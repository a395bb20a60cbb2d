"""Pass rates: the file, the prompts that it keeps, and draws that follow them."""

import json

import pytest

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.files import FileError
from lightrft.datasets.pass_rates import (
    PassRate,
    hash_of_prompt,
    rated_prompts,
    read_rates,
    write_rates,
)
from lightrft.datasets.prompt_sampler import GroupResult, RowChoice, build_sampler
from lightrft.datasets.types import DataError, Prompt

PROMPTS = [Prompt(i, str(i), (1, i)) for i in range(6)]
COUNTS = [PassRate(n, 8) for n in (0, 1, 4, 7, 8, 8)]
PLACES = [f"{name}.jsonl:{n}" for n, name in enumerate("aabbbb", start=1)]


@pytest.fixture
def rates(tmp_path):
    path = tmp_path / "rates.jsonl"
    write_rates(path, PROMPTS, COUNTS)
    return path


def test_rates_come_back_and_lines_of_one_prompt_add_up(rates):
    assert list(read_rates(rates).values()) == COUNTS
    first = json.loads(rates.read_text().splitlines()[1])
    assert first == {
        "prompt": hash_of_prompt(PROMPTS[1]),
        "row": 1,
        "pass_rate": 0.125,
        "num_right": 1,
        "num_samples": 8,
    }
    rates.write_text(rates.read_text() * 2)
    assert list(read_rates(rates).values()) == [PassRate(2 * c.num_right, 16) for c in COUNTS]


@pytest.mark.parametrize(
    "bounds, kept, remark",
    [
        ("0.1:0.9", [1, 2, 3], "kept 3 of 6 prompts with a pass rate from 0.1 to 0.9; 1 are below"),
        ("0:1", [0, 1, 2, 3, 4, 5], "0 are below, 0 above"),
        ("0.125:0.5", [1, 2], "1 are below, 3 above; 1 of 2 from a.jsonl, 1 of 4 from b.jsonl"),
    ],
)
def test_a_range_keeps_prompts_and_says_where_the_others_were(rates, bounds, kept, remark):
    config = TrainConfig(prompt_rates=str(rates), prompt_pass_rate=bounds)
    places, rates_of_kept, said = rated_prompts(str(rates), PROMPTS, PLACES, config)
    assert places == kept
    assert rates_of_kept == [COUNTS[place] for place in kept]
    assert remark in said


def test_a_prompt_without_a_rate_and_an_empty_range_are_refused(rates):
    config = TrainConfig(prompt_rates=str(rates), prompt_pass_rate="0.2:0.3")
    with pytest.raises(
        DataError, match=r"no prompt has a pass rate from 0\.2 to 0\.3: 2 are below"
    ):
        rated_prompts(str(rates), PROMPTS, PLACES, config)
    other = [*PROMPTS, Prompt(6, "", (9,))]
    with pytest.raises(DataError, match=r"no rate for 1 of 7 prompts \(first: c\.jsonl:1\)"):
        rated_prompts(str(rates), other, [*PLACES, "c.jsonl:1"], config)


@pytest.mark.parametrize(
    "line, message",
    [
        ("{}", "prompt"),
        ('{"prompt": "x", "row": 0, "pass_rate": 2, "num_right": 2, "num_samples": 1}', "0 <= num"),
        ("nothing", "rates.jsonl:1"),
        ("", "holds no rates"),
    ],
)
def test_a_damaged_file_is_named(rates, line, message):
    rates.write_text(line)
    with pytest.raises(FileError, match=message):
        read_rates(rates)


@pytest.mark.parametrize("text", ["0.9:0.1", "0.1", "a:b", "-1:0.5", "0:2", "nan:1"])
def test_a_range_must_be_one(rates, text):
    with pytest.raises(ConfigError, match="expected LOW:HIGH from 0 to 1"):
        TrainConfig(prompt_rates=str(rates), prompt_pass_rate=text)


def test_options_of_rates_that_have_no_effect_are_refused():
    with pytest.raises(ConfigError, match="prompt_pass_rate needs prompt_rates"):
        TrainConfig(prompt_pass_rate="0.1:0.9")
    with pytest.raises(ConfigError, match="prompt_importance excludes dynamic_sampling"):
        TrainConfig(prompt_importance=True, dynamic_sampling=True)


def test_by_weight_rates_are_drawn_by_their_spread():
    config = TrainConfig(prompt_sampler="weighted")
    choice = RowChoice(3, 0, 3, rates=[PassRate(0, 8), PassRate(4, 8), PassRate(8, 8)])
    drawn = build_sampler(config, choice).draw(3)
    # (1/10)(9/10), (5/10)(5/10) and the first again.
    shares = {0: 0.09 / 0.43, 1: 0.25 / 0.43, 2: 0.09 / 0.43}
    for each in drawn:
        assert each.probability == pytest.approx(shares[each.place])


def pools(size=5, rates=(), **args):
    config = TrainConfig(prompt_sampler="pools", prompt_sampler_args=args or None)
    return build_sampler(config, RowChoice(size, 0, 2, has_rewards=True, rates=rates))


def result(place, *accuracies):
    return GroupResult(place, accuracies, accuracies, (3,) * len(accuracies))


def weights_of(sampler):
    shares = sampler.probabilities()
    return (shares / shares.max()).tolist()


def test_prompts_without_a_signal_rest_and_are_admitted_again():
    sampler = pools(rest_weight=0.25, readmit_steps=3)
    assert weights_of(sampler) == [1, 1, 1, 1, 1]
    sampler.observe([result(0, 1, 1), result(1, 0, 0), result(2, 1, 0)])
    for _ in range(3):
        assert weights_of(sampler) == [0.25, 0.25, 1, 1, 1]
        sampler.observe([result(4, 1, 0)])
    assert weights_of(sampler) == [1, 1, 1, 1, 1]
    sampler.observe([result(1, 1, 1)])
    assert weights_of(sampler) == [1, 0.25, 1, 1, 1]


@pytest.mark.parametrize("decay, rates", [(0.5, (0, 1 / 2, 3 / 4, 3 / 8)), (0.0, (0, 1, 1, 0))])
def test_the_rate_is_a_mean_and_then_moves(decay, rates):
    sampler = pools(rest_weight=1e-9, decay=decay)
    for groups, rate in enumerate(rates, start=1):
        sampler.observe([result(3, *((1, 0) if groups in (2, 3) else (1, 1)))])
        assert sampler.state["seen"] == {"3": (rate, groups, groups)}
        assert weights_of(sampler)[3] == pytest.approx(max(rate, 1e-9))


def test_a_state_holds_no_more_than_what_the_last_steps_saw():
    sampler = pools(1000, readmit_steps=4)
    for step in range(1, 30):
        sampler.observe([result(8 * step + i, 1) for i in range(8)])
        assert len(sampler.state["seen"]) == 8 * min(step, 4)


def test_measured_rates_send_prompts_to_rest_from_the_start():
    rates = [PassRate(0, 4), PassRate(2, 4), PassRate(4, 4)]
    sampler = pools(3, rates, rest_weight=0.5, readmit_steps=2)
    assert weights_of(sampler) == [0.5, 1, 0.5]
    sampler.observe([result(0, 1, 0)])
    assert weights_of(sampler) == [1, 1, 0.5]
    sampler.observe([])
    assert weights_of(sampler) == [1, 1, 1]


def test_a_group_without_scores_teaches_nothing():
    sampler = pools()
    before = json.dumps({**sampler.state, "num_steps": 1})
    sampler.observe([GroupResult(0, (), (), (4, 4))])
    assert json.dumps(sampler.state) == before


@pytest.mark.parametrize(
    "args, message",
    [
        ({"rest_weight": 0.0}, "0 < rest_weight"),
        ({"readmit_steps": 0}, "readmit_steps >= 1"),
        ({"decay": 1.0}, "0 <= decay < 1"),
    ],
)
def test_pools_refuse_settings_out_of_range(args, message):
    with pytest.raises(ConfigError, match=message):
        pools(**args)


def test_pools_need_rewards():
    config = TrainConfig(prompt_sampler="pools")
    with pytest.raises(ConfigError, match="follows rewards of samples, and this stage has none"):
        build_sampler(config, RowChoice(4, 0, 2))
