"""`lightrft eval`: the same numbers on one and on several processes, recounted from its files."""

import json
from dataclasses import replace

import numpy as np
import pytest
from tests.ranks import run_multiprocess
from tests.runs import TEMPLATE, words, write

from lightrft.cli.main import main
from lightrft.config import TrainConfig
from lightrft.models.loading import load_tokenizer
from lightrft.run.provenance import write_model_run
from lightrft.stages.policy.inputs import load_run_prompts
from lightrft.tools.evaluation import eval_command
from lightrft.tools.evaluation.evaluation_run import held_out_prompts, own_prompts
from lightrft.tools.model_presets import write_tiny_model

REWARD = """
def short(responses):
    return [1.0 if len(text) % 2 else 0.25 for text in responses]
"""
UNPAID = """
class Unpaid:
    def reset(self, **row):
        pass

    def look(self) -> str:
        '''Look around.'''
        return "x"
"""
NUM_PROMPTS, NUM_SAMPLES = 7, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, seven prompts and a reward."""
    path = tmp_path_factory.mktemp("eval")
    write_tiny_model(path / "model", "tiny-qwen3", seed=3)
    rows = [json.dumps({"input": f"prompt {'x' * n}", "label": str(n)}) for n in range(NUM_PROMPTS)]
    (path / "eval.jsonl").write_text("\n".join(rows))
    (path / "held.jsonl").write_text("\n".join(rows[2:4]))
    (path / "r.py").write_text(REWARD)
    return path


def arguments(folder, name, *further):
    options = {
        "eval_data": folder / "eval.jsonl",
        "reward_fn": f"{folder / 'r.py'}:short",
        "generate_max_len": 6,
        "seed": 5,
        "num_samples": NUM_SAMPLES,
        "pass_k": (1, 3),
        "temperature": 0.8,
        "engine_type": "hf",
        "bf16": False,
        "save_rollouts": True,
        "held_out": folder / "held.jsonl",
        "rates": folder / "rates.jsonl",
        "output_dir": folder / name,
    }
    return [str(folder / "model"), *words(options), *further]


def evaluate(rank, world_size, argv):
    """One process of an evaluation."""
    from lightrft.tools.evaluation.eval_command import run

    return int(run(argv))


@pytest.fixture(scope="module")
def results(folder):
    """Files of the evaluation on one and on two processes; the shares are 4 and 3 prompts."""
    found = {}
    for world_size in (1, 2):
        argv = arguments(folder, f"on_{world_size}")
        codes = run_multiprocess(evaluate, world_size, timeout_seconds=500, args=(argv,))
        assert codes == [0] * world_size
        made = folder / f"on_{world_size}"
        lines = (made / "responses.jsonl").read_text().splitlines()
        content = json.loads((made / "eval.json").read_text())
        found[world_size] = content, list(map(json.loads, lines))
    return found


@pytest.mark.timeout(1000)
def test_unequal_shares_of_two_processes_give_the_results_of_one(results):
    assert results[1] == results[2]
    content, lines = results[1]
    assert content["num_prompts"] == NUM_PROMPTS
    assert len(lines) == NUM_PROMPTS * (1 + NUM_SAMPLES)
    assert {line["prompt"] for line in lines} == {f"prompt {'x' * n}" for n in range(NUM_PROMPTS)}
    assert content["settings"]["temperature"] == 0.8
    assert len({line["response"] for line in lines if line["pass"] == "sampled"}) > NUM_SAMPLES


@pytest.mark.timeout(1000)
def test_samples_make_rows_without_held_out_prompts(folder, results, tmp_path, capsys):
    saved = [(folder / f"on_{n}" / "rollouts.jsonl").read_text() for n in (1, 2)]
    assert saved[0] == saved[1]
    samples = [json.loads(line) for line in saved[0].splitlines()]
    responses = results[1][1]
    assert [each["reward"] for each in samples] == [each["reward"] for each in responses]
    is_held_out = [each["prompt_id"] in (2, 3) for each in responses]
    assert [each["held_out"] for each in samples] == is_held_out
    assert results[1][0]["num_held_out"] == 2
    path = tmp_path / "rows.jsonl"
    argv = ["rows", str(folder / "on_1"), "--for", "prefer", "--choose", "labelled"]
    assert main([*argv, "--output", str(path)]) == 0
    said = capsys.readouterr().out
    assert "no prompt is held out" not in said
    counts = [int(line.split()[0]) for line in said.splitlines()[1:-1]]
    assert counts[0] == sum(counts[1:]) == len(samples)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rewards = {(*e["prompt_ids"], *e["response_ids"]): e for e in samples}
    for row in rows:
        sample = rewards[*row["prompt_ids"], *row["response_ids"]]
        assert (row["label"], sample["held_out"]) == (sample["reward"] >= 1, False)
        assert not (row["label"] and sample["truncated"])


@pytest.mark.timeout(1000)
def test_rates_are_the_shares_of_right_samples(folder, results):
    rates = list(map(json.loads, (folder / "rates.jsonl").read_text().splitlines()))
    sampled = [each for each in results[2][1] if each["pass"] == "sampled"]
    assert len(rates) == NUM_PROMPTS
    for row, rate in enumerate(rates):
        right = [each["reward"] >= 1 for each in sampled if each["prompt_id"] == row]
        assert (rate["row"], rate["num_right"], rate["num_samples"]) == (row, sum(right), 4)


def test_held_out_prompts_are_those_of_the_run_of_the_model(folder, tmp_path):
    tokenizer = load_tokenizer(str(folder / "model"))
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    config = TrainConfig(pretrain=str(run / "model"), save_rollouts=True)
    held_out = TrainConfig(eval_data=str(folder / "held.jsonl"), max_eval_samples=1)
    assert held_out_prompts(config, None, tokenizer) == frozenset()
    held_out.save(run / "config.toml")
    write_model_run(run / "model", run, run_sha256="a" * 64, stage="policy")
    texts = {tokenizer.decode(ids) for ids, *_ in held_out_prompts(config, None, tokenizer)}
    assert texts == {"prompt xx", "prompt xxx"}
    everything = held_out_prompts(config, str(folder / "eval.jsonl"), tokenizer)
    assert len(everything) == NUM_PROMPTS
    unsaved = config.replaced({"save_rollouts": False})
    assert held_out_prompts(unsaved, None, tokenizer) == frozenset()


def test_every_metric_follows_from_the_responses(results):
    content, lines = results[2]
    metrics = content["metrics"]

    def rewards(name, count):
        table = np.array([line["reward"] for line in lines if line["pass"] == name])
        for line in lines:
            assert line["reward"] == (1.0 if len(line["response"]) % 2 else 0.25)
        return table.reshape(NUM_PROMPTS, count)

    greedy, sampled = rewards("greedy", 1), rewards("sampled", NUM_SAMPLES)
    right = sampled == 1.0
    assert 0 < right.mean() < 1
    assert metrics["greedy/reward"] == pytest.approx(greedy.mean())
    assert metrics["greedy/accuracy"] == pytest.approx((greedy == 1).mean())
    assert metrics["sampled/reward"] == pytest.approx(sampled.mean())
    assert metrics["avg@4"] == metrics["pass@1"] == pytest.approx(right.mean())
    # Of 4 samples with 1 right one, 3 of the 4 subsets of size 3 hold it; with 2, all do.
    expected = [(0.0, 0.75, 1.0, 1.0, 1.0)[count] for count in right.sum(axis=1)]
    assert metrics["pass@3"] == pytest.approx(np.mean(expected))
    error = right.mean(axis=1).std(ddof=1) / NUM_PROMPTS**0.5
    assert metrics["avg@4/stderr"] == pytest.approx(error)


def test_prompts_of_responses_are_those_of_the_rows_and_render_again_alike(tmp_path, folder):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    rows = [{"q": "2+2?"}, {"q": chat}, {"q": "<|user|>2+2?"}]
    path = write(tmp_path / "rows.jsonl", rows)
    config = TrainConfig(eval_data=path, input_key="q", apply_chat_template=True)
    tokenizer = load_tokenizer(str(folder / "model"))
    prompts = load_run_prompts(config, tokenizer, for_evaluation=True).prompts
    own = own_prompts(config, prompts)
    assert own == [row["q"] for row in rows]
    assert own[0] != prompts[0].text
    again = write(tmp_path / "again.jsonl", [{"q": each} for each in own])
    config = replace(config, eval_data=again)
    found = load_run_prompts(config, tokenizer, for_evaluation=True).prompts
    assert [prompt.token_ids for prompt in found] == [prompt.token_ids for prompt in prompts]
    # A column that a response cannot hold, and a row whose environment brings the prompt.
    config = replace(config, eval_data=path, input_key="other")
    assert own_prompts(config, prompts) == [prompt.text for prompt in prompts]


def test_a_reward_model_or_an_environment_is_reward_enough(folder):
    argv = [
        str(folder / "model"),
        "--apply_chat_template",
        "--eval_data",
        str(folder / "eval.jsonl"),
    ]
    for option in ("--reward_pretrain", "--environment", "--agent"):
        eval_command.parse([*argv, option, argv[0]])


def test_an_environment_without_a_reward_is_not_enough(folder, tmp_path, capsys):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    (tmp_path / "e.py").write_text(UNPAID)
    options = {
        "eval_data": folder / "eval.jsonl",
        "apply_chat_template": True,
        "chat_template": tmp_path / "t.jinja",
        "tool_parser": "llama",
        "environment": f"{tmp_path / 'e.py'}:Unpaid",
        "system_prompt": "x",
        "generate_max_len": 6,
        "prompt_max_len": 300,
        "engine_type": "hf",
        "output_dir": tmp_path / "run",
    }
    assert main(["eval", str(folder / "model"), *words(options)]) == 2
    assert "environment Unpaid has no get_reward" in capsys.readouterr().err
