"""Ids beyond the embedding or the tokenizer are neither sampled nor trained."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from tests.rules.spoken import END, NUM_IDS, ROWS, SMALL, rollouts, spoken_model
from tests.rules.stages import Cell, cells

from lightrft.cli.main import main
from lightrft.config import TrainConfig
from lightrft.engines.types import GenerationRequest, SamplingParams
from lightrft.tools.serve.chat_model import ServedModel
from lightrft.trainer import train

# Of 700 rows those behind the tokenizer's 261 ids are by far the likeliest.
PADDED = {65: 0.0, END: 0.0, **dict.fromkeys(range(NUM_IDS, 700), 9.0)}


def padding_is_neither_sampled_nor_trained(tmp_path):
    model = spoken_model(tmp_path, PADDED, num_rows=700)
    run = tmp_path / "run"
    train(
        model,
        ROWS,
        lambda responses: [float(len(text)) for text in responses],
        output_dir=str(run),
        **{**SMALL, "actor_learning_rate": 0.1, "entropy_coef": 0.01, "l2": 0.0, "audit_every": 1},
    )
    assert main(["audit", str(run), "--step", "1"]) == 0
    ids = [token for sample in rollouts(run) for token in sample["response_ids"]]
    assert max(ids) < NUM_IDS
    before, after = (load_file(Path(f) / "model.safetensors") for f in (model, run / "model"))
    for name in ("lm_head.weight", "lm_head.bias"):
        assert torch.equal(before[name][NUM_IDS:], after[name][NUM_IDS:]), name
        assert not torch.equal(before[name][:NUM_IDS], after[name][:NUM_IDS]), name


def padding_is_not_served(tmp_path):
    served = ServedModel(Path(spoken_model(tmp_path, PADDED, num_rows=700)), TrainConfig())
    request = GenerationRequest(request_id=0, prompt_token_ids=(65,), max_tokens=12)
    made = served.engine.generate([request], SamplingParams(n=8, ignore_eos=True))
    assert max(max(each.output_token_ids) for each in made) < NUM_IDS
    assert served.engine.score([65, 65])[1] > -0.7


TESTS: dict[str, Cell] = {
    "train": padding_is_neither_sampled_nor_trained,
    "serve": padding_is_not_served,
}
CELLS = cells(
    TESTS,
    {
        "sft, prefer, reward, distill on rows, eval, data check": "A tokenizer with more ids than "
        "the model has rows is refused: tests/cli/test_wrong_inputs.py.",
        "distill on samples, environments, tools, agents": "Its engine and its model are made by "
        "the code of train.",
        "judge and reward models": "A judge answers by the code of serve, and scores are no ids.",
        "rows": "It writes the ids that a run has sampled, in which there are none of padding.",
    },
)
