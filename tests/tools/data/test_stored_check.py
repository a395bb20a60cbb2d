"""`lightrft data check` on rows of the stages: what it says is what the stages do."""

import json
import shutil

import numpy as np
import pytest
from tests.runs import write

from lightrft.config import TrainConfig
from lightrft.datasets.files import scan_rows
from lightrft.datasets.preference_rows import PreferenceReader, load_preferences
from lightrft.datasets.supervised_rows import RowEncoder, load_supervised
from lightrft.models.loading import load_tokenizer
from lightrft.stages.reward.reward_inputs import judgement_reader, load_rows
from lightrft.tools.data.stored_check import check_rows
from lightrft.tools.model_presets import write_tiny_model

VOCABULARY = 320
GOOD = [{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(6)]


def pair(prompt, chosen, rejected, **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    for seed in (0, 1):
        write_tiny_model(folder / str(seed), "tiny-qwen3", seed=seed)
    return folder


@pytest.fixture
def check(checked, models):
    """Check rows of a stage."""

    def of_stage(stage, rows, *flags):
        return checked(rows, "--stage", stage, "--pretrain", str(models / "0"), *flags)

    return of_stage


@pytest.mark.parametrize("stage", ["prefer", "reward"])
def test_pairs_are_shown_with_their_marks_and_counted(check, stage):
    rows = [
        pair("1+1=", "2", "3"),
        pair("1+2=", "3", "30"),
        pair("1+1=", "2", "3"),  # a duplicate
        pair("1+1=", "3", "2", margin=0.5),  # against the first
        pair("x" * 30, "1", "2"),
    ]
    code, out, err = check(stage, rows, "--max_row_tokens", "20")
    assert (code, err) == (0, "")
    for line in (
        "p.jsonl: 5 rows, 5 of them readable",
        "p.jsonl:1, chosen: 6 tokens, 2 trained (>>...<<)",
        "    1+1=>>2<|end|><<",
        "p.jsonl:1, rejected: 6 tokens, 2 trained (>>...<<)",
        "tokens of a row: shortest 6, median 6, 90 % 6.3, 99 % 6.93, longest 7",
        "over 20 tokens (a run leaves them out; --max_row_tokens): 1, first: p.jsonl:5",
        "duplicate rows (a run uses them all): 1, first: p.jsonl:3 = p.jsonl:1",
        "pairs whose rejected answer is chosen elsewhere: 3, first: p.jsonl:1 against p.jsonl:4, "
        "p.jsonl:3 against p.jsonl:4, p.jsonl:4 against p.jsonl:3",
        "the chosen answer is the longer one in 37.5% of the pairs, equal ones half",
        "rows that cannot be used: 0",
        "4 rows can be trained on",
    ):
        assert f"{line}\n" in out, out
    assert "warning" not in out


@pytest.mark.parametrize("stage", ["prefer", "reward"])
def test_every_bad_pair_has_its_line(check, stage):
    rows = [
        pair("1+1=", "2", "3"),
        pair("1+1=", "2", "2"),
        pair("1+1=", "", "2"),
        pair("1+1=", "2", "3", score_chosen=1, score_rejected=2),
        {"prompt": "1", "completion": "2", "label": True},
        "{",
    ]
    code, out, _ = check(stage, rows)
    assert code == 4
    assert "rows whose answers are the same: 1\n" in out
    assert "rows that cannot be used: 5\n" in out
    for place in range(2, 7):
        assert f"\n  p.jsonl:{place}" in out, out
    assert "swap the answers" in out
    assert out.endswith("\n5 bad rows\n")


@pytest.mark.full
def test_lengths_that_decide_the_pairs_are_a_warning(check):
    rows = [pair(f"{n}=", "long" * (n % 3 + 1), "no") for n in range(6)]
    assert "warning: 'longer wins' is right in 100.0% of the pairs" in check("prefer", rows)[1]
    rows = [pair(f"{n}=", "no", "long" * (n % 3 + 1)) for n in range(6)]
    assert "warning: 'shorter wins' is right in 100.0% of the pairs" in check("reward", rows)[1]


@pytest.mark.full
def test_ranks_labels_and_scores_are_shown(check):
    ranked = [{"prompt": "a", "answers": ["1", "22", "333"], "ranks": [1, 2, 2]}]
    assert "p.jsonl:1, rank 1: 3 tokens, 2 trained" in check("reward", ranked)[1]
    labelled = [{"prompt": "a", "completion": "b" * (n + 1), "label": n > 2} for n in range(4)]
    out = check("reward", labelled)[1]
    assert "labels: 4, from 0 to 1, mean 0.25\n" in out
    steps = [{"prompt": "a", "completions": ["b", "c"], "labels": [True, True]}]
    assert "warning: all labels are equal" in check("reward", steps)[1]
    scored = [{"prompt_ids": [5], "response_ids": [6, 7], "score": n / 2} for n in range(3)]
    out = check("reward", scored, "--reward_loss", "mse")[1]
    assert "labels: 3, from 0 to 1, mean 0.5\n" in out


def test_rankings_of_several_scores_are_shown_by_name(check):
    first, second = {"good": [1, 2], "short": [2, 1]}, {"good": [1, 1]}
    rows = [{"prompt": "a", "answers": ["22", "1"], "ranks": ranks} for ranks in (first, second)]
    out = check("reward", rows, "--reward_heads", "good", "short")[1]
    assert "p.jsonl:1, good rank 1, short rank 2: 4 tokens, 3 trained" in out
    assert "p.jsonl:2, good rank 1: 4 tokens" in out


def test_good_rows_are_shown_with_their_mask_and_counted(check):
    rows = [*GOOD, GOOD[1], {"prompt": "say a line\n" * 9, "completion": "a"}]
    code, out, err = check("sft", rows, "--max_row_tokens", "20")
    assert (code, err) == (0, "")
    for line in (
        "p.jsonl: 8 rows, 8 of them readable",
        "rows with prompt and completion, trained: completion",
        "p.jsonl:1: 6 tokens, 2 trained (>>...<<)",
        "    0+1=>>1<|end|><<",
        "tokens of a row: shortest 6, median 6, 90 % 6, 99 % 6, longest 6",
        "over 20 tokens (a run leaves them out; --max_row_tokens): 1, first: p.jsonl:8",
        "duplicate rows (a run uses them all): 1, first: p.jsonl:7 = p.jsonl:2",
        "rows that cannot be used: 0",
        "7 rows can be trained on",
    ):
        assert f"{line}\n" in out, out


def test_every_bad_row_has_its_line(check):
    empty = {"token_ids": [1, 2], "is_trained": [1, 0]}
    rows = [{"token_ids": [1, 2], "is_trained": [0, 1]}, empty, "{", *[{"text": "a"}] * 30]
    code, out, _ = check("sft", rows)
    assert code == 4
    assert "rows without a trained token: 1\n" in out
    assert "rows that cannot be used: 32\n" in out
    for place in range(2, 34):
        assert f"\n  p.jsonl:{place}: " in out
    assert out.endswith("\n32 bad rows\n")


def test_a_damaged_generation_config_is_refused_as_by_a_run(check, models, tmp_path):
    damaged = shutil.copytree(models / "0", tmp_path / "damaged")
    (damaged / "generation_config.json").write_text("{")
    assert check("sft", GOOD, "--pretrain", str(damaged))[0] == 2


READERS = {
    "sft": (load_supervised, lambda *given: RowEncoder(*given[:2], "text").rows),
    "prefer": (load_preferences, lambda *given: PreferenceReader(*given)),
    "reward": (load_rows, lambda *given: judgement_reader(*given)),
}


@pytest.mark.parametrize("stage", READERS)
def test_rows_and_counts_are_those_of_the_stage(tmp_path, models, stage):
    lengths = np.random.default_rng(7).integers(1, 30, (30, 2)).tolist()
    rows = [pair("a", "b" * n, "c" * m) for n, m in lengths]
    if stage == "sft":
        rows = [{"text": "a" * n} for n, _ in lengths]
    path = write(tmp_path / "p.jsonl", rows)
    model = str(models / "0")
    tokenizer, config = load_tokenizer(model), TrainConfig(pretrain=model, max_row_tokens=25)
    load, reader_of = READERS[stage]
    vocabulary = {} if stage == "sft" else {"vocab_size": VOCABULARY}
    data = load(path, tokenizer, config, max_samples=99, split="train", **vocabulary)
    items = list(scan_rows(path))
    read = reader_of(tokenizer, config, items[0], None)
    found = check_rows(items, read if stage == "sft" else lambda row: [read(row)], 25)
    assert 0 < len(found.too_long) == len(rows) - len(data)
    for made, row in zip(found.made, data.rows, strict=True):
        for answer, other in zip(made.rows, row.rows, strict=True):
            assert answer.token_ids.tobytes() == other.token_ids.tobytes()
            assert answer.is_trained.tobytes() == other.is_trained.tobytes()


def test_rows_of_distillation_and_the_tokens_of_the_teacher(check, models, capsys):
    rows = [{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(4)]
    code, out, err = check("distill", rows, "--teacher", str(models / "1"))
    assert (code, err) == (0, "")
    assert "    0+1=>>1<|end|><<\n" in out
    other = models / "other"
    if not other.exists():
        write_tiny_model(other, "tiny-qwen3", seed=0)
        text = (other / "tokenizer.json").read_text()
        vocabulary = json.loads(text)
        names = vocabulary["model"]["vocab"]
        names["a"], names["b"] = names["b"], names["a"]
        (other / "tokenizer.json").write_text(json.dumps(vocabulary))
        capsys.readouterr()
    code, _, err = check("distill", rows, "--teacher", str(other))
    assert code == 2
    assert "teacher: token" in err
    assert len(err.strip().splitlines()) == 1


def test_a_chat_template_without_end_is_one_line(check, tmp_path):
    (tmp_path / "loop.jinja").write_text("{{ 'x' * 10**10 }}")
    talk = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    code, _, err = check("sft", [{"messages": talk}], "--chat_template", "loop.jinja")
    assert code == 4
    (line,) = err.strip().splitlines()
    assert "p.jsonl:1: the chat template takes more than 20 seconds or 1024 MiB for one row" in line
