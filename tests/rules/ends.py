"""Responses end at every end that the model declares."""

import json
from pathlib import Path

from tests.datasets.row_files import written
from tests.rules.spoken import END, ROWS, SMALL, rollouts, spoken_model
from tests.rules.stages import Cell, cells

from lightrft.cli.main import main
from lightrft.config import TrainConfig
from lightrft.tools.serve.chat_model import ServedModel
from lightrft.trainer import train

TALKING = {65: 0.0, END: 0.0}


def require_ended(samples):
    """Every response that holds the end stops there, and some do."""
    responses = [list(sample["response_ids"]) for sample in samples]
    ended = [ids for ids in responses if END in ids]
    assert len(ended) > len(responses) / 2
    assert all(ids.index(END) == len(ids) - 1 for ids in ended)


def a_run_stops_where_the_tokenizer_ends(tmp_path):
    model = spoken_model(tmp_path, TALKING)
    train(
        model,
        ROWS,
        lambda responses: [0.0] * len(responses),
        output_dir=str(tmp_path / "run"),
        **SMALL,
    )
    require_ended(rollouts(tmp_path / "run"))
    saved = json.loads((tmp_path / "run/model/generation_config.json").read_text())
    assert saved["eos_token_id"] == END


def an_evaluation_stops_where_the_tokenizer_ends(tmp_path):
    model = spoken_model(tmp_path, TALKING)
    rows = written(tmp_path, ROWS)
    argv = [
        "--eval_data",
        rows,
        "--reward_fn",
        "boxed_math",
        "--output_dir",
        str(tmp_path / "e"),
    ]
    words = ["--num_samples", "4", "--generate_max_len", "12", "--save_rollouts", "--engine_type"]
    assert main(["eval", model, *argv, *words, "hf"]) == 0
    require_ended([each for each in rollouts(tmp_path / "e") if each["step"] == 1])


def a_served_answer_stops_where_the_tokenizer_ends(tmp_path):
    served = ServedModel(Path(spoken_model(tmp_path, TALKING)), TrainConfig())
    asked = {"model": "m", "max_tokens": 12, "messages": [{"role": "user", "content": "?"}]}
    bodies = [json.dumps({**asked, "seed": seed}).encode() for seed in range(8)]
    answers = served.chat.answers(
        bodies[:1], "m", lambda asked, how: served.engine.generate(asked, how)
    )
    choice = json.loads(answers[0])["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert set(choice["message"]["content"]) <= {"A"}


def the_check_of_data_names_every_end(tmp_path, capsys):
    model = spoken_model(tmp_path, TALKING)
    rows = written(tmp_path, ROWS)
    assert main(["data", "check", rows, "--pretrain", model]) == 0
    said = capsys.readouterr().out
    assert "trained (mask 1) up to and including ⟦<|end|>⟧" in said
    assert "generation stops at '<|end|>' (tokenizer, chat template)" in said


TESTS: dict[str, Cell] = {
    "train": a_run_stops_where_the_tokenizer_ends,
    "eval": an_evaluation_stops_where_the_tokenizer_ends,
    "serve": a_served_answer_stops_where_the_tokenizer_ends,
    "data check": the_check_of_data_names_every_end,
}
CELLS = cells(
    TESTS,
    {
        "sft, prefer, reward, distill on rows, rows": "Its rows are given, and nothing is sampled.",
        "distill on samples, environments, tools, agents": "Its engine is started by the code of "
        "train, with the same ends.",
        "judge and reward models": "A judge answers by the code of serve, and scores are no text.",
    },
)
