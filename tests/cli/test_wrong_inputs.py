"""Every mistake gets its exit code and a message that names culprit and remedy, and writes nothing.

One table for all commands. A row is a command line, and what is said of it:

- options of a good line of the command are added, but for those that the line names itself, or
  leaves out by `without NAME`; variables of the environment stand before the command, and at the
  end `[no NAME]` a package that is missing;
- `...` stands for any words, and at the end for any further lines; else there is one line of a
  message for each line of the row.
"""

import contextlib
import importlib
import json
import os
import re
import shlex
import socket
import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.programs import run_python

from lightrft.cli.main import main
from lightrft.config.other_names import said_once

ROOT = Path(__file__).resolve().parents[2]
USAGE, PREFLIGHT, DATA, REWARD = 2, 3, 4, 5
ENVIRONMENT = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_ERROR_FILE", "LIGHTRFT_LAUNCHED", "CUDA_VISIBLE_DEVICES"),
    *("WANDB_API_KEY", "WANDB_MODE", "NETRC"),
)
ON_ROWS = "--pretrain model --prompt_data rows.jsonl --fsdp --output_dir run"
ON_ROWS += " --train_batch_size 1 --micro_train_batch_size 1"
ON_SAMPLES = "--pretrain model --prompt_data prompts.jsonl --fsdp --output_dir run --teacher model"
ON_SAMPLES += " --rollout_batch_size 4 --n_samples_per_prompt 2 --train_batch_size 8"
ON_MEDIA = "--prompt_data rows.jsonl --fsdp --output_dir run --engine_type hf"
ON_MEDIA += " --rollout_batch_size 16 --prompt_max_len 400 --generate_max_len 8"
# A good line of each command, which is the first word of its name here.
GOOD = {
    "train": "--pretrain model --prompt_data good.jsonl --reward_fn reward.py:f"
    " --rollout_batch_size 16",
    **dict.fromkeys(("sft", "prefer", "reward"), ON_ROWS),
    "distill": f"{ON_ROWS} --teacher model --teacher_form forward",
    "distill on samples": f"{ON_SAMPLES} --generate_max_len 4",
    "train on images": f"--pretrain vision --reward_fn reward.py:f {ON_MEDIA}",
    "train on sounds": f"--pretrain hearing --reward_fn reward.py:f {ON_MEDIA}",
    "train on texts": f"--pretrain model --reward_fn reward.py:f {ON_MEDIA}",
}
SFT = '{"prompt": "a ", "completion": "b"}'
PAIR = '{"prompt": "a ", "chosen": "b", "rejected": "c"}'
STEPS = '{"prompt": "a", "completions": ["b", "c"], "labels": [true, false]}'
LABELLED = '{"prompt": "a ", "completion": "b", "label": true}'
GOOD_ROW = {"sft": SFT, "distill": SFT, "prefer": PAIR, "reward": PAIR}
USER = '{"role": "user", "content": "a"}'
ANSWER = '{"role": "assistant", "content": "b"}'
ANSWERED = f"{ANSWER}]"
TALK = f"{USER}, {ANSWER}, {USER}"
WORSE = '{"role": "assistant", "content": "c"}]'
UNTRAINED = '{"role": "assistant", "content": "c", "weight": 0}'
IDS = '{"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [%s]}'
DEEP = "[" * 10**5
DIGITS = "9" * 5000
A_FUNCTION = "def f(responses):\n    return [0.0 for _ in responses]\n"
CUT = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
# Header of a model that fits on no disk.
HUGE = {"w": {"dtype": "F32", "shape": [10**8, 10**8], "data_offsets": [0, 0]}}
LOSSES = """
def no_gradient(logprobs, old_logprobs, advantages, response_mask):
    return advantages

def odd_annotation(a, b, c, d, *, x: '1 +' = 1.0):
    return -c

def wrong_shape(logprobs, old_logprobs, advantages, response_mask):
    return logprobs.sum()

def wrong_arguments(logprobs):
    return logprobs

def one_number(inputs):
    return 3.0

def demanding(inputs, *, strength: float):
    return inputs.rewards * strength
"""
TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
TURNS += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CALL = '"tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]'
# Beside which a command is called.
FILES = {
    "good.jsonl": "".join(f'{{"input": "{n}+1?", "label": "{n + 1}"}}\n' for n in range(4)),
    "prompts.jsonl": "".join(f'{{"input": "say {c}", "label": "#### 2"}}\n' for c in "abcd"),
    "labelled.jsonl": LABELLED,
    "odd.jsonl": '{"a": 1}',
    "reward.py": A_FUNCTION,
    "losses.py": LOSSES,
    "here/beside.py": "def f(a, b): return -(a - b).exp()\n",
    "here/loss.py": "from beside import f\n"
    "def loss(logprobs, old_logprobs, advantages, response_mask):\n"
    "    return f(logprobs, old_logprobs) * advantages\n",
    "reward.toml": "reward_fn = 'gsm8k'\n",
    "text.toml": "rollout_batch_size = '4'\n",
    "used/metrics.jsonl": "{}",
    **dict.fromkeys(("recorded/config.toml", "recorded/rollouts.jsonl", "unsaved/config.toml"), ""),
    # Templates that write roles and contents alone, that leave out a role, and that refuse all.
    "turns.jinja": TURNS,
    "few.jinja": TURNS.replace("messages %}", "messages if m.role != 'system' %}"),
    "refusing.jinja": "{{ raise_exception('roles must alternate') }}",
    "folder": None,
    "half/config.json": "{}",
    "half/model.safetensors": "{}",
    "adapters/adapter_config.json": "{}",
    "adapters/adapter_model.safetensors": "{}",
    "bare/config.json": "{}",
    "bare/tokenizer.json": "{}",
    **{
        f"{folder}/{name}": content
        for folder, config, weights in (
            ("cut", "{}", CUT),
            ("huge", "{}", HUGE),
            ("few", '{"max_position_embeddings": 64}', "{}"),
            ("broken", "{", ""),
        )
        for name, content in (
            ("config.json", config),
            ("tokenizer.json", "{}"),
            ("model.safetensors", weights),
        )
    },
}


@dataclass(frozen=True)
class Mistake:
    """A row of the table.

    Args:
        line: The command line.
        said: What is said.
        code: Exit code.
        files: Contents by name, beside `FILES`.
    """

    line: str
    said: str
    code: int
    files: Mapping = field(default_factory=dict)


def lines(code, starts, table):
    """Return mistakes of options: what follows a start of a command line, and what is said."""
    return {
        line: Mistake(line, said, code)
        for start in starts.split(" | ")
        for options, said in table.items()
        for line in [f"{start} {options}".strip()]
    }


def contents(start, table, *, name="rows.jsonl", code=DATA):
    """Return mistakes in a file that a command line names: its content, and what is said."""
    option = "" if name.split("/")[0] in start else f" --prompt_data {name}"
    return {
        f"{start}, {name} = {content[:200]!r}": Mistake(start + option, said, code, {name: content})
        for content, said in table.items()
    }


OPTIONS = tomllib.loads(Path(__file__).with_name("wrong_options.toml").read_text())
CONFIGURATION = lines(
    USAGE,
    "train",
    OPTIONS["configuration"],
)
# What depends on the loss and the estimator, whose modules need torch.
OF_THE_ALGORITHM = lines(
    USAGE,
    "train",
    OPTIONS["of_the_algorithm"],
)
NUMBERS = lines(
    USAGE,
    "train",
    {
        **{
            f"--{name} {value}": f"{name} ... {value} ... expected"
            for value, names in {
                "nan": "actor_learning_rate critic_learning_rate eps_clip eps_clip_low gamma lambd "
                "init_kl_coef reward_clip l2 max_norm max_ckpt_mem alarm_kl peak_tflops "
                "reward_weights",
                "inf": "temperature init_kl_coef kl_target entropy_coef timeout_minutes "
                "prompt_data_probs",
                "1e+300": "timeout_minutes reward_timeout_seconds heartbeat_seconds",
                "1e+308": "actor_learning_rate",
            }.items()
            for name in names.split()
        },
        "--lora_alpha inf --lora_rank 2": "lora_alpha ... inf ... expected",
        "--temperature 1e400": "temperature ... got inf",
        "--policy_loss sapo --policy_loss_args tau_positive=inf": "policy_loss_args: "
        "tau_positive: got inf ... finite",
        "--policy_loss sapo --policy_loss_args temperature_positive=nan": "policy_loss_args: "
        "temperature_positive: got nan",
        "--advantage_args x=nan": "advantage_args: x: got nan",
        "--correction_args high=inf --off_policy_correction tis": "correction_args: high: got inf",
        "--reward_args bonus=nan": "reward_args: bonus: got nan",
        "--engine_arg x=inf": "engine_args: x: got inf",
        "--adam_betas nan 0.9": "adam_betas: got (nan, 0.9), expected a finite number",
        "--adam_betas 1 0.9": "adam_betas ... expected two numbers in [0, 1)",
        f"--seed {'9' * 25}": "seed ... 64 bits",
        f"--max_steps {DIGITS}": "max_steps ... 999 ...",
        "--train_batch_size 100000000": "train_batch_size 100000000 ... 128",
        "--rollout_batch_size 100000000": "100000000 * 8 ... 10000000",
        "--n_samples_per_prompt 100000000": "16 * 100000000 ... 10000000",
        "--nproc_per_node 100000000": "rollout_batch_size ... processes\ntrain_batch_size",
        "--max_len 10": "max_len must hold ... 10 and 1024 + 1024",
        "--pretrain few": "generate_max_len ... 1024 ... 64 positions of few",
        "--output_dir 'a\0b'": "output_dir ... NUL",
        f"--critic_pretrain {DIGITS} --advantage_estimator gae": "File name too long",
        "--wandb_org '\ud800'": "wandb_org ... UTF-8",
    },
)
FILES_OF_OPTIONS = {
    **contents(
        "train without rollout_batch_size --config t.toml",
        {
            "temperature = \n": "t.toml ... line 1",
            "temprature = 1\n": "t.toml ... 'temprature' ... temperature",
            "max_steps = 'many'\n": "max_steps ... 'many'",
            "output_dir = ' '\n": "output_dir: got ' ' ... the path of a folder",
            "rollout_batch_size = '4'\n": "rollout_batch_size: got '4' (str) ... int",
            "gamma = nan\n": "gamma: got nan",
            f"seed = {DIGITS}": "t.toml ... not a TOML file",
            f"seed = {DEEP}": "t.toml ... not a TOML file",
            "[run]\nmax_steps = 3\n": "unknown option 'run' ... it is a table ... top level",
            b"seed = '\xff'\n": "t.toml ... not a TOML file",
        },
        name="t.toml",
        code=USAGE,
    ),
    **contents(
        "train without reward_fn --config t.toml",
        {"reward_fn = 3\n": "reward_fn ... got 3 ... tuple"},
        name="t.toml",
        code=USAGE,
    ),
    **contents(
        "train --config t.yaml",
        {"seed: 3\n": "YAML is not read ... name = value ... as lightrft config show prints them"},
        name="t.yaml",
        code=USAGE,
    ),
}
ROWS = {
    **lines(
        DATA,
        "train",
        {
            "--prompt_data none.jsonl": "none.jsonl",
            "--eval_data none.jsonl": "none.jsonl",
            "--eval_data odd.jsonl": "odd.jsonl:1 ... --input_key",
        },
    ),
    **contents("train --eval_data rows.jsonl", {"{\n": "rows.jsonl:1 ... JSON"}),
    **contents(
        "train",
        {
            '{"input": "a"}\n{"input": \n': "rows.jsonl:2 ... JSON",
            "[1]\n": "rows.jsonl:1 ... object",
            '{"input": "a"}\n{"question": "b"}\n': "rows.jsonl:2 ... --input_key",
            '{"input": null}\n': "rows.jsonl:1 ... 'input'",
            '{"input": " "}\n': "rows.jsonl:1 ... empty",
            "": "rows.jsonl ... no rows",
            b'{"input": "\xe9"}\n': "rows.jsonl:1 ... UTF-8",
            '{"input": "a\\ud800b"}\n': "rows.jsonl:1 ... surrogate",
            f'{{"input": {DEEP}': "rows.jsonl ... nested deeper",
            f'{{"input": "a", "label": {DEEP[:200]}{"]" * 200}}}': "rows.jsonl:1 ... 100 levels",
            f'{{"input": "a", "label": {DIGITS}}}': "rows.jsonl:1 ... digits",
            "7\n": "rows.jsonl:1 ... a number",
            bytes(range(256)): "rows.jsonl:1",
            '{"input": "a"}'.encode("utf-16"): "rows.jsonl:1",
            '{"input": []}': "rows.jsonl:1",
            '{"input": 3}': "column 'input' must hold a string or a list ... got int '3'",
            f'{{"input": [{USER}]}}': "holds chat messages: add --apply_chat_template",
            '{"prompt": "a", "prompt": "b"}': "rows.jsonl:1 has 'prompt' twice",
        },
    ),
    **contents(
        "train --apply_chat_template --input_template 'a {}'",
        {f'{{"input": [{USER}]}}': "fits string prompts only"},
    ),
    **contents(
        "train --apply_chat_template --system_prompt c",
        {f'{{"input": [{{"role": "system", "content": "b"}}, {USER}]}}': "drop one of them"},
    ),
    **contents(
        "train --reward_fn boxed_math",
        {
            '{"input": "a", "label": "1"}\n{"input": "b"}\n{"input": "c"}\n': "rows.jsonl:2 ... "
            "no label: set --label_key (and 1 rows more)",
            '{"input": "a", "label": {"x": 1}}': "rows.jsonl:1 ... got an object",
        },
    ),
    **contents(
        "train --apply_chat_template", {'{"input": [{"role": "user"}]}': "rows.jsonl:1 ... role"}
    ),
    **contents(
        "train --input_key questoin",
        {
            '{"question": "a", "answer": "b"}': "no column 'questoin', found 'question', "
            "'answer'; set --input_key question"
        },
    ),
    **contents("train", {"input\na\n": "t.tsv ... .jsonl"}, name="t.tsv"),
    **contents(
        "train",
        {
            '{"input": "a"}': "d.json: expected a list of objects, got an object ... .jsonl",
            '[{"input": "a"}, "b"]': "d.json, row 2: expected an object ... got a string",
            "[]": "holds no rows",
            '[\n{"input": }]': "d.json: not valid JSON ( ... line 2",
            '[{"m": [{"role": "user", "role": "tool"}]}]': "d.json has 'role' twice",
            f"{DEEP}{'1' * 10**5}": "d.json ... nested deeper",
            f"[{DIGITS}]": "d.json ... digits",
        },
        name="d.json",
    ),
    **contents("train", {"text": "c.parquet", b"PAR1\0\0": "c.parquet"}, name="c.parquet"),
    **contents(
        "train",
        {
            "input,label\nx\n": "d.csv:2: 1 cells, the header has 2",
            'input\n"x\n': "d.csv is no table of comma-separated values",
            "input\n": "holds no rows",
            "input,label,input\na,4,b\n": "d.csv has 'input' twice",
        },
        name="d.csv",
    ),
}
REWARDS = {
    **lines(
        USAGE,
        "train",
        OPTIONS["rewards"],
    ),
    **contents(
        "train --reward_fn wrong.py:f",
        {
            "def f(responses:\n": "wrong.py ... SyntaxError ... line 1 ...",
            f"import no_such_module\n{A_FUNCTION}": "wrong.py ... No module named ... line 1 ...",
            "raise ValueError('broken at once')\n": "wrong.py ... broken at once ... line 1 ...",
            "raise SystemExit(0)\n": "wrong.py ... SystemExit ...",
            "def f(texts): return []\n": "wrong.py ... argument responses ... (texts)",
            "def f(responses, /): return []\n": "wrong.py ... keyword argument",
            "def f(responses, answer): return []\n": "wrong.py ... 'answer' ... no column of the "
            "data: its columns are input, label, beside prompts ... rename it",
            **{
                f"def f(responses): return {result}\n": f"wrong.py:f failed ... {expected}"
                for result, expected in {
                    "None": "expected a list of 4 numbers or dicts, got NoneType",
                    "[float('nan')] * 4": "result 0: expected a finite number, got nan",
                    "['a'] * 4": "result 0: expected a number, got 'a'",
                    "[1.0]": "expected one result per response, 4 in all, got 1",
                    "1.0": "expected a list of 4 numbers or dicts, got float",
                    "[{'a': 'x'}] * 4": "key 'a': expected a number, got 'x'",
                    "[1 / 0 for _ in responses]": "division by zero ...",
                }.items()
            },
            "def f(completions, environments): return [e.score for e in environments]\n": "wrong.py"
            " ... 'environments' ... train with --environment",
            "def f(completions, completion_ids): return [len(c) for c in completion_ids]\n": "wrong"
            ".py ... 'completion_ids' ... a parameter responses",
        },
        name="wrong.py",
        code=REWARD,
    ),
}
LAUNCHED = "LOCAL_RANK=0 MASTER_ADDR=h MASTER_PORT=1"
MACHINE = {
    **lines(
        PREFLIGHT,
        "",
        {
            "RANK=0 train": "RANK is set ... WORLD_SIZE ... torchrun",
            f"{LAUNCHED} RANK=x WORLD_SIZE=1 train": "whole numbers ... RANK='x'",
            f"{LAUNCHED} RANK=2 WORLD_SIZE=2 train": "below WORLD_SIZE ... 2 and 2",
            "MASTER_PORT=high train": "MASTER_PORT='high' ... unset",
            "MASTER_PORT=99999 train": "MASTER_PORT='99999' ... unset",
            "MASTER_PORT=TAKEN train": "cannot be used ... unset it",
            "CUDA_VISIBLE_DEVICES=0 train": "CUDA_VISIBLE_DEVICES=0 ... unset",
            "WANDB_MODE=offline train --use_wandb [no wandb]": "--use_wandb ... lightrft[wandb]",
            "NETRC=/no/netrc train --use_wandb": "--use_wandb ... WANDB_API_KEY ... offline",
            # All that a machine lacks comes at once.
            "MASTER_PORT=high train --zero_stage 3 [no deepspeed]": "deepspeed\nMASTER_PORT",
        },
    ),
    **lines(
        PREFLIGHT,
        "train",
        OPTIONS["machine"],
    ),
    # The same mistake is found in a worker.
    **lines(
        USAGE,
        "LOCAL_RANK=1 MASTER_ADDR=h MASTER_PORT=1 RANK=1 WORLD_SIZE=3 train",
        {"": "lightrft[1]: rollout_batch_size ..."},
    ),
}
OTHER_COMMANDS = lines(
    USAGE,
    "",
    {
        "trian": "unknown command 'trian' ... train",
        "Train": "did you mean train",
        "quick-start": "did you mean quickstart",
        "init-run model": "model is not empty",
        "launch": "nothing was given ... expected slurm",
        "launch pbs": "got 'pbs', expected slurm: lightrft launch slurm --print",
        "init-model": "DIR",
        "init-model new --preset tiny": "'tiny' ... tiny-qwen3",
        "init-model new --shape qwen3-4": "'qwen3-4' ... qwen3-4b",
        "init-model new --shape qwen3-4b --preset tiny-llama": "--preset",
        "init-model new --preset tiny-qwen2.5-vl --lengths 9": "--lengths ... tiny-qwen2.5-vl",
        "init-model new --shape qwen3-4b --lengths 200000": "151936",
        "init-model model": "model is not empty",
        "init-model reward.py": "reward.py is a file",
        "init-model new --seed -1": "--seed ... '-1'",
        "init-model 'a\0b'": "a\\x00b ... null byte",
        "quickstart --algorithm gpro": "--algorithm ... grpo",
        "quickstart --strategy ddp": "'ddp' ... fsdp",
        "quickstart --steps 0": "--steps ... '0'",
        "quickstart --output_dir model": "model is not empty",
        "quickstart --pipeline --vision": "--vision: not allowed with argument --pipeline",
        "quickstart --environment --vision": "--vision: not allowed with argument --environment",
        "quickstart --pipeline --environment": "not allowed with argument --pipeline",
        "quickstart --pipeline --algorithm ppo": "--pipeline takes grpo and fsdp ... --algorithm",
        "quickstart --pipeline --strategy deepspeed": "pipeline takes grpo and fsdp ... --strategy",
        "quickstart --output_dir /proc/xx": "/proc/xx",
        "quickstart --stepz 3": "--stepz",
        "config show --config text.toml": "rollout_batch_size: got '4' (str)",
        "config show --nproc_per_node 7": "rollout_batch_size ... 7 processes\ntrain_batch_size",
        "completion bahs": "unknown shell 'bahs'; did you mean bash",
        **{
            f"report {name}": f"{name} holds no run: expected the --output_dir"
            for name in ("nowhere", "folder", "reward.py", "here")
        },
        "report recorded nowhere": "nowhere holds no run",
        f"report{' recorded' * 13}": "up to 12 runs, got 13",
        "report recorded --output a.html": "--output is for a page about several",
        "launch slurm --print": "options of the run are missing",
        "launch slurm -- --pretrain m": "only prints: add --print",
        "launch slurm --print --time soon -- --pretrain m": "--time: got 'soon'",
        "launch slurm --print --job_name 'a b' -- --pretrain m": "--job_name: got 'a b'",
        "launch slurm --print -- --pretrian m": "did you mean pretrain",
        "launch slurm --print -- --nproc_per_node 8": "nproc_per_node: leave it out ...",
        "launch slurm --print --nodes 3 --gpus_per_node 1 -- --pretrain m": "multiple of the 3 "
        "processes\ntrain_batch_size",
        "launch slurm --print --nodes 0 -- --pretrain m": "expected a number >= 1",
        "launch slurm --print -- --config none.toml": "no such file: none.toml",
        "doctor --gpu --pretrain m": "--gpu looks at no model",
        "doctor --bf16": "--bf16 acts only with --invariance",
        "doctor --compile_backend inductor": "--compile_backend needs --pretrain",
        "doctor --compile_backend inductor --gpu": "is an examination of its own",
        "doctor --compile_backend gcc --pretrain m": "invalid choice",
        "doctor --invariance": "needs --pretrain",
        "doctor --invariance --gpu --pretrain m": "is an examination of its own",
        "doctor --invariance --pretrain m --nproc_per_node 3": "invalid choice",
        "sft --reward_loss hps": "reward_loss is an option of lightrft reward, not of lightrft sft",
    },
)
# Commands that read a model, an evaluation or rows.
WITH_TORCH = {
    **lines(
        USAGE,
        "",
        OPTIONS["with_torch"],
    ),
    **lines(
        USAGE,
        "rows",
        OPTIONS["with_torch_2"],
    ),
    **contents(
        "config translate grpo.py made",
        {
            "x = 1\n": "expected a call of GRPOTrainer, SFTTrainer, DPOTrainer",
            "def (": "expected a Python script",
            "GRPOConfig(temperature=-1)\n": "temperature ...",
            "GRPOConfig(num_generations=0)\n": "num_generations: got 0, expected an integer from 1",
            "GRPOConfig(num_generations=2.5)\n": "num_generations: got 2.5, expected an integer",
            "GRPOConfig(steps_per_generation='a')\n": "steps_per_generation: got 'a', expected",
            "SFTConfig(seed=1)\nDPOConfig(seed=1)\n": "expected one trainer, found DPOTrainer and "
            "SFTTrainer",
        },
        name="grpo.py",
        code=USAGE,
    ),
    **contents(
        "plan --pretrain m",
        {
            "[]": "m/config.json ... an object",
            DEEP: "m/config.json ... nested deeper",
            b"\xff\xfe{}": "m/config.json ... not UTF-8",
        },
        name="m/config.json",
        code=USAGE,
    ),
    **contents(
        "data check d.json", {f"[{DIGITS}]": "...", f"{DEEP}{'1' * 10**5}": "..."}, name="d.json"
    ),
    **contents("data check rows.jsonl", {'{"input": "a\\ud800b"}\n': "..."}),
}
PLUG_INS = {
    **lines(
        USAGE,
        "train",
        OPTIONS["plug_ins"],
    ),
    **contents(
        "train --policy_loss l.py:f",
        {
            "def f(:\n": "l.py cannot be imported: SyntaxError",
            "raise ValueError('a\\nb')\n": "l.py cannot be imported: ValueError: a b",
            "raise SystemExit(3)\n": "l.py cannot be imported: SystemExit",
            "import no_such_sibling\n": "No module named 'no_such_sibling'",
        },
        name="l.py",
        code=USAGE,
    ),
}
WITHOUT_TORCH = CONFIGURATION | NUMBERS | FILES_OF_OPTIONS | ROWS | REWARDS | OTHER_COMMANDS
BEFORE_A_RUN = WITHOUT_TORCH | OF_THE_ALGORITHM | MACHINE | WITH_TORCH | PLUG_INS

TOO_LARGE = "has ids up to 261 ('<tool>') and the model 261 rows"
# What is found by reading a model or rows.
OPTIONS_OF_STAGES = {
    **lines(
        USAGE,
        "sft | prefer | reward",
        {
            "--pretrain grown": TOO_LARGE,
            "--overlap stream": "overlap is an option of lightrft train, not of lightrft",
            "--train_batch_size 4": "has 2 usable rows, less than one step",
            "--pretrain nothing": "--pretrain: no model directory at nothing",
        },
    ),
    **lines(USAGE, "sft | reward | distill", {"without prompt_data": "--prompt_data is missing"}),
    **lines(
        USAGE,
        "prefer | reward",
        {"--train_on all": "train_on is an option of lightrft sft, not of"},
    ),
    **lines(
        USAGE, "sft | prefer", {"--policy_loss gspo": "policy_loss is an option of lightrft train"}
    ),
    **lines(DATA, "prefer | reward", {"--max_row_tokens 2": "all 2 pairs exceed max_row_tokens"}),
    **lines(
        DATA,
        "",
        OPTIONS["options_of_stages"],
    ),
    **lines(
        PREFLIGHT,
        "",
        {
            "sft --output_dir reward.py": "output_dir",
            "prefer --output_dir reward.py/run": "output_dir",
            "export recorded new --push_to_hub me/sums": "does not answer, or HF_HUB_OFFLINE",
        },
    ),
    **lines(
        USAGE,
        "sft",
        OPTIONS["options_of_stages_2"],
    ),
    **lines(
        USAGE,
        "prefer",
        OPTIONS["options_of_stages_3"],
    ),
    **lines(
        USAGE,
        "reward",
        OPTIONS["options_of_stages_4"],
    ),
    **lines(
        USAGE,
        "",
        {
            "eval grown --eval_data prompts.jsonl --reward_fn gsm8k --output_dir run": TOO_LARGE,
            "eval model --eval_data good.jsonl --reward_fn no.py:f --generate_max_len 9": "no.py",
            "eval model --eval_data good.jsonl --reward_fn gsm8k --output_dir model": "not empty",
            "data check prompts.jsonl --pretrain grown": TOO_LARGE,
            "data check good.jsonl --stage sft --pretrain nothing": "no model directory at nothing",
            "data check labelled.jsonl --stage prefer --pretrain model": "preference_loss dpo "
            "compares two answers",
        },
    ),
    **lines(
        USAGE,
        "data check good.jsonl --pretrain model",
        OPTIONS["options_of_stages_5"],
    ),
    **lines(
        USAGE,
        "distill",
        {
            "--pretrain grown --teacher grown": TOO_LARGE,
            "--actor_learning_rate x": "actor_learning_rate",
            "without teacher": "--teacher is missing",
            "--teacher reward.py": "--teacher",
            "--teacher scorer": "teacher",
            "--teacher_beta 0.3 --strict": "teacher_beta",
            "--teacher_form jsd --teacher_beta 1.5": "teacher_beta",
            "--teacher_beta 1.0": "teacher_beta: got 1.0, expected <= 0.99",
            "--teacher_form backward": "teacher_form",
            "--init_kl_coef 0.1": "init_kl_coef is an option of lightrft train",
            "--teacher_coef 0.5": "teacher_coef is an option of lightrft train",
            "--sft_loss dft": "sft_loss is an option of lightrft sft",
            "--no_fused_linear_logprob": "fused_linear_logprob: distillation on rows",
            "--train_batch_size 16": "has 2 usable rows, less than one step takes",
            "--generate_max_len 4": "not of lightrft distill on rows",
            "--teacher_top_k 3": "teacher_top_k works only with a teacher behind a server",
            "--teacher http://127.0.0.1:9/v1": "teacher_top_k: a server does not give the whole",
        },
    ),
    **lines(
        USAGE,
        "distill on samples",
        OPTIONS["options_of_stages_6"],
    ),
    **lines(
        USAGE,
        "distill on samples --teacher http://127.0.0.1:9/v1",
        {
            "--temperature 0.7": "log-probabilities of a prompt are those of temperature 1: got "
            "0.7",
            "--teacher_top_k 5": "teacher_top_k and offpolicy_fraction are of the divergences",
            "--offpolicy_fraction 0.5": "teacher_top_k and offpolicy_fraction are of the",
        },
    ),
    **contents(
        "prefer --config c.toml", {"maximum = 1\n": "c.toml ... maximum"}, name="c.toml", code=USAGE
    ),
    **contents("reward --config c.toml", {"a = ": "c.toml"}, name="c.toml", code=USAGE),
    **contents(
        "sft --config c.toml", {'max_epochs = "x"\n': "max_epochs"}, name="c.toml", code=USAGE
    ),
    **contents(
        "sft --apply_chat_template --chat_template t.jinja",
        {"{% if %}": "t.jinja"},
        name="t.jinja",
        code=USAGE,
    ),
    **contents("reward --chat_template t.jinja", {b"\xff": "t.jinja"}, name="t.jinja", code=USAGE),
    **contents("prefer --chat_template t.jinja", {"a": "turns"}, name="t.jinja"),
    **contents("prefer", {LABELLED: "preference_loss dpo compares two answers to a"}, code=USAGE),
    **contents(
        "reward --reward_loss hps",
        {LABELLED: "reward_loss hps is of pairs or rankings"},
        code=USAGE,
    ),
    **contents("reward --centering_coef 0.1", {LABELLED: "centering_coef is of pairs"}, code=USAGE),
    **contents(
        "reward --reward_pooling attention",
        {
            '{"prompt": "1+1=", "completions": ["2.", "3."], "labels": [true, false]}': "the data "
            "hold labelled steps: use last"
        },
        code=USAGE,
    ),
}
ROWS_OF_STAGES = {
    **contents(
        "data check rows.jsonl --stage reward --pretrain model",
        {"{": "no row of 1 can be read", "": "rows.jsonl holds no rows"},
    ),
    **contents(
        "data check rows.jsonl --stage reward --pretrain model --reward_loss bce",
        {PAIR: "bce"},
        code=USAGE,
    ),
    **contents(
        "data check rows.jsonl --stage sft --pretrain model --train_on assistant",
        {SFT: "train_on assistant: rows with"},
    ),
    **contents(
        "sft",
        {
            f"{SFT}\n{{": "rows.jsonl:2: not valid JSON",
            "": "rows.jsonl holds no rows",
            b'{"text": "\xff\xfe"}\n': "rows.jsonl",
            f'{{"messages": [{{"role": "user", "content": [{{"type": "image"}}]}}, {ANSWERED}}}': (
                "a part of type 'image'"
            ),
            '{"messages": []}': "'messages'",
            '{"messages": "a"}': "rows.jsonl:1: column 'messages' must hold a list",
            '{"messages": [{"role": "user"}]}': "message 1 of ... must be an object",
            '{"conversations": [{"from": "me", "value": "a"}]}': "message 1 of ... from (human",
            f'{{"messages": [{ANSWERED}, "tools": "{{\\"a\\": 1}}"}}': "'tools'",
            f'{{"messages": [{ANSWERED}, "tools": "{{"}}': "column 'tools' is no JSON",
            '{"text": 5}': "column 'text' must hold a text: got '5'",
            '{"token_ids": [5, -1], "is_trained": [0, 1]}': "'token_ids' ... -1",
            f'{{"token_ids": [5, {10**30}], "is_trained": [0, 1]}}': "'token_ids'",
            '{"token_ids": [5, 261], "is_trained": [0, 1]}': "got 261, expected numbers from 0 to",
            '{"token_ids": [5, 2.0], "is_trained": [0, 1]}': "'token_ids' must hold a list of numb",
            '{"token_ids": "56", "is_trained": [0, 1]}': "'token_ids' must hold a list of numbers",
            '{"token_ids": [5, true], "is_trained": [0, 1]}': "'token_ids'",
            '{"token_ids": [5, 6], "is_trained": [0, 2]}': "got 2, expected numbers from 0 to 1",
            '{"token_ids": [5, 6], "is_trained": [1]}': "'is_trained' ... 1 for 2",
            '{"token_ids": [], "is_trained": []}': "no token is trained",
            '{"question": "a"}': "rows.jsonl:1: expected a column messages",
            f'{SFT}\n{{"text": "a"}}': "rows.jsonl:2: expected prompt and completion",
            '{"messages": [{"role": "user", "content": "a"}]}': "rows.jsonl:1: no message of role",
            '{"prompt": "a ", "completion": ""}': "column 'completion' must",
            '{"prompt": "a", "completion": null}': "found 'prompt', 'completion' (null)",
            '{"question": "a", "answer": "b"}': 'rename_columns({"question": "prompt", "answer": '
            '"completion"})',
            **{
                f'{{"messages": [{USER}, {{"role": "assistant", {answer}]}}': said
                for answer, said in {
                    '"content": ""}': "rows.jsonl:1: message 2 is empty ... end at once",
                    '"content": " \\n"}': "message 2 is empty",
                    '"content": [{"type": "reasoning", "text": "b"}]}': "a part that is no text",
                    '"content": "b", "weight": 0}': "message 2 is marked untrained, and no other",
                    '"content": "b", "weight": 0.5}': "weight must be 0 or 1: got '0.5'",
                    '"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}': "message 2 "
                    "of ... calls that cannot be read",
                    '"tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}': "cannot be r",
                    '"tool_calls": [{"function": {"name": "f", "arguments": 5}}]}': "cannot be rea",
                    '"tool_calls": [{"function": {"name": "f", "arguments": "{\\"x\\": NaN}"}}]}': (
                        "calls that cannot be read ... NaN"
                    ),
                }.items()
            },
            f'{{"messages": [{USER}, {{"role": "assistant", "content": "b<|end|>"}}]}}': "message "
            "2 has '<|end|>' in its text",
            f'{{"messages": [{ANSWERED}}}': "begins with an assistant's message",
            f'{{"messages": [{{"train": true, "role": "user", "content": "a"}}, {ANSWERED}}}': (
                "message 1 of ... train is True, and only an assistant"
            ),
            f'{{"system": "a", "messages": [{{"role": "system", "content": "c"}}, {USER}, '
            f"{ANSWERED}}}": "the row has a system message and a column",
        },
    ),
    **contents(
        "sft --train_on last_assistant",
        {f'{{"messages": [{TALK}, {UNTRAINED}]}}': "message 4 is marked untrained"},
    ),
    **contents(
        "sft --train_on all",
        {f'{{"messages": [{USER}, {UNTRAINED}, {TALK}]}}': "is marked untrained, and train_on"},
    ),
    **contents("sft --train_on assistant", {'{"text": "a"}': "rows with text take"}),
    **contents("sft --apply_chat_template", {'{"text": "a"}': "rows with text have no turns"}),
    **contents(
        "sft --chat_template few.jinja",
        {
            f'{{"messages": [{{"role": "system", "content": "c"}}, {USER}, {ANSWERED}}}': "the "
            "chat template drops messages of role system"
        },
    ),
    **contents(
        "train --label_key golden --generate_max_len 8",
        {'{"input": "a", "gold": "1"}': "no column 'golden' for the label, found 'input', 'gold'"},
    ),
    **contents(
        "train --apply_chat_template --chat_template turns.jinja --generate_max_len 8",
        {
            f'{{"input": [{USER}, {{"role": "assistant", {CALL}}}, {USER}]}}': "drops the calls of "
            "tools ... --chat_template",
            f'{{"input": [{USER}], "tools": [{{"name": "f"}}]}}': "does not show tools",
        },
    ),
    **contents(
        "train --apply_chat_template --chat_template refusing.jinja --generate_max_len 8",
        {f'{{"input": [{USER}]}}': "rows.jsonl:1: the chat template refused ... must alternate"},
    ),
    **contents(
        "sft --chat_template turns.jinja",
        {
            f'{{"messages": [{USER}, {{"role": "assistant", {CALL}}}, {USER}, {ANSWERED}}}': "rows."
            "jsonl:1: the chat template drops the calls of tools ... --chat_template",
            f'{{"messages": [{USER}, {{"thinking": "c", {ANSWERED[1:]}}}': "drops the thinking",
            f'{{"messages": [{USER}, {{"reasoning_content": "c", {ANSWERED[1:]}}}': "drops the",
            f'{{"messages": [{USER}, {ANSWERED}, "tools": [{{"name": "f"}}]}}': "not show tools",
            '{"text": "a"}': "chat_template: rows with text have no",
            SFT: "or add apply",
        },
    ),
    **contents("sft", {"PAR1": "p.parquet"}, name="p.parquet"),
    **contents(
        "distill",
        {
            '{"token_ids": [5, 6], "is_trained": [1, 0]}': "no token is trained",
            '{"prompt": "a"}': "rows.jsonl:1",
        },
    ),
    **contents(
        "distill without teacher --teachers x=model",
        {
            '{"prompt": "a ", "completion": "b", "teacher": "z"}': "holds 'z', expected the name "
            "of one of teachers: x"
        },
    ),
    **contents(
        "distill on samples without teacher --teachers x=model --prompt_data rows.jsonl"
        " --rollout_batch_size 1 --train_batch_size 2",
        {'{"input": "a", "teacher": "z"}': "holds 'z', expected the name of one of teachers: x"},
    ),
    **contents(
        "distill without teacher_form --generate_max_len 4 --teacher_prompt_column hints",
        {'{"input": "a"}': "expected a text for the teacher in column 'hints'"},
    ),
    **contents(
        "distill --offpolicy_fraction 0.5 --generate_max_len 4 --prompt_max_len 3",
        {
            '{"prompt": "say it", "completion": "b"}': "the prompt of row 1 has ... "
            "prompt_max_len = 3"
        },
    ),
    **contents(
        "prefer",
        {
            f"{PAIR}\n{{": "rows.jsonl:2: not valid JSON",
            f"{PAIR}\n{LABELLED}": ":2: expected rows like the first",
            '{"prompt": "a ", "chosen": 4, "rejected": "c"}': "or a list of messages: got int",
            '{"prompt": "a ", "chosen": ["b"], "rejected": "c"}': "rows.jsonl:1",
            '{"chosen": "b", "rejected": "c"}': "rows.jsonl:1 ... prompt",
            '{"prompt": "a", "completion": "b", "label": NaN}': "rows.jsonl:1 ... 'label'",
            '{"prompt_ids": [], "chosen_ids": [5], "rejected_ids": [6]}': "'prompt_ids'",
            f'{{"chosen": [{USER}, {ANSWERED}, "rejected": [{ANSWERED}}}': "part at message 1",
            f'{{"chosen": [{USER}, {ANSWERED}, "rejected": [{TALK}]}}': "part at message 3",
            f'{{"chosen": [{TALK}], "rejected": [{TALK}]}}': "are the same messages",
            f'{{"chosen": [{ANSWERED}, "rejected": [{UNTRAINED}]}}': "need a prompt before them",
            f'{{"prompt": "x", "chosen": [{USER}, {ANSWERED}, "rejected": [{USER}, {WORSE}}}': (
                "rows.jsonl:1: chosen and rejected hold a prompt of"
            ),
            f'{{"prompt": [{USER}], "chosen": [], "rejected": [{ANSWERED}}}': "'chosen' must hold",
            f'{{"prompt": [{USER}], "chosen": [{ANSWERED}, "rejected": [{{"role": 1}}]}}': (
                "message 1 of column"
            ),
            f'{{"prompt": [{USER}], "completion": [{USER}], "label": true}}': "must begin",
            '{"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 1, "score_rejected": '
            '"x"}': "column 'score_rejected' must",
            IDS % 261: "column 'rejected_ids': got 261, expected numbers from 0 to 260",
            IDS % -1: "got -1, expected numbers from 0",
            IDS % "": "column 'rejected_ids' must hold a token or more",
            IDS % '"7"': "column 'rejected_ids' must hold a list of numbers",
            IDS % 6: "chosen and rejected are the same tokens",
            f"{IDS % 7}\n{PAIR}": ":2: expected rows like the first: pairs only",
            '{"prompt": "a"}': ":1: expected columns chosen and rejected",
            '{"prompt": "a ", "chosen": "c", "rejected": "c"}': "rows.jsonl:1: chosen and rejected",
            '{"prompt": "a ", "chosen": "b", "rejected": ""}': "column 'rejected' must hold a te",
            '{"prompt": "a ", "chosen": "b", "rejected": "c", "margin": -2}': "the chosen answer "
            "is worse than",
        },
    ),
    **contents("prefer --apply_chat_template", {IDS % 7: "rows with token ids have no turns"}),
    **contents("reward --apply_chat_template", {STEPS: "leave apply_chat_template and chat_temp"}),
    **contents(
        "reward",
        {
            "": "rows.jsonl holds no rows",
            f"{PAIR}\n{LABELLED}": ":2: expected rows like the first",
            '{"prompt": "a ", "chosen": "b", "rejected": "c", "margin": "2"}': "'margin'",
            '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1e999}': "rows.jsonl:1",
            '{"prompt": "a ", "chosen": "b", "rejected": "c", "score_chosen": 1, '
            '"score_rejected": 2}': "swap",
            '{"prompt": "a", "answers": ["b", "c"], "ranks": [1]}': "2 answers and 1 ranks",
            '{"prompt": "a", "answers": ["b", "c"], "ranks": [true, 2]}': "ranks must be",
            '{"prompt": "a", "answers": ["b", "c"], "ranks": [1, "2"]}': "ranks must be",
            '{"prompt": "a", "answers": ["b", "c"], "ranks": {"a": [1, 2]}}': "ranks must hold a "
            "list",
            '{"prompt": "a", "answers": ["b", "b"], "ranks": [1, 2]}': "the same tokens",
            '{"prompt": "a", "answers": ["b", ""], "ranks": [1, 2]}': "each of the answers",
            '{"prompt": null, "answers": ["b", "c"], "ranks": [1, 2]}': "must be a text after",
            '{"prompt": [{"role": "user"}], "answers": ["b", "c"], "ranks": [1, 2]}': "of column "
            "'prompt' must be an object with role and content",
            '{"prompt": "a", "answers": "b", "ranks": [1, 2]}': "must hold a list: got 'b'",
            '{"prompt": "a", "answers": ["b"], "ranks": [1]}': "expected two answers or more",
            '{"prompt": "a", "answers": ["b", "c"], "ranks": [1, NaN]}': "ranks must be finite",
            '{"prompt": "a", "completions": ["b", "c"], "labels": [true]}': "lists of one length",
            '{"prompt": "a", "completions": "b", "labels": [true]}': "lists of one length",
            '{"prompt": "a", "completions": [], "labels": []}': "texts that are not empty",
            '{"prompt": null, "completions": ["b"], "labels": [true]}': "prompt must be a text",
            '{"prompt": "a", "completions": ["b", "c"], "labels": [1, 0]}': "labels must be true "
            "or false",
            '{"prompt": "a", "completions": ["b", ""], "labels": [true, false]}': "not empty",
            '{"prompt_ids": [5], "response_ids": [6], "score": 0.5}': "--reward_loss mse",
            '{"prompt_ids": [5], "response_ids": [6], "score": "1"}': "'score'",
            '{"prompt_ids": [5], "response_ids": [6]}': "score is missing",
            '{"prompt_ids": [5], "response_ids": [6], "score": NaN}': "score is missing",
            '{"prompt_ids": [5], "response_ids": [6], "score": true}': "a finite number: got True",
            '{"prompt_ids": [5], "response_ids": [], "score": 1}': "must hold a token or more",
            '{"prompt_ids": [261], "response_ids": [6], "score": 1}': "got 261, expected numbers f",
            '{"prompt_ids": [0.5], "response_ids": [6], "score": 1}': "must hold a list of numbers",
            '{"text": "a"}': ":1: expected columns chosen and rejected",
            '{"prompt": "a ", "chosen": "c", "rejected": "c"}': "rows.jsonl:1: chosen and rejected "
            "are the same",
            '{"prompt": "a ", "chosen": "b", "rejected": "c", "margin": -1}': "rows.jsonl:1: the "
            "chosen answer is worse than the rejected one, by 1",
            '{"prompt": "a ", "completion": "b", "label": "yes"}': "column 'label' must be true or "
            "false",
            '{"prompt": "a ", "answers": ["b", "c"]}': "rows.jsonl:1: column 'ranks' must hold a "
            "list",
        },
    ),
    **contents(
        "reward --reward_heads a b",
        {
            '{"prompt": "a", "answers": ["b", "c"], "ranks": {"a": [1, 2]}}\n'
            f'{{"prompt": "a", "answers": ["b", "c"], "ranks": {ranks}}}': f"rows.jsonl:2 ... "
            f"{said}"
            for ranks, said in {
                "[1, 2]": "ranks must hold an object with ranks by name (a, b)",
                '{"c": [1, 2]}': "ranks must be of a, b: got c; name them in reward_heads",
                '{"a": null}': "ranks must be of a, b: got none",
                '{"a": [1, 2, 3]}': "got 2 answers and 3 ranks",
            }.items()
        },
    ),
}
LARGE = json.dumps(["large.png"] * 6)
IMAGE_PART = '{"input": [{"role": "user", "content": [{"type": "image"%s}]}]}'
MEDIA = {
    **contents(
        "train on images --apply_chat_template",
        {
            '{"input": "?", "images": "none.png"}': ":1: image 1: no file",
            '{"input": "?", "images": "cut.jpg"}': "cut.jpg is a damaged image",
            '{"input": "?", "images": "bomb.png"}': "bomb.png",
            '{"input": "?", "images": "text.png"}': "text.png is no image that can be read",
            '{"input": "?", "images": "text_bomb.png"}': "text_bomb.png is",
            '{"input": "?", "images": "https://example.org/a.png"}': "would have to be fetched",
            '{"input": "?", "images": "data:image/png;base64,???"}': "not valid base64",
            '{"input": "?", "images": 3}': "an image as path, bytes, base64 or a Pillow image, got "
            "int",
            '{"input": "?", "videos": "a.png"}': "has no frame rate",
            '{"input": "?", "videos": "many.png"}': "5000 frames of 8 x 8 pixels: expected at most "
            "4096 frames",
            f'{{"input": "?", "videos": [{{"frames": {LARGE}, "fps": 2}}]}}': "has 6 frames of 60"
            "0000000 pixels in all: expected at most 500000000",
            '{"input": "?", "videos": [{"path": "a.mp4"}]}': "no file ... a.mp4",
            '{"input": "?", "videos": "a.mp4"}': "no file ... a.mp4",
            '{"input": "<image><image>", "images": "a.png"}': "names 2 images",
            '{"input": "?", "videos": [{"frames": ["a.png", "a.png"]}]}': "fps must be",
            '{"input": "<image>?"}': ":1: the prompt names 1 images ... found columns input",
            '{"input": "<image>?", "images": []}': "names 1 images",
            '{"input": "<image>?", "images": null}': "images or image",
            '{"input": "<image>?", "images": [null]}': "names 1 images",
            '{"input": "<image>?", "images": ["a.png", "a.png"]}': "has 2 and 0",
            '{"input": "?", "image": "a.png", "images": "a.png"}': "both hold media",
            IMAGE_PART % "": ":1: the prompt names 1 images",
            IMAGE_PART % ', "image": "none.png"': "image 1: no file ... none.png",
            IMAGE_PART % ', "image": "a.png", "max_pixels": 9': "has max_pixels",
            IMAGE_PART % '}, {"type": "text", "text": "<image>?"': "names 2",
            IMAGE_PART % '}, {"type": "input_file", "input_file": "x"': "'input_file'",
            IMAGE_PART % '}, {"type": "image_url", "image_url": {"url": "https://x"}': "would have",
            IMAGE_PART.replace("]}]", ']}], "images": ["a.png"]') % ', "image": "a.png"': "names 1 "
            "images and 0 videos, and the row has 2",
            IMAGE_PART.replace("]}]", ']}], "images": ["a.png", "large.png"]')
            % ', "index": 1}, {"type": "image", "index": 0': "has the index 1",
            '{"input": "what is <|image_pad|> ?"}': ":1: the text of message 1 holds "
            "'<|image_pad|>'",
        },
    ),
    **contents(
        "train on images",
        {
            '{"input": "<image>?", "images": "a.png"}': "add --apply_chat",
            '{"input": "?", "images": "a.png"}': "0 places <|image_pad|>",
        },
    ),
    **contents(
        "train on texts --apply_chat_template",
        {IMAGE_PART % ', "image": "a.png"': ":1: a message has a part of type 'image'"},
    ),
    **contents(
        "train on images --apply_chat_template --limit_mm_image_per_prompt 1",
        {'{"input": "?", "images": ["a.png", "a.png"]}': "2 images, more than --limit_mm_image_"},
    ),
    **contents(
        "train on texts",
        {
            '{"input": "?", "images": "a.png"}': "--text_only",
            '{"input": "?", "audios": "a.wav"}': "--text_only",
        },
    ),
    **contents(
        "train on sounds --apply_chat_template --limit_mm_audio_per_prompt 1",
        {
            f'{{"input": "?", "audios": {audios}}}': said
            for audios, said in {
                '"none.wav"': ":1: audio 1: no file ... none.wav",
                '"empty.wav"': "empty.wav is an empty file",
                '"text.png"': "text.png is a damaged sound, or none",
                '"cut.wav"': "cut.wav is cut off: its header names 64044 bytes and",
                '"film.mp4"': "film.mp4 has no sound",
                '"long.wav"': "long.wav lasts more than 2.00 s: expected 0.1 to 2 s",
                '"short.wav"': "short.wav lasts 0.05 s: expected 0.1",
                '"nan.wav"': "nan.wav has samples that are not finite",
                '"https://example.org/a.wav"': "would have to be fetched",
                "3": "expected a sound as path, bytes or base64, got int",
                '{"rate": 3}': "a sound object needs bytes or path, found ['rate']",
                '{"array": [0.0], "sampling_rate": null}': "and a sampling_rate",
                json.dumps({"array": [2e4] * 9000, "sampling_rate": 16000}): "up to 20000",
                '["a.wav", "a.wav"]': "2 audios, more than --limit_mm_audio_per_prompt 1",
            }.items()
        },
    ),
    **contents(
        "train on sounds --apply_chat_template",
        {
            '{"input": "<audio><audio>?", "audios": "a.wav"}': "names 0 images and 0 videos and 2 "
            "audios, and the row has 0 and 0 and 1",
            '{"input": "<audio>?"}': "names 0 images and 0 videos and 1 audios",
            '{"input": "<|AUDIO|>?", "audios": "a.wav"}': "holds '<|AUDIO|>'",
            '{"input": "?", "images": "a.png"}': "models of type qwen2_audio read no images",
        },
    ),
}
IN_A_RUN = OPTIONS_OF_STAGES | ROWS_OF_STAGES
TABLE = BEFORE_A_RUN | IN_A_RUN | MEDIA


def write(folder, files):
    """Write files of these contents; None is a folder, a dictionary a header of weights."""
    for name, content in files.items():
        path = folder / name
        (path if content is None else path.parent).mkdir(exist_ok=True)
        if isinstance(content, dict):
            header = json.dumps(content).encode()
            content = len(header).to_bytes(8, "little") + header
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def write_inputs(folder):
    """Write what good command lines need, and a model that is none."""
    names = ("config.json", "tokenizer.json", "model.safetensors")
    write(folder, {**FILES, **{f"model/{name}": "{}" for name in names}})


def arguments(line):
    """Return the words behind `lightrft` of a line of the table."""
    line = re.sub(r"^(\w+=\S+ )+| \[no \w+\]$", "", line)
    start, *options = re.sub(r" without \w+", "", line).split(" --")
    left_out = re.findall(r" without (\w+)", line)
    by_name = {
        option.split(" ")[0]: option
        for option in f" {GOOD.get(start, '')}".split(" --")[1:]
        if option.split(" ")[0] not in left_out
    }
    by_name |= {option.split(" ")[0]: option for option in options}
    return shlex.split(" --".join([start.split(" on ")[0], *by_name.values()]))


def snapshot(folder):
    """Return the contents of all files by their paths; models are links."""
    return {
        str(path): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
        if not path.is_symlink() and "pycache" not in str(path)
    }


def matches(said, text):
    """Say whether a message is that of a row of the table."""
    if said.endswith("..."):
        return re.search(pattern_of(said), text, re.DOTALL)
    expected, lines = said.splitlines(), text.splitlines()
    return len(expected) == len(lines) and all(
        re.search(pattern_of(part), line) for part, line in zip(expected, lines, strict=True)
    )


def pattern_of(said):
    return ".*".join(re.escape(part.strip()) for part in said.split("..."))


def require(mistake, folder, capsys):
    """Check what comes of a mistake."""
    write(folder, mistake.files)
    before = snapshot(folder)
    # Not the time of a mistake: `test_a_mistake_needs_no_torch_to_be_found`.
    importlib.import_module("lightrft.run.assembly")
    capsys.readouterr()
    begin = time.process_time()
    code = main(arguments(mistake.line))
    # The time of this process, so that a busy machine changes nothing.
    assert time.process_time() - begin < 10
    out, text = capsys.readouterr()
    assert code == mistake.code, text
    # Some show rows, or the head of a table, before what is wrong.
    assert not out or re.match("data check|doctor", mistake.line)
    assert matches(mistake.said, text), text
    assert "hunter2" not in text
    assert all(line.startswith("lightrft") for line in text.splitlines())
    assert mistake.code == REWARD or "Traceback" not in text
    assert snapshot(folder) == before


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Hides what a launcher, or the run that made the models, has set; undoes what a run sets."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a model, data and a reward; a run in it would be an error."""
    monkeypatch.chdir(tmp_path)

    def refuse(*_, **more):
        raise AssertionError("a run was started")

    monkeypatch.setattr("lightrft.run.assembly.run_training", refuse)
    write_inputs(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", BEFORE_A_RUN)
def test_a_mistake_costs_one_clear_message_and_its_exit_code(folder, capsys, monkeypatch, line):
    if "CUDA_VISIBLE_DEVICES" in line and Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    for package in re.findall(r"\[no (\w+)\]", line):
        monkeypatch.setitem(sys.modules, package, None)
    with socket.create_server(("", 0)) as listener:
        taken = str(listener.getsockname()[1])
        for variable, value in re.findall(r"(?:^|(?<= ))([A-Z_]+)=(\S+)", line):
            monkeypatch.setenv(variable, value.replace("TAKEN", taken))
        require(TABLE[line], folder, capsys)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models of text and of images, and reward models: transformers', and one of ours."""
    from tests.models.vision.tiny_families import write_tiny_vision_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from lightrft.tools.model_presets import write_tiny_model
    from lightrft.tools.tiny_media_models import write_tiny_media_model

    folder = tmp_path_factory.mktemp("stages")
    write_tiny_model(folder / "model", "tiny-qwen3")
    write_tiny_vision_model(folder / "vision", "tiny-qwen2.5-vl", seed=0)
    write_tiny_media_model(folder / "hearing", "tiny-qwen2-audio")
    scorer = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    scorer.save_pretrained(folder / "scorer")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "scorer")
    tokenizer.add_tokens(["<tool>"])
    write_tiny_model(folder / "grown", "tiny-qwen3")
    tokenizer.save_pretrained(folder / "grown")
    write(folder, {"rows.jsonl": PAIR})
    with contextlib.chdir(folder):
        assert main(arguments("reward --reward_pooling attention")) == 0
        (folder / "run/model").rename("pooler")
    return folder


@pytest.fixture
def trained(tmp_path, models, monkeypatch):
    """A working directory with models and good rows."""

    monkeypatch.chdir(tmp_path)
    write(tmp_path, FILES)
    for link in ("model", "grown", "vision", "hearing", "scorer", "pooler"):
        (tmp_path / link).symlink_to(models / link)
    return tmp_path


@pytest.mark.parametrize("line", IN_A_RUN)
def test_a_mistake_that_a_run_finds_costs_one_line_and_writes_nothing(trained, capsys, line):
    mistake = TABLE[line]
    command = mistake.line.split(" ")[0]
    if command in GOOD_ROW:
        write(trained, {"rows.jsonl": f"{GOOD_ROW[command]}\n" * 2})
    require(mistake, trained, capsys)


@pytest.fixture
def media(trained, monkeypatch):
    """Return that directory with media; a strategy, which models need, would be an error."""
    from tests.datasets.media_files import write_bad_media, write_bad_sounds

    from lightrft.run import assembly

    def refuse(config):
        raise AssertionError("a strategy was made")

    monkeypatch.setattr(assembly, "get_strategy", refuse)
    write_bad_media(trained)
    write_bad_sounds(trained)
    return trained


@pytest.mark.parametrize("line", MEDIA)
def test_bad_media_end_a_run_in_one_line_before_any_model(media, capsys, line):
    require(TABLE[line], media, capsys)


@pytest.mark.parametrize(
    "row", ['{"input": "?", "images": "a.png"}', IMAGE_PART % ', "image": "a.png"']
)
def test_good_media_reach_the_strategy(media, capsys, row):
    write(media, {"rows.jsonl": f"{row}\n" * 16})
    assert main(arguments("train on images --apply_chat_template")) == 1
    assert "a strategy was made" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "train",
        "train --policy_loss here/loss.py:loss",  # which imports a file beside it
        "train without reward_fn --config reward.toml",  # where one reward is a text
        "train without reward_fn --reward_pretrain model",
        "train --reward_weights 1 2 --remote_rm_url http://h/x",
        "train --kl_horizon 5",  # without effect, which is an error under --strict alone
    ],
)
def test_good_input_reaches_the_run(folder, capsys, line):
    assert main(arguments(line)) == 1
    assert "a run was started" in capsys.readouterr().err


def test_without_deepspeed_fsdp2_is_taken_in_one_line(folder, capsys, monkeypatch):
    said_once.cache_clear()
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert main(arguments("train")) == 1
    err = capsys.readouterr().err
    assert "a run was started" in err
    assert err.count("FSDP2 trains, as with --fsdp: DeepSpeed is not installed") == 1


def test_the_table_has_rows_of_every_kind():
    assert len(TABLE) >= 400
    assert {mistake.code for mistake in TABLE.values()} == {USAGE, PREFLIGHT, DATA, REWARD}
    for command in GOOD:
        assert sum(line.startswith(command) for line in TABLE) >= 2, command


def codes_without_torch():
    """Return the exit code of each mistake, and whether torch was imported by then."""
    codes = {}
    for line, mistake in WITHOUT_TORCH.items():
        write(Path(), mistake.files)
        codes[line] = (main(arguments(mistake.line)), "torch" in sys.modules)
    return codes


@pytest.mark.full
def test_a_mistake_needs_no_torch_to_be_found(tmp_path):
    write_inputs(tmp_path)
    program = "import json, tests.cli.test_wrong_inputs as table\n"
    program += "print(json.dumps(table.codes_without_torch()))"
    done = run_python("-c", program, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    codes = json.loads(done.stdout.splitlines()[-1])
    assert codes == {line: [mistake.code, False] for line, mistake in WITHOUT_TORCH.items()}


AT_THE_SHELL = ("train --gamma nan", "train --prompt_data none.jsonl", "trian")
AT_THE_SHELL += ("train --reward_fn reward.py:ff", "train --max_len 10")


@pytest.mark.parametrize("line", AT_THE_SHELL)
def test_the_same_at_the_shell(folder, line):
    done = run_python("-m", "lightrft.cli.main", *arguments(line), cwd=folder)
    assert (done.returncode, done.stdout) == (TABLE[line].code, "")
    assert matches(TABLE[line].said, done.stderr), done.stderr
