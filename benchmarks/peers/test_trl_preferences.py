"""TRL's trainers of preferences have the same tokens, losses and gradients, where they are right.

Runs with the group `peers` (`.ci/slow peers`). What differs is in the tests whose names begin with
`test_trl_`: each reproduces TRL's number with ours, carried out as TRL does it. Not compared is
what only TRL has: divergences of f-DPO, LD-DPO, WPO, moving references, AlphaPO, and hinge, ipo and
smoothed labels without a reference.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from benchmarks.peers.trl_peer import (
    TWO_BATCHES,
    causal,
    read,
    require_equal,
    require_other,
    step_of,
    tiny_checkpoint,
)
from tests.stages.preference.preference_world import build_stage, noisy_model
from tests.stages.stage_world import STILL, distance, train_step
from tests.stages.supervised.supervised_world import build_stage as build_supervised
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lightrft.datasets.preference_rows import PreferencePair, load_preferences
from lightrft.datasets.row_data import SupervisedRow
from lightrft.strategy import get_fake_strategy
from lightrft.tools.model_presets import ASSISTANT, SPECIAL_TOKENS, SYSTEM, USER, chat_tokenizer

trl = pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.shard("peers")]

# Answers of uneven lengths; of each prompt both begin with the same letters.
PAIRS = [
    {"prompt": f"name {n}: ", "chosen": "ab " * (1 + n * n), "rejected": "abc " * (7 - 2 * n)}
    for n in range(4)
]
# Both answers are of one length, so that models decide which pair differs most.
EVEN = [
    {"prompt": f"name {n}: ", "chosen": "abcd"[n] * (n + 1), "rejected": "wxyz"[n] * (n + 1)}
    for n in range(4)
]
SHORT_PROMPTS = [{**each, "prompt": "wxyz"[n]} for n, each in enumerate(PAIRS)]
CHATS = [
    {
        "prompt": [{"role": "user", "content": each["prompt"]}],
        "chosen": [{"role": "assistant", "content": each["chosen"]}],
        "rejected": [{"role": "assistant", "content": each["rejected"]}],
    }
    for each in PAIRS
]
ANSWERS = [
    {"prompt": each["prompt"], "completion": each[name], "label": name == "chosen"}
    for each, name in zip(PAIRS, ("chosen", "rejected", "rejected", "chosen"), strict=True)
]
SMOOTH = {"label_smoothing": 0.1}
# TRL's options of a trainer, and the values of our loss.
LOSSES = {
    **{
        name: ({}, None)
        for name in (
            *("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot"),
            *("aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
        )
    },
    "robust": (SMOOTH, SMOOTH),
    "exo_pair": (SMOOTH, SMOOTH),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("trl"))


@pytest.fixture(scope="module")
def base(path):
    """The reference."""
    return causal(path)


@pytest.fixture
def of_trl(path, base, tmp_path):
    """A function of the trainer's name, rows and options; see `step_of`."""

    def run(name, rows, *, tokenizer=None, model=None, **options):
        import trl.experimental.cpo
        import trl.experimental.orpo

        home = {"CPO": trl.experimental.cpo, "ORPO": trl.experimental.orpo}.get(name, trl)
        if name in ("CPO", "ORPO"):
            options = {"max_length": 512, **options}
        elif "peft_config" not in options:
            options["ref_model"] = causal(path)
        return step_of(
            getattr(home, f"{name}Trainer"),
            getattr(home, f"{name}Config"),
            model or noisy_model(base),
            tmp_path,
            rows,
            tokenizer=tokenizer or AutoTokenizer.from_pretrained(path),
            **options,
        )

    return run


@pytest.fixture
def ours(base):
    """A function of items, the names of losses and options; see `train_step`."""

    def run(items, *losses, **options):
        options = {"model": noisy_model(base), "reference": base, **options}
        stage = build_stage(get_fake_strategy(STILL), items, preference_loss=losses, **options)
        return train_step(stage, items)

    return run


@pytest.fixture
def rows_of(path, tmp_path):
    """A function of rows: our items."""
    return partial(read, load_preferences, path, tmp_path)


def mean_of(*steps):
    """The mean of several steps."""
    gradients, metrics = zip(*steps, strict=True)
    mean = {name: sum(g[name] for g in gradients) / len(steps) for name in gradients[0]}
    return mean, {"loss": sum(each["loss"] for each in metrics) / len(steps)}


def cut(item, most):
    """A pair as far as its first tokens."""

    def start(row):
        return SupervisedRow(row.token_ids[:most], row.is_trained[:most])

    return PreferencePair(start(item.chosen), start(item.rejected))


def require_same_tokens(items, data):
    """The rows of TRL's data set are those of our items."""
    for item, theirs in zip(items, data, strict=True):
        for row, name in zip(item.rows, ("chosen", "rejected"), strict=True):
            assert row.token_ids.tolist() == theirs["prompt_ids"] + theirs[f"{name}_ids"]
            assert row.num_trained == len(theirs[f"{name}_ids"])


def test_every_loss_of_their_dpo_is_compared():
    said = trl.DPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
    assert set(re.findall(r"`'(\w+)'`", said)) == LOSSES.keys()


@pytest.mark.parametrize("name", LOSSES)
def test_dpo(of_trl, ours, rows_of, name):
    options, values = LOSSES[name]
    items = rows_of(PAIRS)
    theirs = of_trl("DPO", PAIRS, loss_type=[name], **options)
    require_same_tokens(items, theirs[0].train_dataset)
    require_equal(ours(items, name, preference_args=values), theirs)


@pytest.mark.parametrize(
    "options, losses, changes",
    [
        (
            {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
            ("sigmoid", "bco_pair", "sft"),
            {"preference_weights": (0.8, 0.2, 1.0)},
        ),
        (
            {"loss_type": ["ipo", "aot"], "beta": 0.5, **SMOOTH},
            ("ipo", "aot"),
            {"preference_args": {"beta": 0.5, **SMOOTH}},
        ),
        ({"precompute_ref_log_probs": True}, ("dpo",), {"packing_samples": True}),
        (TWO_BATCHES, ("dpo",), {}),
    ],
    ids=["three losses", "two losses", "reference before the run", "two batches"],
)
def test_dpo_in_other_ways(of_trl, ours, rows_of, options, losses, changes):
    require_equal(ours(rows_of(PAIRS), *losses, **changes), of_trl("DPO", PAIRS, **options))


def test_dpo_of_conversations(of_trl, ours, rows_of):
    items, theirs = rows_of(CHATS), of_trl("DPO", CHATS)
    require_same_tokens(items, theirs[0].train_dataset)
    require_equal(ours(items, "dpo"), theirs)


def test_dpo_of_adapters_whose_reference_is_the_model_without_them(of_trl, base, rows_of):
    from peft import LoraConfig

    items, targets = rows_of(PAIRS), ["q_proj", "down_proj"]
    how = {"lora_rank": 2, "lora_alpha": 4, "target_modules": tuple(targets)}
    stage = build_stage(get_fake_strategy(STILL), items, reference=base, **how)
    weights = stage.models.main.model.state_dict()

    def as_ours(model):
        for name, value in model.named_parameters():
            if value.requires_grad:
                value.data.copy_(weights[name.replace("base_model.model.", "model.")])

    theirs = of_trl(
        "DPO",
        PAIRS,
        model=causal_copy(base),
        peft_config=LoraConfig(r=2, lora_alpha=4, target_modules=targets, lora_dropout=0.0),
        start=as_ours,
    )
    gradient = {n.replace("base_model.model.", ""): value for n, value in theirs[2].items()}
    require_equal(train_step(stage, items), (*theirs[:2], gradient))


def causal_copy(model):
    """The same model, with the same weights."""
    return noisy_model(model, size=0.0)


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("rows", [ANSWERS, PAIRS], ids=["answers", "pairs"])
def test_kto(of_trl, ours, rows_of, name, rows):
    """Theirs puts an answer behind the next prompt, ours behind the one before."""
    values = {"beta": 0.2, "desirable_weight": 1.5}
    size = {"per_device_train_batch_size": 8 if rows is PAIRS else 4}
    theirs = of_trl("KTO", rows, loss_type=name, **values, **size)
    found = ours(rows_of(rows)[::-1], name, preference_args=values)
    require_equal(found, theirs)
    if name == "kto":
        kl = theirs[0].state.log_history[0]["kl"]
        assert found[1]["answer_kl"] == pytest.approx(kl, rel=1e-3)
        assert found[1]["answer_kl"] > 0.1


@pytest.mark.parametrize(
    "options, losses, values",
    [
        ({}, ("cpo",), None),
        ({"cpo_alpha": 0.3, "beta": 0.2}, ("cpo",), {"alpha": 0.3, "beta": 0.2}),
        (
            {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.7},
            ("simpo",),
            {"beta": 2.0, "gamma": 0.7},
        ),
    ],
)
def test_cpo(of_trl, ours, rows_of, options, losses, values):
    theirs = of_trl("CPO", PAIRS, **options)
    require_equal(ours(rows_of(PAIRS), *losses, preference_args=values), theirs)


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_orpo_of_prompts_of_one_token(of_trl, ours, rows_of, beta):
    theirs = of_trl("ORPO", SHORT_PROMPTS, beta=beta)
    require_equal(ours(rows_of(SHORT_PROMPTS), "orpo", preference_args={"beta": beta}), theirs)


def test_trl_ignores_label_smoothing_in_the_loss_named_sigmoid(of_trl, ours, rows_of):
    """Ours is cdpo; that value of another loss than those that have it is refused."""
    items, theirs = rows_of(PAIRS), of_trl("DPO", PAIRS, **SMOOTH)
    require_equal(ours(items, "dpo"), theirs)
    smoothed = ours(items, "cdpo", preference_args=SMOOTH)
    assert smoothed[1]["loss"] != pytest.approx(theirs[1], rel=1e-3)


@pytest.mark.parametrize(
    "name, values", [("aot", {"beta": 0.3}), ("aot_unpaired", {"beta": 0.3}), ("sft", {})]
)
def test_trl_takes_losses_that_know_the_whole_step_batch_by_batch(
    of_trl, ours, rows_of, base, name, values
):
    """Ours sorts over the whole step, and divides by its tokens."""
    model = noisy_model(base, size=0.1)
    items, ours = rows_of(EVEN), partial(ours, preference_args=values, model=model)
    model = noisy_model(base, size=0.1)
    theirs = of_trl("DPO", EVEN, loss_type=[name], model=model, **values, **TWO_BATCHES)
    require_equal(mean_of(ours(items[:2], name), ours(items[2:], name)), theirs)
    require_other(ours(items, name), theirs)


def test_trl_divides_the_likelihood_of_cpo_batch_by_batch(of_trl, ours, rows_of):
    """Ours divides by the tokens of the whole step."""
    items = rows_of(PAIRS)
    theirs = of_trl("CPO", PAIRS, **TWO_BATCHES)
    require_equal(mean_of(ours(items[:2], "cpo"), ours(items[2:], "cpo")), theirs)
    require_other(ours(items, "cpo"), theirs)


def test_trl_overflows_in_discopop(of_trl, ours, rows_of):
    """Theirs multiplies exp(-x) by a sigmoid that is 0; ours is one exponential."""
    items, values = rows_of(PAIRS), {"beta": 100.0}
    _, loss, gradient = of_trl("DPO", PAIRS, loss_type=["discopop"], **values)
    assert not math.isfinite(loss) or any(not g.isfinite().all() for g in gradient.values())
    found, metrics = ours(items, "discopop", preference_args=values)
    assert math.isfinite(metrics["loss"])
    assert all(value.isfinite().all() for value in found.values())


def test_trl_cuts_answers_that_are_too_long(of_trl, ours, rows_of):
    """Cut answers have no end of turn; ours leaves such pairs out and counts them."""
    theirs = of_trl("DPO", PAIRS, max_length=24)
    require_equal(ours([cut(item, 24) for item in rows_of(PAIRS)], "dpo"), theirs)
    assert len(rows_of(PAIRS, max_row_tokens=24)) == 1


def merging_tokenizer():
    """One token per byte, but for "xa", which is one."""
    vocabulary = {symbol: value for value, symbol in bytes_to_unicode().items()}
    unused = next(symbol for symbol, value in vocabulary.items() if value == 255)
    vocabulary["xa"] = vocabulary.pop(unused)
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[("x", "a")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL_TOKENS))
    return chat_tokenizer(core, [USER, ASSISTANT, SYSTEM])


def test_trl_trains_the_end_of_a_prompt_that_the_other_answer_merges_with(of_trl, ours, rows_of):
    """Theirs counts both answers from where either parts from the prompt; ours each from itself."""
    rows = [{**each, "prompt": "by x", "rejected": f"b{each['rejected']}"} for each in PAIRS]
    tokenizer = merging_tokenizer()
    items = rows_of(rows, tokenizer=tokenizer)
    theirs = of_trl("DPO", rows, tokenizer=tokenizer)
    assert all(item.chosen.token_ids[3] == 255 for item in items)
    assert [item.rejected.is_trained[:5].tolist() for item in items] == [[0, 0, 0, 0, 1]] * 4
    moved = []
    for item in items:
        is_trained = item.rejected.is_trained.copy()
        is_trained[3] = True
        moved.append(replace(item, rejected=replace(item.rejected, is_trained=is_trained)))
    require_equal(ours(moved, "dpo"), theirs)
    require_other(ours(items, "dpo"), theirs)


def test_trl_takes_the_kl_of_kto_batch_by_batch(of_trl, ours, rows_of):
    """Ours is that of the whole step."""
    items = rows_of(ANSWERS)
    theirs = of_trl("KTO", ANSWERS, **TWO_BATCHES)
    halves = (items[:2], items[2:])
    require_equal(mean_of(*(ours(half[::-1], "kto") for half in halves)), theirs)
    whole, metrics = ours(items[::-1], "kto")
    assert distance(whole, theirs[2]) > 1e-3
    assert metrics["loss"] != pytest.approx(theirs[1], rel=1e-3)


def test_trl_takes_answers_to_the_same_prompt_for_those_to_another(of_trl, ours, rows_of):
    """Its KL is then the mean log-ratio of the very answers; ours knows no other prompt: 0."""
    rows = [{**each, "prompt": "name: "} for each in ANSWERS]
    items, (trainer, *_) = rows_of(rows), of_trl("KTO", rows)
    _, metrics = ours(items, "kto", preference_args={"beta": 1.0})
    mean = (metrics["chosen_reward"] + metrics["rejected_reward"]) / 2
    assert trainer.state.log_history[0]["kl"] == pytest.approx(mean, rel=1e-4)
    assert mean > 0.1
    assert metrics["answer_kl"] == 0


def test_trl_puts_the_only_answer_of_a_last_batch_behind_its_own_prompt(of_trl):
    """Ours takes every batch of a step together, and refuses steps of one row."""
    trainer, *_ = of_trl("KTO", ANSWERS[:3], per_device_train_batch_size=2)
    last = trainer.train_dataset[2]
    assert last["KL_completion_ids"] == last["completion_ids"]


def test_trl_never_shuffles_the_rows_of_kto(of_trl):
    """Its pairs of prompts and other answers are made once; ours are made in each step."""
    with pytest.raises(ValueError, match="requires `train_sampling_strategy='sequential'`"):
        of_trl("KTO", ANSWERS, train_sampling_strategy="random")


def test_trl_adds_the_likelihood_of_cpo_to_simpo(of_trl, ours, rows_of):
    """Unless cpo_alpha is 0; ours is the paper's, and says so where both are wanted."""
    theirs = of_trl("CPO", PAIRS, loss_type="simpo", beta=2.0, simpo_gamma=1.0)
    items = rows_of(PAIRS)
    require_equal(ours(items, "simpo", "sft"), theirs)
    require_other(ours(items, "simpo"), theirs)


def test_trl_counts_tokens_of_prompts_in_the_likelihood_of_orpo(of_trl, ours, rows_of, base):
    """Ours counts those of answers, as the sft term of all other losses does."""
    items, theirs = rows_of(PAIRS), of_trl("ORPO", PAIRS)
    whole = [
        replace(item.chosen, is_trained=np.arange(len(item.chosen.token_ids)) > 0) for item in items
    ]
    stage = build_supervised(get_fake_strategy(STILL), whole, model=noisy_model(base))
    likelihood, metrics = train_step(stage, whole)
    orpo, sft = ours(items, "orpo"), ours(items, "sft")
    both = {name: orpo[0][name] - sft[0][name] + likelihood[name] for name in likelihood}
    loss = orpo[1]["loss"] - sft[1]["loss"] + metrics["loss"]
    require_equal((both, {"loss": loss}), theirs)
    require_other(orpo, theirs)


@pytest.mark.parametrize("name", ["CPO", "ORPO"])
def test_trl_begins_rows_of_cpo_and_orpo_with_a_token_that_its_tokenizer_never_writes(
    of_trl, ours, rows_of, path, name
):
    """A beginning of sequence that the tokenizer only knows; ours has what the tokenizer writes."""
    tokenizer = AutoTokenizer.from_pretrained(path, bos_token=SYSTEM)
    theirs = of_trl(name, PAIRS, tokenizer=tokenizer)
    items = rows_of(PAIRS, tokenizer=tokenizer)
    begin = tokenizer.bos_token_id
    for item, each in zip(items, theirs[0].train_dataset, strict=True):
        assert each["chosen_input_ids"] == [begin, *item.chosen.token_ids.tolist()]
        assert item.chosen.token_ids[0] != begin
