"""Bad data and options of the stages on given rows: one line, the documented code, no file.

Distillation of prompts is tested in test_distill.py.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import dataclass, field

import pytest

from lightrft.cli.main import main
from lightrft.tools.model_presets import write_tiny_model

USAGE, MACHINE, DATA = 2, 3, 4
SFT = {"prompt": "a ", "completion": "b"}
PAIR = {"prompt": "a ", "chosen": "b", "rejected": "c"}
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
IDS = {"token_ids": [5, 6], "is_trained": [0, 1]}
RANKED = {"prompt": "a", "answers": ["b", "c"], "ranks": [1, 2]}
STEPS = {"prompt": "a", "completions": ["b", "c"], "labels": [True, False]}
LABELLED = {"prompt": "a ", "completion": "b", "label": True}
SCORED = {"prompt_ids": [5], "response_ids": [6], "score": 1}
GOOD = {"sft": SFT, "distill": SFT, "prefer": PAIR, "reward": PAIR}
FORWARD = {"teacher": "model", "teacher_form": "forward"}


@dataclass(frozen=True)
class Wrong:
    """One mistake.

    Args:
        stage: The command.
        code: Exit code.
        expected: Parts of the line.
        rows: Lines of rows.jsonl: objects, texts as they are, or bytes of the whole file; None is a
            good one.
        options: Beside good ones; None drops one.
        files: Contents by name; None is a folder.
    """

    stage: str
    code: int
    expected: tuple[str, ...]
    rows: tuple | bytes | None = None
    options: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)


def row(stage, content, *expected, **options):
    """A row that is refused, behind a good one of its kind if it is wrong in its kind."""
    return Wrong(stage, DATA, expected, (content,), options)


def option(stage, *expected, files=None, **options):
    return Wrong(stage, USAGE, expected, None, options, files or {})


# One mistake in several stages: code, words, rows (None stands for a good one) and options.
OF_STAGES = {
    "no JSON": ("sft prefer", DATA, "rows.jsonl:2: not valid JSON", (None, "{"), {}),
    "no rows": ("sft reward", DATA, "rows.jsonl holds no rows", (), {}),
    "two kinds": ("prefer reward", DATA, ":2: expected rows like the first", (None, LABELLED), {}),
    "too long": (
        "prefer reward",
        DATA,
        "all 1 pairs exceed max_row_tokens = 2",
        (None,),
        {"max_row_tokens": 2},
    ),
    "few rows": (
        "sft prefer reward",
        USAGE,
        "has 1 usable rows, less than one step",
        (None,),
        {"train_batch_size": 2},
    ),
    "no model": (
        "sft prefer reward",
        USAGE,
        "--pretrain: no model directory at nothing",
        (None,),
        {"pretrain": "nothing"},
    ),
    "of sft": (
        "prefer reward",
        USAGE,
        "train_on is an option of lightrft sft, not of",
        (None,),
        {"train_on": "all"},
    ),
    "of train": (
        "sft prefer",
        USAGE,
        "policy_loss is an option of lightrft train",
        (None,),
        {"policy_loss": "gspo"},
    ),
}
SHARED = {
    f"{name}, {stage}": Wrong(stage, code, (words,), rows, options)
    for name, (stages, code, words, marks, options) in OF_STAGES.items()
    for stage in stages.split()
    for rows in [tuple(GOOD[stage] if mark is None else mark for mark in marks)]
}
WRONG = {
    # What is no row.
    "no object": row("sft", "[1, 2]", "rows.jsonl:1"),
    "not UTF-8": Wrong("sft", DATA, ("rows.jsonl",), b'{"text": "\xff\xfe"}\n'),
    "binary": Wrong("prefer", DATA, ("rows.jsonl",), bytes(range(256))),
    "deep": row("sft", '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", "rows.jsonl:1"),
    "half a character": row("sft", '{"text": "\\ud800"}', "rows.jsonl:1"),
    "half a character in an answer": row(
        "prefer", '{"prompt": "a", "chosen": "\\udc00", "rejected": "b"}', "rows.jsonl:1"
    ),
    "no Parquet": Wrong(
        "sft", DATA, ("p.parquet",), None, {"prompt_data": "p.parquet"}, {"p.parquet": "PAR1"}
    ),
    "empty folder": Wrong(
        "reward", DATA, ("folder",), None, {"prompt_data": "folder"}, {"folder": None}
    ),
    "held out": Wrong(
        "sft", DATA, ("e.jsonl:1",), None, {"eval_data": "e.jsonl"}, {"e.jsonl": '{"a": 1}\n'}
    ),
    "held out of another kind": Wrong(
        "prefer",
        USAGE,
        ("prompt_data and eval_data",),
        None,
        {"eval_data": "e.jsonl"},
        {"e.jsonl": '{"prompt": "a", "completion": "b", "label": true}\n'},
    ),
    # Rows of sft, and so of distillation.
    "pictures": row(
        "sft",
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, CHAT[1]]},
        "a part of type 'image'",
    ),
    "no messages": row("sft", {"messages": []}, "'messages'"),
    "messages as text": row("sft", {"messages": "a"}, "'messages'"),
    "unknown speaker": row("sft", {"conversations": [{"from": "me", "value": "a"}]}, "message 1"),
    "tools no list": row("sft", {"messages": CHAT, "tools": '{"a": 1}'}, "'tools'"),
    "tools no JSON": row("sft", {"messages": CHAT, "tools": "{"}, "'tools'"),
    "number as text": row("sft", {"text": 5}, "'text'"),
    "NaN as text": row("sft", '{"text": NaN}', "rows.jsonl:1"),
    "id below": row("sft", IDS | {"token_ids": [5, -1]}, "'token_ids'", "-1"),
    "id beyond": row("sft", IDS | {"token_ids": [5, 10**30]}, "'token_ids'"),
    "id no number": row("sft", IDS | {"token_ids": [5, 1.5]}, "'token_ids'"),
    "id true": row("sft", IDS | {"token_ids": [5, True]}, "'token_ids'"),
    "flag 2": row("sft", IDS | {"is_trained": [0, 2]}, "'is_trained'"),
    "no flag": row("sft", IDS | {"is_trained": [1]}, "'is_trained'", "1 for 2"),
    "nothing trained": row(
        "distill", IDS | {"is_trained": [1, 0]}, "no token is trained", **FORWARD
    ),
    "no completion": row("distill", {"prompt": "a"}, "rows.jsonl:1", **FORWARD),
    # Pairs, rankings, labels, scores.
    "answer a number": row("prefer", PAIR | {"chosen": 4}, "rows.jsonl:1"),
    "answer a list": row("prefer", PAIR | {"chosen": ["b"]}, "rows.jsonl:1"),
    "no prompt": row("prefer", {"chosen": "b", "rejected": "c"}, "rows.jsonl:1", "prompt"),
    "label NaN": row(
        "prefer", '{"prompt": "a", "completion": "b", "label": NaN}', "rows.jsonl:1", "'label'"
    ),
    "margin a text": row("reward", PAIR | {"margin": "2"}, "'margin'"),
    "margin beyond": row(
        "reward",
        '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1e999}',
        "rows.jsonl:1",
    ),
    "scores swapped": row("reward", PAIR | {"score_chosen": 1, "score_rejected": 2}, "swap"),
    "ids and no prompt": row(
        "prefer", {"prompt_ids": [], "chosen_ids": [5], "rejected_ids": [6]}, "'prompt_ids'"
    ),
    "chats that part at the user": row(
        "prefer", {"chosen": CHAT, "rejected": [{"role": "user", "content": "c"}, CHAT[1]]}, "part"
    ),
    "one rank": row("reward", RANKED | {"ranks": [1]}, "2 answers and 1 ranks"),
    "rank true": row("reward", RANKED | {"ranks": [True, 2]}, "ranks must be"),
    "rank no number": row("reward", RANKED | {"ranks": [1, "2"]}, "ranks must be"),
    "equal answers": row("reward", RANKED | {"answers": ["b", "b"]}, "the same tokens"),
    "empty answer": row("reward", RANKED | {"answers": ["b", ""]}, "each of the answers"),
    "step label": row("reward", STEPS | {"labels": [1, 0]}, "labels must be true or false"),
    "empty step": row("reward", STEPS | {"completions": ["b", ""]}, "not empty"),
    "score of no label": row("reward", SCORED | {"score": 0.5}, "--reward_loss mse"),
    "score a text": row("reward", SCORED | {"score": "1"}, "'score'"),
    "score missing": row("reward", {"prompt_ids": [5], "response_ids": [6]}, "score is missing"),
    **SHARED,
    "no column of sft": row("sft", {"question": "a"}, "rows.jsonl:1: expected a column messages"),
    "no column of pairs": row(
        "prefer", {"prompt": "a"}, ":1: expected columns chosen and rejected"
    ),
    "texts as pairs": row("reward", {"text": "a"}, ":1: expected columns chosen and rejected"),
    "another kind": Wrong(
        "sft", DATA, ("rows.jsonl:2: expected prompt and completion",), (SFT, {"text": "a"})
    ),
    "no answer": row("sft", {"messages": CHAT[:1]}, "rows.jsonl:1: no message of role"),
    "empty completion": row("sft", SFT | {"completion": ""}, "column 'completion' must"),
    "long rows": row("sft", SFT, "all 1 rows exceed max_row_tokens = 2", max_row_tokens=2),
    "mask of chats": row("sft", SFT, "train_on assistant: rows with prompt", train_on="assistant"),
    "no match": row("sft", SFT, "train_on_regex 'x' matches no token", train_on_regex="x"),
    "no file": Wrong("sft", DATA, ("no.jsonl does not exist",), None, {"prompt_data": "no.jsonl"}),
    "no preference": row("prefer", PAIR | {"chosen": "c"}, "rows.jsonl:1: chosen and rejected"),
    "no preference to learn": row(
        "reward", PAIR | {"chosen": "c"}, "rows.jsonl:1: chosen and rejected are the same"
    ),
    "empty rejected": row("prefer", PAIR | {"rejected": ""}, "column 'rejected' must hold a te"),
    "negative margin": row("prefer", PAIR | {"margin": -2}, "the chosen answer is worse than"),
    "worse": row(
        *("reward", PAIR | {"margin": -1}),
        "rows.jsonl:1: the chosen answer is worse than the rejected one, by 1",
    ),
    "no label": row("reward", LABELLED | {"label": "yes"}, "column 'label' must be true or false"),
    "no ranks": row(
        *("reward", {"prompt": "a ", "answers": ["b", "c"]}),
        "rows.jsonl:1: column 'ranks' must hold a list",
    ),
    "no such mask": option("sft", "train_on: got 'all_of_it', expected", train_on="all_of_it"),
    "no such loss": option("sft", "sft_loss: got 'nll', expected one of ['token", sft_loss="nll"),
    "no pattern": option("sft", "train_on_regex: got '(', expected a regul", train_on_regex="("),
    "frozen and audited": option(
        "sft", "an audit follows all wei", audit_every=1, freeze_prefix="a"
    ),
    "misspelled": option("sft", "unknown option 'max_epoch'; did you mean", max_epoch=2),
    "misspelled loss": option("prefer", "(did you mean 'dpo'?)", preference_loss="dop"),
    "idle value": option(
        "prefer", "preference_args: gamma does nothing", preference_args="gamma=1"
    ),
    "idle weight": option("prefer", "got 2 for 1 losses", preference_weights="1 2"),
    "no value": option("prefer", "preference_loss dpo: beta: got 'x'", preference_args="beta=x"),
    "labels alone": Wrong(
        "prefer", USAGE, ("preference_loss dpo compares two answers to a prompt",), (LABELLED,)
    ),
    "regex of sft": option("prefer", "train_on_regex is an option of lightrft", train_on_regex="x"),
    "loss of sft": option("prefer", "sft_loss is an option of lightrft sft, not", sft_loss="dft"),
    "no loss of rewards": option(
        "reward", "reward_loss: got 'dpo', expected one of", reward_loss="dpo"
    ),
    "loss of labels": option("reward", "reward_loss mse is of labelled answers", reward_loss="mse"),
    "loss of pairs": Wrong(
        *("reward", USAGE, ("reward_loss hps is of pairs or rankings",), (LABELLED,)),
        {"reward_loss": "hps"},
    ),
    "no pairs": Wrong(
        "reward", USAGE, ("centering_coef is of pairs",), (LABELLED,), {"centering_coef": 0.1}
    ),
    "labels held out of pairs": option(
        *("reward", "must be of one kind: got labelled"),
        eval_data="e.jsonl",
        files={"e.jsonl": json.dumps(LABELLED)},
    ),
    # Options that no stage can carry out.
    "rows a step": option("sft", "train_batch_size", train_batch_size=0),
    "rows a pass": option("prefer", "micro_train_batch_size", micro_train_batch_size=3),
    "rate NaN": option("sft", "actor_learning_rate", actor_learning_rate="nan"),
    "rate below": option("reward", "actor_learning_rate", actor_learning_rate=-1),
    "rate a text": option("distill", "actor_learning_rate", actor_learning_rate="x", **FORWARD),
    "no pass": option("prefer", "max_epochs", max_epochs=0),
    "seed below": option("sft", "seed", seed=-1),
    "template missing": option("sft", "no.jinja", chat_template="no.jinja"),
    "template broken": option(
        "sft",
        "t.jinja",
        chat_template="t.jinja",
        apply_chat_template="",
        files={"t.jinja": "{% if %}"},
    ),
    "template no text": Wrong(
        "reward", USAGE, ("t.jinja",), None, {"chat_template": "t.jinja"}, {"t.jinja": b"\xff"}
    ),
    "template without turns": Wrong(
        "prefer", DATA, ("turns",), None, {"chat_template": "t.jinja"}, {"t.jinja": "a"}
    ),
    "best of nothing": option("sft", "best_metric", best_metric="eval/loss", strict=""),
    "steps of nothing": option("reward", "eval_steps", eval_steps=2, strict=""),
    "probabilities": option("sft", "prompt_data_probs", prompt_data_probs="0.5 0.5"),
    "no file of options": option("sft", "no.toml", config="no.toml"),
    "broken options": option("reward", "c.toml", config="c.toml", files={"c.toml": "a = "}),
    "unknown in a file": option(
        "prefer", "c.toml", "maximum", config="c.toml", files={"c.toml": "maximum = 1\n"}
    ),
    "text for a number": option(
        "sft", "max_epochs", config="c.toml", files={"c.toml": 'max_epochs = "x"\n'}
    ),
    "a file as output": Wrong(
        "sft", MACHINE, ("output_dir",), None, {"output_dir": "f"}, {"f": "a"}
    ),
    "below a file": Wrong(
        "prefer", MACHINE, ("output_dir",), None, {"output_dir": "f/run"}, {"f": "a"}
    ),
    "no layers": option("sft", "target_modules", lora_rank=2, target_modules="nothing"),
    "rank below": option("reward", "lora_rank", lora_rank=-1),
    "no such strategy": option("sft", "zero_stage", fsdp=None, zero_stage=7),
    "frozen nothing": option("prefer", "freeze_prefix", freeze_prefix="nothing"),
    "model a file": option("reward", "--pretrain", pretrain="f", files={"f": "a"}),
    "model broken": option(
        "sft",
        "config.json",
        pretrain="m",
        files={
            "m": None,
            "m/config.json": "{",
            "m/tokenizer.json": "{}",
            "m/model.safetensors": "",
        },
    ),
    "model of scores": option("sft", "reward model", pretrain="scorer"),
    "model of pooled scores": option("sft", "reward model", pretrain="pooler"),
    "model of pooled scores, as reference": option("prefer", "reward model", pretrain="pooler"),
    "heads over other heads": option(
        "reward", "reward_heads", pretrain="pooler", reward_heads="a b"
    ),
    "heads without rankings": option("reward", "rankings", reward_heads="a b"),
    "teacher a file": option(
        "distill", "--teacher", **FORWARD | {"teacher": "f"}, files={"f": "a"}
    ),
    "teacher of scores": option("distill", "teacher", **FORWARD | {"teacher": "scorer"}),
    "mixture of another form": option(
        "distill", "teacher_beta", teacher_beta=0.3, strict="", **FORWARD
    ),
    "mixture beyond": option(
        "distill", "teacher_beta", **FORWARD | {"teacher_form": "jsd", "teacher_beta": 1.5}
    ),
    "no such form": option("distill", "teacher_form", **FORWARD | {"teacher_form": "backward"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A language model, and reward models made of it: transformers', and one of ours."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("stages")
    write_tiny_model(folder / "model", "tiny-qwen3")
    scorer = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    scorer.save_pretrained(folder / "scorer")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "scorer")
    (folder / "rows.jsonl").write_text(json.dumps(PAIR) + "\n")
    argv = ["reward", "--pretrain", "model", "--prompt_data", "rows.jsonl", "--output_dir", "run"]
    argv += ["--train_batch_size", "1", "--micro_train_batch_size", "1", "--fsdp"]
    with contextlib.chdir(folder):
        assert main([*argv, "--reward_pooling", "attention"]) == 0
        (folder / "run" / "model").rename("pooler")
    return folder


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_is_one_line_and_nothing_is_written(
    tmp_path, models, capsys, monkeypatch, name
):
    wrong = WRONG[name]
    monkeypatch.chdir(tmp_path)
    for link in ("model", "scorer", "pooler"):
        (tmp_path / link).symlink_to(models / link)
    write_rows(tmp_path / "rows.jsonl", wrong)
    for file, content in wrong.files.items():
        if content is None:
            (tmp_path / file).mkdir()
        else:
            bytes_of = content if isinstance(content, bytes) else content.encode()
            (tmp_path / file).write_bytes(bytes_of)
    before = snapshot(tmp_path)
    options = {
        "pretrain": "model",
        "prompt_data": "rows.jsonl",
        "train_batch_size": 1,
        "micro_train_batch_size": 1,
        "fsdp": "",
        "output_dir": "run",
        **wrong.options,
    }
    argv = [
        part
        for key, value in options.items()
        if value is not None
        for part in (f"--{key}", *str(value).split())
    ]
    capsys.readouterr()
    code = main([wrong.stage, *argv])
    err = capsys.readouterr().err
    assert code == wrong.code, err
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("lightrft: ")
    for part in wrong.expected:
        assert part in lines[0], err
    assert snapshot(tmp_path) == before


def write_rows(path, wrong):
    if isinstance(wrong.rows, bytes):
        path.write_bytes(wrong.rows)
        return
    rows = (GOOD[wrong.stage],) * 2 if wrong.rows is None else wrong.rows
    texts = (each if isinstance(each, str) else json.dumps(each) for each in rows)
    path.write_text("".join(f"{text}\n" for text in texts))


def snapshot(folder):
    """Paths below a folder, with what stands in the files."""
    return {
        str(path): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
        if not path.is_symlink()
    }


def test_there_are_forty_and_more_over_all_stages():
    by_stage = Counter(wrong.stage for wrong in WRONG.values())
    assert sum(by_stage.values()) >= 40
    assert by_stage.keys() == {"sft", "prefer", "reward", "distill"}
    assert min(by_stage.values()) >= 5
