"""`lightrft config translate`: a script of TRL becomes a run that trains."""

import pytest

from lightrft.cli.main import main
from lightrft.config import TrainConfig
from lightrft.tools.model_presets import write_tiny_model
from lightrft.tools.translate.options import translate
from lightrft.tools.translate.script import Script, read_script

SCRIPT = """\
import re
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

WANTED = "a"

def count(completions, **kwargs):
    return [float(len(re.findall(WANTED, each))) for each in completions]

rows = make_rows()
rows = load_dataset("json", data_files="rows.jsonl", split="train")
args = GRPOConfig(
    output_dir="out", per_device_train_batch_size=4, num_generations=4, beta=0.04, max_steps=2,
    gradient_accumulation_steps=2, max_completion_length=6, learning_rate=1e-3, logging_steps=5,
    bf16=False, report_to="none", model_init_kwargs={"a": 1},
)
trainer = GRPOTrainer(model="tiny", reward_funcs=count, args=args, train_dataset=rows)
trainer.train()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo.py").write_text(SCRIPT)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "say {c}"}}\n' for c in "abc"))
    return tmp_path


@pytest.mark.full
def test_a_script_of_twenty_lines_trains(folder, capsys):
    assert main(["config", "translate", "grpo.py", "run"]) == 0
    out = capsys.readouterr().out
    assert "wrote rewards.py, run.toml to run" in out
    assert "next: lightrft train --config run/run.toml" in out
    assert "model_init_kwargs = {'a': 1}: a model is what its folder says" in out
    assert "report_to" not in out
    config = TrainConfig.load(folder / "run/run.toml")
    expected = {
        "pretrain": "tiny",
        "output_dir": "out",
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 4,
        "train_batch_size": 8,
        "micro_train_batch_size": 4,
        "actor_learning_rate": 1e-3,
        "init_kl_coef": 0.04,
        "use_kl_loss": True,
        "kl_estimator": "k3",
        "loss_agg_mode": "token-mean",
        "advantage_estimator": "group_norm",
        "adam_betas": (0.9, 0.999),
        "lr_scheduler": "linear",
        "num_episodes": 2,
        "max_steps": 2,
        "generate_max_len": 6,
        "logging_steps": 5,
        "bf16": False,
        "reward_fn": ("run/rewards.py:count",),
        "input_key": "prompt",
        "apply_chat_template": False,
    }
    assert {name: config.__dict__[name] for name in expected} == expected
    assert "GRPOTrainer" not in (folder / "run/rewards.py").read_text()
    write_tiny_model(folder / "tiny", "tiny-qwen3")
    assert main(["train", "--config", "run/run.toml", "--fsdp"]) == 0
    assert (folder / "out/summary.json").exists()


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({"loss_type": "grpo"}, {"loss_agg_mode": "seq-mean-token-mean"}),
        ({"loss_type": "dr_grpo"}, {"loss_agg_mode": "seq-mean-token-sum-norm"}),
        ({"loss_type": "cispo"}, {"policy_loss": "cispo"}),
        ({"scale_rewards": False}, {"advantage_estimator": "dr_grpo"}),
        ({"scale_rewards": "batch"}, {"advantage_estimator": "group_mean_batch_std"}),
        ({"importance_sampling_level": "sequence"}, {"policy_loss": "gspo"}),
        ({"lr_scheduler_type": "cosine"}, {"min_lr_ratio": 0.0}),
        ({"use_vllm": True}, {"engine_type": "vllm"}),
        ({"use_vllm": None}, {}),
        ({"epsilon": 0.1, "epsilon_high": 0.3}, {"eps_clip": 0.1, "eps_clip_high": 0.3}),
        ({"steps_per_generation": 4}, {"rollout_batch_size": 4, "train_batch_size": 8}),
        ({"max_steps": 8, "num_train_epochs": 1}, {"max_steps": 8, "num_episodes": 8}),
        (
            {"max_steps": 8, "steps_per_generation": 4, "save_steps": 6},
            {"max_steps": 2, "save_steps": 2},
        ),
        (
            {"max_steps": 8, "num_iterations": 2},
            {"max_steps": 4, "max_epochs": 2},
        ),
        ({"max_steps": -1}, {"num_episodes": 3}),
        ({"optim": "adamw_8bit"}, {"adam_8bit": True, "fsdp": True}),
        ({"optim": "adamw_torch_fused"}, {}),
        ({"generation_batch_size": 64}, {"rollout_batch_size": 8, "train_batch_size": 8}),
    ],
)
def test_names_and_values_are_those_of_the_same_run(arguments, expected):
    found = translate(arguments)
    assert {name: found.options[name] for name in expected} == expected
    assert found.notes == []
    assert TrainConfig(**found.options)


@pytest.mark.parametrize(
    "call, expected",
    [
        ('load_dataset("json", data_files="a.jsonl", split="train")', "a.jsonl"),
        (
            'load_dataset("json", data_files=["a.jsonl", "b.jsonl"], split="train")',
            "a.jsonl,b.jsonl",
        ),
        ('load_dataset("openai/gsm8k", "main", split="train")', "openai/gsm8k:main"),
        ('load_dataset("json", data_files="a.jsonl", split="train[:9]")', None),
        ('load_dataset("json", data_files={"train": "a.jsonl"})', None),
        ('load_dataset("json", data_files={"train": "a.jsonl"}, split="train[:9]")', None),
        ('load_dataset("json", data_files={"test": "a.jsonl"}, split="test")', "a.jsonl"),
        ('load_dataset("json")', None),
    ],
)
def test_data_sets_of_files_are_their_files(tmp_path, call, expected):
    path = tmp_path / "grpo.py"
    path.write_text(f"GRPOTrainer(model='m', train_dataset={call})\n")
    script = read_script(path)
    assert script.arguments.get("prompt_data") == expected
    assert ("train_dataset" in script.unread) == (expected is None)


def test_sizes_count_all_processes():
    assert translate({}, processes=4).options["train_batch_size"] == 32
    assert translate({}, processes=4).options["rollout_batch_size"] == 4


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"num_generations": 3}, "8 samples a step are no whole number of groups of 3"),
        ({"loss_type": "luspo"}, "loss_type = 'luspo': expected one of grpo, dr_grpo, dapo"),
        ({"weight_decay_rate": 2}, "weight_decay_rate = 2: nothing here has this name"),
        ({"eval_steps": 0.5}, "eval_steps = 0.5: here it is a number of steps, not a share"),
        ({"optim": "adafactor"}, "optim: 'adafactor' has no counterpart, AdamW is taken"),
        ({"warmup_steps": 5}, "warmup_steps = 5: here it is lr_warmup_ratio, a share of all steps"),
    ],
)
def test_what_has_no_counterpart_is_said(arguments, said):
    (note,) = translate(arguments).notes
    assert said in note


def test_files_are_not_written_over(folder, capsys):
    (folder / "run").mkdir()
    (folder / "run/run.toml").write_text("max_steps = 1\n")
    assert main(["config", "translate", "grpo.py", "run"]) == 2
    assert "run has run.toml: give another folder" in capsys.readouterr().err
    assert (folder / "run/run.toml").read_text() == "max_steps = 1\n"


CHAT = """\
import re
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NAME = "tiny"
RATE = 1e-5
PATTERN = re.compile(r"\\d+")

class Watch(TrainerCallback):
    pass

def found(text):
    return PATTERN.search(text)

def correct(completions, answer, **kwargs):
    return [float(found(c[0]["content"]) is not None) for c in completions]

def form(completions, **kwargs):
    return [float(c[0]["content"].startswith("<")) for c in completions]

def main():
    data = load_dataset("json", data_files="rows.jsonl", split="train")
    data = data.map(lambda row: {"prompt": [{"role": "user", "content": row["q"]}]})
    args = GRPOConfig(
        output_dir="out", learning_rate=RATE, reward_weights=[0.2, 1.0], max_steps=4,
        warmup_steps=1, report_to=["tensorboard", "trackio"], num_generations=8, top_k=0,
    )
    trainer = GRPOTrainer(
        model=NAME, args=args, train_dataset=data.shuffle(seed=1),
        processing_class=AutoTokenizer.from_pretrained(NAME),
        reward_funcs=[form, correct], callbacks=[Watch()],
        peft_config=LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj"], bias="none"),
    )
    trainer.train()
"""


def translated(folder, capsys, text):
    """The options that a script becomes, and the lines that a person looks at."""
    (folder / "script.py").write_text(text)
    assert main(["config", "translate", "script.py", "made"]) == 0
    written = (folder / "made/run.toml").read_text().splitlines()
    capsys.readouterr()
    looks = [line.removeprefix("# look: ") for line in written if line.startswith("# look: ")]
    return TrainConfig.load(folder / "made/run.toml"), looks


def test_a_script_in_the_style_of_trls_pages_leaves_two_lines_to_look_at(folder, capsys):
    (folder / "rows.jsonl").unlink()
    config, looks = translated(folder, capsys, CHAT)
    expected = {
        "reward_weights": (0.2, 1.0),
        "use_tensorboard": True,
        "loggers": ("trackio",),
        "lr_warmup_ratio": 0.25,
        "actor_learning_rate": 1e-5,
        "pretrain": "tiny",
        "prompt_data": "rows.jsonl",
        "lora_rank": 4,
        "lora_alpha": 32,
        "target_modules": ("q_proj",),
        "top_k": -1,
        "apply_chat_template": True,
        "reward_fn": ("made/rewards.py:form", "made/rewards.py:correct"),
    }
    assert {name: config.__dict__[name] for name in expected} == expected
    (changed,) = [line for line in looks if line.startswith("train_dataset: .map(")]
    assert "is not carried out" in changed
    (callbacks,) = [line for line in looks if line not in changed]
    assert "Watch()" in callbacks
    assert "end_step" in callbacks
    rewards = (folder / "made/rewards.py").read_text()
    assert "PATTERN = re.compile" in rewards
    assert "def found" in rewards
    assert "trl" not in rewards
    assert "Watch" not in rewards


def test_the_first_row_of_a_file_says_whether_prompts_are_messages(folder, capsys):
    (folder / "a.jsonl").write_text('{"prompt": [{"role": "user", "content": "a"}]}\n')
    (folder / "b.jsonl").write_text('{"prompt": "a"}\n')
    for name, is_chat in (("a", True), ("b", False)):
        rows = f"load_dataset('json', data_files='{name}.jsonl')['train']"
        text = f"GRPOTrainer(model='m', train_dataset={rows})"
        config, looks = translated(folder, capsys, text)
        assert (config.apply_chat_template, looks) == (is_chat, [])
        (folder / "made/run.toml").unlink()


SFT = """\
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained("tiny")
rows = load_dataset("json", data_files="pairs.jsonl", split="train")
held = load_dataset("json", data_files={"train": "held.jsonl"})["train"]
config = SFTConfig(
    output_dir="out", per_device_train_batch_size=1, gradient_accumulation_steps=2, bf16=False,
    num_train_epochs=1, weight_decay=0.01, max_length=None, logging_steps=1, report_to="none",
)
SFTTrainer(
    model, args=config, train_dataset=rows, eval_dataset=held, peft_config=LoraConfig(r=2),
).train()
"""


def test_an_sft_script_trains(folder, capsys):
    (folder / "pairs.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n' * 2)
    (folder / "held.jsonl").write_text('{"prompt": "1+3=", "completion": "4"}\n')
    config, looks = translated(folder, capsys, SFT)
    expected = {
        "train_batch_size": 2,
        "micro_train_batch_size": 1,
        "actor_learning_rate": 2e-5,
        "max_epochs": 1,
        "l2": 0.01,
        "lora_rank": 2,
        "lora_alpha": 8,
        "prompt_data": "pairs.jsonl",
        "eval_data": "held.jsonl",
    }
    assert {name: config.__dict__[name] for name in expected} == expected
    assert [line.split(":")[0] for line in looks] == ["max_length = None", "target_modules"]
    write_tiny_model(folder / "tiny", "tiny-qwen3")
    assert main(["sft", "--config", "made/run.toml", "--fsdp"]) == 0
    assert (folder / "out/summary.json").exists()


@pytest.mark.parametrize(
    "text, command, expected",
    [
        (
            "DPOConfig(beta=0.2, loss_type=['sigmoid', 'bco_pair'], loss_weights=[0.8, 0.2])",
            "prefer",
            {
                "preference_loss": ("sigmoid", "bco_pair"),
                "preference_weights": (0.8, 0.2),
                "preference_args": {"beta": 0.2},
                "actor_learning_rate": 1e-6,
                "max_row_tokens": 1024,
            },
        ),
        (
            "DPOConfig(label_smoothing=0.1)",
            "prefer",
            {"preference_loss": ("cdpo",), "preference_args": {"label_smoothing": 0.1}},
        ),
        (
            "KTOConfig(desirable_weight=2.0)",
            "prefer",
            {"preference_loss": ("kto",), "preference_args": {"desirable_weight": 2.0}},
        ),
        (
            "RewardConfig(center_rewards_coefficient=0.01)",
            "reward",
            {"centering_coef": 0.01, "actor_learning_rate": 1e-4},
        ),
        ("SFTConfig(loss_type='dft', max_length=64)", "sft", {"sft_loss": "dft"}),
        ("SFTConfig(assistant_only_loss=True)", "sft", {"train_on": "assistant"}),
        ("SFTConfig(completion_only_loss=False)", "sft", {"train_on": "all"}),
        ("SFTConfig(run_name='a', report_to='wandb')", "sft", {"wandb_run_name": "a"}),
    ],
)
def test_scripts_of_other_trainers_are_those_of_other_commands(folder, text, command, expected):
    (folder / "script.py").write_text(text)
    script = read_script(folder / "script.py")
    assert script.command == command
    config = TrainConfig.from_args(translate(script.arguments, script=script).options)
    assert {name: config.__dict__[name] for name in expected} == expected


def test_values_that_a_script_leaves_open_need_no_note():
    made = translate(
        {"assistant_only_loss": None, "completion_only_loss": None}, script=Script("sft", "sft")
    )
    assert [note for note in made.notes if "loss" in note] == []
    assert "train_on" not in made.options
