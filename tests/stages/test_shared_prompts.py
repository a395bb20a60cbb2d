"""Prompts of an evaluation that are trained on are counted, in every stage by one function."""

from tests.runs import rollout_options, train, write, write_inputs

from lightrft.stages.start_checks import shared_prompts

LINE = "the prompts of 2 of 3 held-out {} are trained on, too"


def test_shared_prompts_are_counted_once_each():
    assert shared_prompts(["a", "b"], ["c"]) == []
    assert LINE.format("rows") in shared_prompts(["a", "b", "b"], ["b", "c", "b"])[0]


def test_reinforcement_says_what_of_its_evaluation_it_trains_on(tmp_path, model, capsys):
    held_out = write(tmp_path / "held_out.jsonl", [{"prompt": text} for text in "abe"])
    write_inputs(tmp_path, [{"prompt": text} for text in "abcd"])
    train(rollout_options(tmp_path, pretrain=model, eval_data=held_out, max_steps=1))
    assert LINE.format("prompts") in capsys.readouterr().out
