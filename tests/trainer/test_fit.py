from dataclasses import replace

import pytest
from tests.runs import compared, lines

from lightrft.reporting.loggers import JsonLinesLogger


def test_evaluation_leaves_training_as_it_was(build_world):
    runs = []
    for eval_steps in (-1, 1):
        world = build_world(eval_steps=eval_steps)
        prompts = world.prompts if eval_steps == 1 else ()
        result = world.trainer.fit(eval_prompts=prompts)
        runs.append(compared(result.last_metrics))
    assert runs[0] == runs[1]


def test_evaluation_is_greedy_and_counts_every_prompt_once(build_world):
    world = build_world()
    world.trainer.stage.data = replace(world.trainer.stage.data, eval_prompts=world.prompts[:5])
    first, second = world.trainer.evaluate(), world.trainer.evaluate()
    assert first["eval/num_prompts"] == 5
    assert first["eval/reward"] == second["eval/reward"]
    assert set(first) >= {"eval/vowels", "eval/lower", "eval/response_length"}


def test_without_a_checkpoint_nothing_is_resumed(build_world, tmp_path):
    world = build_world(ckpt_path=str(tmp_path / "none"))
    assert not world.trainer.load_checkpoint()
    assert not build_world().trainer.load_checkpoint()


def test_arguments_of_fit_replace_those_of_construction(build_world, tmp_path):
    world = build_world(num_prompts=8)
    args = {"max_steps": 1, "ckpt_path": str(tmp_path), "train_batch_size": 8}
    assert world.trainer.fit(args).num_steps == 1
    assert (tmp_path / "_actor").is_dir()


def test_fit_needs_prompts(build_world):
    world = build_world(prompts_dataloader=None)
    with pytest.raises(ValueError, match="prompts_dataloader"):
        world.trainer.fit()
    assert world.trainer.fit(prompts_dataloader=[world.prompts[:4]]).num_steps == 1


def test_numbers_that_json_lacks_are_null(tmp_path):
    logger = JsonLinesLogger(tmp_path / "m.jsonl")
    logger.log(1, {"a": float("nan"), "b": 2**61 + 1})
    logger.close()
    assert lines(tmp_path / "m.jsonl") == [{"step": 1, "a": None, "b": 2**61 + 1}]
