"""Every mistake gets its exit code and a message that names culprit and remedy, before any model.

One table: configuration, data, reward code, environment, other commands.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.machine import seconds

from lightrft.cli import train as train_command
from lightrft.cli.main import main
from lightrft.config.other_names import said_once

USAGE, PREFLIGHT, DATA, REWARD = 2, 3, 4, 5
ENVIRONMENT = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_ERROR_FILE",
    "LIGHTRFT_LAUNCHED",
    "CUDA_VISIBLE_DEVICES",
    "WANDB_API_KEY",
    "WANDB_MODE",
    "NETRC",
)
GOOD = "def f(responses):\n    return [0.0 for _ in responses]\n"
CUT = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
HUGE = {"w": {"dtype": "F32", "shape": [10**8, 10**8], "data_offsets": [0, 0]}}
"""Header of a model that fits on no disk."""


@dataclass(frozen=True)
class Wrong:
    """One mistake.

    Args:
        code: Exit code.
        expected: Parts of the message: what is wrong, and what to do.
        options: Flags of `lightrft train` beside good ones; None drops one.
        files: Contents by name.
        environment: Variables.
        argv: Instead of `lightrft train`.
        num_lines: Of the message.
        absent: A package to be missing.
    """

    code: int
    expected: tuple[str, ...]
    options: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    num_lines: int | None = 1
    absent: str | None = None


def usage(*expected, num_lines=1, **options):
    return Wrong(USAGE, expected, options, num_lines=num_lines)


def data(name, content, *expected, flag="prompt_data", **options):
    files = {} if content is None else {name: content}
    return Wrong(DATA, (name, *expected), {flag: name, **options}, files)


def reward(code, source, *expected, function="f", **options):
    spelling = f"wrong.py:{function}"
    return Wrong(
        code,
        ("wrong.py", *expected),
        {"reward_fn": spelling, **options},
        {"wrong.py": source},
        num_lines=None,
    )


def here(*expected, environment=None, absent=None, files=None, num_lines=1, **options):
    return Wrong(
        PREFLIGHT,
        expected,
        options,
        files or {},
        environment or {},
        absent=absent,
        num_lines=num_lines,
    )


def command(*argv, expected, num_lines=1):
    return Wrong(USAGE, expected, argv=argv, num_lines=num_lines)


CONFIGURATION = {
    "no model": usage("--pretrain is missing", "init-model", pretrain=None),
    "no data": usage("--prompt_data is missing", "JSONL", prompt_data=None),
    "no reward": usage("--reward_fn is missing", "boxed_math", reward_fn=None),
    "absent model": usage("--pretrain", "nowhere", pretrain="nowhere"),
    "absent path": usage("--pretrain", "/no/where", pretrain="/no/where"),
    "absent critic": usage("--critic_pretrain", critic_pretrain="x", advantage_estimator="gae"),
    "unknown flag": usage("unknown option 'foo'; lightrft train --help_all lists all", foo="1"),
    "misspelt flag": usage("did you mean rollout_batch_size", rollout_batchsize="1"),
    "unavailable": usage("load_in_4bit is not available", "quantised", load_in_4bit="1"),
    "replaced": usage("flash_attn is not available", "scaled_dot_product", flash_attn="1"),
    "estimator": usage("advantage_estimator", "'grpoo'", "'grpo'", advantage_estimator="grpoo"),
    "engine": usage("engine_type", "'vlm'", "did you mean 'vllm'", engine_type="vlm"),
    "loss": usage("policy_loss", "'pp'", "'ppo'", policy_loss="pp"),
    "schedule": usage("lr_scheduler", "'cosine'", "linear", lr_scheduler="cosine"),
    "aggregation": usage("loss_agg_mode", "token-mean", loss_agg_mode="token_mean"),
    "stage": usage("zero_stage", "4", zero_stage="4"),
    "batches": usage(
        "10 * 8 = 80",
        "128",
        "train_batch_size: 80",
        "rollout_batch_size: 16",
        rollout_batch_size="10",
    ),
    "micro batch": usage("3 * 1 = 3", "micro_train_batch_size: 2 or 4", micro_train_batch_size="3"),
    "negative": usage("rollout_batch_size", "-16", ">= 1", rollout_batch_size="-16"),
    "zero": usage("train_batch_size", "0", ">= 1", train_batch_size="0"),
    "length": usage("generate_max_len", "-1", generate_max_len="-1"),
    "fraction": usage("max_steps", "'1.5'", max_steps="1.5"),
    "text for number": usage("actor_learning_rate", "'fast'", actor_learning_rate="fast"),
    "temperature": usage("temperature", ">= 1e-05", temperature="0"),
    "tiny temperature": usage("temperature", ">= 1e-05", temperature="1e-320"),
    "tiny first temperature": usage(
        "first_token_temperature", ">= 1e-05", use_fire="", first_token_temperature="1e-9"
    ),
    "share": usage("lr_warmup_ratio", "<= 1", lr_warmup_ratio="3"),
    "off with 0": usage("save_steps", "-1 (off)", save_steps="0"),
    "kl of the loss": usage(
        "kl_estimator k3 is for the loss", "add use_kl_loss", init_kl_coef="0.1", kl_estimator="k3"
    ),
    "one sample": usage(
        "n_samples_per_prompt >= 2", n_samples_per_prompt="1", train_batch_size="16"
    ),
    "no processes": usage("--nproc_per_node", "'0'", "1", nproc_per_node="0"),
    "three processes": usage(
        "3 processes",
        "15 or 18",
        nproc_per_node="3",
        n_samples_per_prompt="3",
        train_batch_size="24",
    ),
    "parallel size": usage("engine_tp_size", "4 and 2", nproc_per_node="2", engine_tp_size="4"),
    "absent file": usage("--config", "none.toml", config="none.toml"),
    "system prompt": usage("system_prompt", "apply_chat_template", system_prompt="x"),
    "template": usage("input_template", "{}", input_template="x"),
    "stop": Wrong(
        USAGE,
        ("stop", "empty"),
        argv=("train", "--fsdp", "--pretrain", "model", "--stop", ""),
    ),
    "range": usage("policy_loss gmpo has no clip range", policy_loss="gmpo", eps_clip="0.3"),
    "dual clip": usage("dual clip", "dual_clip", policy_loss="gspo", dual_clip="3"),
    "correction": usage("correction_high", "off_policy_correction", correction_high="2"),
    "truncated": usage(
        "top_p", "correction", off_policy_correction="tis", top_p="0.9", use_fire=""
    ),
    "weights": usage("reward_weights", "2 numbers for 1 rewards", reward_weights="1 2"),
    "frozen": usage("freezing_actor_steps", "gae", freezing_actor_steps="3"),
    "two losses": usage("different policy losses", use_gspo="", use_cpg_loss=""),
    "used folder": usage("--output_dir", "used", "another run", output_dir="used"),
    "no effect": usage("kl_horizon acts only with kl_target", kl_horizon="5", strict=""),
    "toml": Wrong(
        USAGE, ("run.toml", "line 1"), {"config": "run.toml"}, {"run.toml": "temperature = \n"}
    ),
    "toml key": Wrong(
        USAGE,
        ("run.toml", "'temprature'", "temperature"),
        {"config": "run.toml"},
        {"run.toml": "temprature = 1\n"},
    ),
    "toml type": Wrong(
        USAGE, ("max_steps", "'many'"), {"config": "run.toml"}, {"run.toml": "max_steps = 'many'\n"}
    ),
    "toml list": Wrong(
        USAGE,
        ("reward_fn", "got 3", "tuple"),
        {"config": "list.toml", "reward_fn": None},
        {"list.toml": "reward_fn = 3\n"},
    ),
    "model without tokenizer": Wrong(
        USAGE,
        ("no tokenizer", "half", "tokenizer.json"),
        {"pretrain": "half"},
        {"half/config.json": "{}", "half/model.safetensors": "{}"},
    ),
    "adapters alone as the model": Wrong(
        USAGE,
        ("--pretrain", "ad holds adapters alone", "merged"),
        {"pretrain": "ad"},
        {"ad/adapter_config.json": "{}", "ad/adapter_model.safetensors": "{}"},
    ),
    "adapters without a rank": usage("lora_path needs lora_rank", "adapter_config", lora_path="ad"),
    "words without an option": Wrong(
        USAGE,
        ("unexpected 'model', 'good.jsonl'", "--NAME VALUE", "lightrft train --help"),
        argv=("train", "model", "good.jsonl"),
    ),
    "one dash": Wrong(
        USAGE,
        ("unexpected '-pretrain', 'model'", "--NAME VALUE"),
        argv=("train", "-pretrain", "model"),
    ),
    "a switch with a value": Wrong(
        USAGE, ("unexpected 'yes'", "a switch --NAME or --no_NAME"), {"bf16": "yes"}
    ),
    "both names": Wrong(
        USAGE,
        ("--model and --pretrain are one option: give one of them",),
        {"model": "model"},
        num_lines=2,
    ),
    "no_ of what is no switch": usage("'no_temperature'", "temperature", no_temperature=""),
    **{
        f"named {name}": usage(f"unknown option '{name}'; here it is {there},", **{name: "4"})
        for name, there in (
            ("beta", "init_kl_coef"),
            ("per_device_train_batch_size", "micro_train_batch_size"),
            ("gradient_accumulation_steps", "train_batch_size"),
            ("warmup_steps", "lr_warmup_ratio"),
            ("optim", "adam_8bit"),
        )
    },
    "a comma in a number": usage("actor_learning_rate", "'1,0e-6'", actor_learning_rate="1,0e-6"),
    "percent": usage("engine_mem_util", "'80%'", engine_mem_util="80%"),
    "a share in percent": usage("engine_mem_util", "80.0", "<= 1", engine_mem_util="80"),
    "min_p of sglang": usage("min_p", "sglang", "top_p", min_p="0.1", engine_type="sglang"),
    "cut weights": Wrong(
        USAGE,
        ("--pretrain", "cut/model.safetensors is cut", "get it again"),
        {"pretrain": "cut"},
        {"cut/config.json": "{}", "cut/tokenizer.json": "{}", "cut/model.safetensors": CUT},
    ),
    "model without weights": Wrong(
        USAGE,
        ("no weights", "safetensors"),
        {"pretrain": "bare"},
        {"bare/config.json": "{}", "bare/tokenizer.json": "{}"},
    ),
}
FILES = {
    "absent": data("none.jsonl", None, "none.jsonl"),
    "broken": data("broken.jsonl", '{"input": "a"}\n{"input": \n', "broken.jsonl:2", "JSON"),
    "list": data("list.jsonl", "[1]\n", "list.jsonl:1", "object"),
    "other key": data("o.jsonl", '{"input": "a"}\n{"question": "b"}\n', "o.jsonl:2", "--input_key"),
    "null": data("null.jsonl", '{"input": null}\n', "null.jsonl:1", "'input'"),
    "blank": data("blank.jsonl", '{"input": " "}\n', "blank.jsonl:1", "empty"),
    "empty": data("empty.jsonl", "", "no rows"),
    "latin": data("latin.jsonl", b'{"input": "\xe9"}\n', "latin.jsonl:1", "UTF-8"),
    "tsv": data("data.tsv", "input\na\n", ".jsonl"),
    "single": data("single.json", '{"input": "a"}', "list"),
    "parquet": data("no.parquet", "text", "no.parquet"),
    "no label": data(
        "no.jsonl",
        '{"input": "a", "label": "1"}\n{"input": "b"}\n{"input": "c"}\n',
        "no.jsonl:2",
        "no label: set --label_key (and 1 rows more)",
        reward_fn="boxed_math",
    ),
    "an object as label": data(
        "ob.jsonl",
        '{"input": "a", "label": {"x": 1}}',
        "ob.jsonl:1",
        "got an object",
        reward_fn="boxed_math",
    ),
    "eval absent": data("none.jsonl", None, "none.jsonl", flag="eval_data"),
    "eval broken": data("broken.jsonl", "{\n", "broken.jsonl:1", "JSON", flag="eval_data"),
    "eval key": data(
        "o.jsonl", '{"question": "b"}\n', "o.jsonl:1", "--input_key", flag="eval_data"
    ),
}
REWARDS = {
    "unknown": usage("'gsm8'", "did you mean gsm8k", reward_fn="gsm8"),
    "absent file": usage("nofile.py:f", "no file", reward_fn="nofile.py:f"),
    "no function": usage("reward.py:reward", "FILE.py:FUNCTION", reward_fn="reward.py"),
    "misspelt": reward(
        USAGE, "def score(responses): return []\n", "'scor'", "did you mean score", function="scor"
    ),
    "syntax": reward(REWARD, "def f(responses:\n", "SyntaxError", "line 1"),
    "import": reward(REWARD, "import no_such_module\n" + GOOD, "No module named", "line 1"),
    "raises": reward(REWARD, "raise ValueError('broken at once')\n", "broken at once", "line 1"),
    "exits": reward(REWARD, "raise SystemExit(0)\n", "SystemExit"),
    "signature": reward(REWARD, "def f(texts): return []\n", "argument responses", "(texts)"),
    "positional": reward(REWARD, "def f(responses, /): return []\n", "keyword argument"),
    "column": reward(
        REWARD,
        "def f(responses, answer): return []\n",
        "'answer'",
        "no column of the data: its columns are input, label, beside prompts",
        "rename it",
    ),
    **{
        f"returns {name}": reward(
            REWARD, f"def f(responses): return {result}\n", "wrong.py:f failed", expected
        )
        for name, result, expected in (
            ("nothing", "None", "expected a list of 4 numbers or dicts, got NoneType"),
            ("nan", "[float('nan')] * 4", "result 0: expected a finite number, got nan"),
            ("texts", "['a'] * 4", "result 0: expected a number, got 'a'"),
            ("too few", "[1.0]", "expected one result per response, 4 in all, got 1"),
            ("a number", "1.0", "expected a list of 4 numbers or dicts, got float"),
            ("texts in dicts", "[{'a': 'x'}] * 4", "key 'a': expected a number, got 'x'"),
        )
    },
    "fails on a text": reward(
        REWARD, "def f(responses): return [1 / 0 for _ in responses]\n", "division by zero"
    ),
    "environments of TRL": reward(
        REWARD,
        "def f(completions, environments): return [e.score for e in environments]\n",
        "'environments'",
        "train with --environment",
    ),
    "tokens of TRL": reward(
        REWARD,
        "def f(completions, completion_ids): return [len(c) for c in completion_ids]\n",
        "'completion_ids'",
        "a parameter responses",
    ),
    "address": usage("remote_rm_url", "http://HOST:PORT", reward_fn=None, remote_rm_url="host:1"),
    "half an address": usage(
        "remote_rm_url",
        "http://[::1",
        "http://HOST:PORT",
        reward_fn=None,
        remote_rm_url="http://[::1",
    ),
    "secret address": usage(
        "remote_rm_url", "***@host", reward_fn=None, remote_rm_url="ftp://me:hunter2@host"
    ),
}
MACHINE = {
    "half launched": here("RANK is set", "WORLD_SIZE", "torchrun", environment={"RANK": "0"}),
    "wrong rank": here(
        "RANK='x'",
        "whole numbers",
        environment={
            "RANK": "x",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "h",
            "MASTER_PORT": "1",
        },
    ),
    "rank too high": here(
        "below WORLD_SIZE",
        "2 and 2",
        environment={
            "RANK": "2",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "h",
            "MASTER_PORT": "1",
        },
    ),
    "port": here("MASTER_PORT='high'", "unset", environment={"MASTER_PORT": "high"}),
    "port range": here("MASTER_PORT='99999'", "unset", environment={"MASTER_PORT": "99999"}),
    "port taken": here("cannot be used", "unset it", environment={"MASTER_PORT": "TAKEN"}),
    "no gpu": here("CUDA_VISIBLE_DEVICES=0", "unset", environment={"CUDA_VISIBLE_DEVICES": "0"}),
    "no vllm": here(
        "--engine_type",
        "not installed",
        "install lightrft[vllm]",
        engine_type="vllm",
        absent="vllm",
    ),
    "no sglang": here("--engine_type", "not installed", engine_type="sglang", absent="sglang"),
    "no deepspeed": here(
        "--zero_stage", "package deepspeed", "--fsdp", zero_stage="3", absent="deepspeed"
    ),
    "fsdp refused": here("--no_fsdp", "lightrft[deepspeed]", no_fsdp="", absent="deepspeed"),
    "no tensorboard": here(
        "--use_tensorboard",
        "lightrft[tensorboard]",
        use_tensorboard="",
        absent="tensorboard",
    ),
    "no wandb": here(
        "--use_wandb",
        "lightrft[wandb]",
        use_wandb="",
        absent="wandb",
        environment={"WANDB_MODE": "offline"},
    ),
    "no key": here(
        "--use_wandb", "WANDB_API_KEY", "offline", use_wandb="", environment={"NETRC": "/no/netrc"}
    ),
    "no matplotlib": here(
        "--plot_every", "leave plot_every at -1", plot_every="1", log_dir="l", absent="matplotlib"
    ),
    "no trackio": here("--loggers trackio", "pip install trackio", loggers="trackio"),
    "no peft": here("--lora_rank", "lightrft[lora]", lora_rank="8", absent="peft"),
    "folder in file": here(
        "--output_dir",
        "reward.py is a file",
        output_dir="reward.py/run",
        ckpt_path="c",
        save_path="m",
    ),
    "no disk": here("--output_dir", "/proc is no disk", output_dir="/proc/x", num_lines=3),
    "full disk": here(
        "--output_dir",
        "GB free",
        "another folder",
        pretrain="huge",
        num_lines=2,
        files={
            "huge/config.json": "{}",
            "huge/tokenizer.json": "{}",
            "huge/model.safetensors": HUGE,
        },
    ),
}
TEXT_FOR_NUMBER = "rollout_batch_size = '4'\n"
NUMBERS = {
    **{
        f"{name} {value}": usage(name, value, "expected", **{name: value, **more})
        for name, value, more in (
            ("actor_learning_rate", "nan", {}),
            ("actor_learning_rate", "1e+308", {}),
            ("critic_learning_rate", "nan", {}),
            ("eps_clip", "nan", {}),
            ("eps_clip_low", "nan", {}),
            ("temperature", "inf", {}),
            ("gamma", "nan", {}),
            ("lambd", "nan", {}),
            ("init_kl_coef", "nan", {}),
            ("init_kl_coef", "inf", {}),
            ("kl_target", "inf", {}),
            ("reward_clip", "nan", {}),
            ("entropy_coef", "inf", {}),
            ("l2", "nan", {}),
            ("max_norm", "nan", {}),
            ("max_ckpt_mem", "nan", {}),
            ("timeout_minutes", "inf", {}),
            ("timeout_minutes", "1e+300", {}),
            ("reward_timeout_seconds", "1e+300", {}),
            ("heartbeat_seconds", "1e+300", {}),
            ("alarm_kl", "nan", {}),
            ("peak_tflops", "nan", {}),
            ("lora_alpha", "inf", {"lora_rank": "2"}),
            ("reward_weights", "nan", {}),
            ("prompt_data_probs", "inf", {}),
        )
    },
    "overflow": usage("temperature", "got inf", temperature="1e400"),
    "loss argument": usage(
        "policy_loss_args: tau_positive: got inf",
        "finite",
        policy_loss="sapo",
        policy_loss_args="tau_positive=inf",
    ),
    "estimator argument": usage("advantage_args: x: got nan", advantage_args="x=nan"),
    "correction argument": usage(
        "correction_args: high: got inf", correction_args="high=inf", off_policy_correction="tis"
    ),
    "reward argument": usage("reward_args: bonus: got nan", reward_args="bonus=nan"),
    "engine argument": usage("engine_args: x: got inf", engine_arg="x=inf"),
    "one beta": usage("adam_betas", "nan", adam_betas="nan 0.9", num_lines=2),
    "long seed": usage("seed", "64 bits", seed="9" * 25),
    "five thousand digits": usage("max_steps", "999 ...", max_steps="9" * 5000),
    "enormous train batch": usage(
        "train_batch_size 100000000", "128", train_batch_size="100000000"
    ),
    "enormous rollout": usage("100000000 * 8", "10000000", rollout_batch_size="100000000"),
    "enormous group": usage("16 * 100000000", "10000000", n_samples_per_prompt="100000000"),
    "enormous world": usage("processes", num_lines=2, nproc_per_node="100000000"),
    "short context": usage("max_len must hold", "10 and 1024 + 1024", max_len="10"),
    "no room for a prompt": Wrong(
        USAGE,
        ("generate_max_len", "1024", "64 positions of few"),
        {"pretrain": "few"},
        {
            "few/config.json": b'{"max_position_embeddings": 64}',
            "few/tokenizer.json": "{}",
            "few/model.safetensors": "{}",
        },
    ),
    "reward model": usage("--reward_pretrain", "nowhere", reward_pretrain="nowhere"),
    "blank folder": Wrong(
        USAGE,
        ("output_dir: got ' '", "the path of a folder"),
        {"config": "t.toml"},
        {"t.toml": "output_dir = ' '\n"},
    ),
    "nul": usage("output_dir", "NUL", output_dir="a\0b"),
    "long name": usage("File name too long", critic_pretrain="9" * 5000, advantage_estimator="gae"),
    "surrogate": usage("wandb_org", "UTF-8", wandb_org="\ud800"),
    "toml number as text": Wrong(
        USAGE,
        ("rollout_batch_size: got '4' (str)", "int"),
        {"config": "t.toml", "rollout_batch_size": None},
        {"t.toml": TEXT_FOR_NUMBER},
    ),
    "toml nan": Wrong(
        USAGE, ("gamma: got nan",), {"config": "t.toml"}, {"t.toml": "gamma = nan\n"}
    ),
    "toml digits": Wrong(
        USAGE,
        ("t.toml", "not a TOML file"),
        {"config": "t.toml"},
        {"t.toml": "seed = " + "9" * 5000},
    ),
    "toml depth": Wrong(
        USAGE,
        ("t.toml", "not a TOML file"),
        {"config": "t.toml"},
        {"t.toml": "seed = " + "[" * 10**5},
    ),
    "toml table": Wrong(
        USAGE,
        ("unknown option 'run'", "it is a table", "top level"),
        {"config": "t.toml"},
        {"t.toml": "[run]\nmax_steps = 3\n"},
    ),
    "yaml": Wrong(
        USAGE,
        ("YAML is not read", "name = value", "as lightrft config show prints them"),
        {"config": "t.yaml"},
        {"t.yaml": "seed: 3\n"},
    ),
    "toml bytes": Wrong(
        USAGE, ("t.toml", "not a TOML file"), {"config": "t.toml"}, {"t.toml": b"seed = '\xff'\n"}
    ),
}
ROWS = {
    "surrogate": data("s.jsonl", '{"input": "a\\ud800b"}\n', "s.jsonl:1", "surrogate"),
    "deep": data("deep.jsonl", '{"input": ' + "[" * 10**5 + "]" * 10**5 + "}", "nested deeper"),
    "rather deep": data(
        "r.jsonl",
        '{"input": "a", "label": ' + "[" * 200 + "]" * 200 + "}",
        "r.jsonl:1",
        "100 levels",
    ),
    "digits": data("d.jsonl", '{"input": "a", "label": ' + "9" * 5000 + "}", "d.jsonl:1", "digits"),
    "deep file": data("deep.json", "[" * 10**5 + "]" * 10**5, "deep.json", "nested deeper"),
    "digits in a file": data("d.json", "[" + "9" * 5000 + "]", "d.json", "digits"),
    "number": data("n.jsonl", "7\n", "n.jsonl:1", "a number"),
    "binary": data("b.jsonl", bytes(range(256)), "b.jsonl:1"),
    "utf-16": data("u.jsonl", '{"input": "a"}'.encode("utf-16"), "u.jsonl:1"),
    "messages": data(
        "m.jsonl", '{"input": [{"role": "user"}]}', "m.jsonl:1", "role", apply_chat_template=""
    ),
    "empty list": data("e.jsonl", '{"input": []}', "e.jsonl:1"),
    "number as prompt": data("p.jsonl", '{"input": 3}', "p.jsonl:1", "int"),
    "cut parquet": data("c.parquet", b"PAR1\0\0", "c.parquet"),
    "checked surrogate": Wrong(
        DATA,
        (),
        argv=("data", "check", "s.jsonl"),
        num_lines=None,
        files={"s.jsonl": '{"input": "a\\ud800b"}\n'},
    ),
    "checked digits": Wrong(
        DATA,
        (),
        argv=("data", "check", "d.json"),
        num_lines=None,
        files={"d.json": "[" + "9" * 5000 + "]"},
    ),
    "checked depth": Wrong(
        DATA,
        (),
        argv=("data", "check", "deep.json"),
        num_lines=None,
        files={"deep.json": "[" * 10**5 + "]" * 10**5},
    ),
}
PLUG_INS = {
    "annotation": Wrong(
        USAGE,
        ("policy_loss", "no gradient flows"),
        {"policy_loss": "l.py:f"},
        {"l.py": "def f(a, b, c, d, *, x: '1 +' = 1.0):\n    return -c\n"},
        num_lines=None,
    ),
    "syntax": Wrong(
        USAGE,
        ("l.py cannot be imported: SyntaxError",),
        {"policy_loss": "l.py:f"},
        {"l.py": "def f(:\n"},
    ),
    "long message": Wrong(
        USAGE,
        ("l.py cannot be imported: ValueError: a b",),
        {"policy_loss": "l.py:f"},
        {"l.py": "raise ValueError('a\\nb')\n"},
    ),
    "exit": Wrong(
        USAGE,
        ("l.py cannot be imported: SystemExit",),
        {"policy_loss": "l.py:f"},
        {"l.py": "raise SystemExit(3)\n"},
    ),
    "no sibling": Wrong(
        USAGE,
        ("No module named 'no_such_sibling'",),
        {"policy_loss": "l.py:f"},
        {"l.py": "import no_such_sibling\n"},
    ),
    "estimator": Wrong(
        USAGE, ("l.py has no 'g'",), {"advantage_estimator": "l.py:g"}, {"l.py": "x = 1\n"}
    ),
    "no function": usage("policy loss", ".py cannot be imported", policy_loss=".py:f"),
}
COMMANDS = {
    "command": command("trian", expected=("unknown command 'trian'", "train")),
    "command of other case": command("Train", expected=("did you mean train",)),
    "command with a dash": command("quick-start", expected=("did you mean quickstart",)),
    "folder of a run": command("init-run", "model", expected=("model is not empty",)),
    "launch of nothing": command("launch", expected=("nothing was given", "expected slurm")),
    "launch of something": command("launch", "pbs", expected=("got 'pbs'", "kubernetes")),
    "plan of nothing": command(
        "plan", "--pretrain", "nowhere", expected=("'nowhere': give a model directory",)
    ),
    "nothing to evaluate": command("eval", expected=("MODEL", "lightrft eval --help")),
    "no folder": command("init-model", expected=("DIR",)),
    "preset": command("init-model", "new", "--preset", "tiny", expected=("'tiny'", "tiny-qwen3")),
    "shape": command("init-model", "new", "--shape", "qwen3-4", expected=("'qwen3-4'", "qwen3-4b")),
    "two kinds": command(
        "init-model", "new", "--shape", "qwen3-4b", "--preset", "tiny-llama", expected=("--preset",)
    ),
    "lengths of a vision model": command(
        "init-model",
        "new",
        "--preset",
        "tiny-qwen2.5-vl",
        "--lengths",
        "9",
        expected=("--lengths", "tiny-qwen2.5-vl"),
    ),
    "lengths": command(
        "init-model", "new", "--shape", "qwen3-4b", "--lengths", "200000", expected=("151936",)
    ),
    "full folder": command("init-model", "model", expected=("model is not empty",)),
    "file": command("init-model", "reward.py", expected=("reward.py is a file",)),
    "seed": command("init-model", "new", "--seed", "-1", expected=("--seed", "'-1'")),
    "algorithm": command("quickstart", "--algorithm", "gpro", expected=("--algorithm", "grpo")),
    "strategy": command("quickstart", "--strategy", "ddp", expected=("'ddp'", "fsdp")),
    "steps": command("quickstart", "--steps", "0", expected=("--steps", "'0'")),
    "used": command("quickstart", "--output_dir", "model", expected=("model is not empty",)),
    "flag": command("quickstart", "--stepz", "3", expected=("--stepz",)),
    "threshold": command("eval", "model", "--threshold", "nan", expected=("--threshold", "nan")),
    "compared text": Wrong(
        USAGE,
        ("rollout_batch_size: got '4' (str)",),
        num_lines=2,
        argv=("config", "diff", "t.toml", "t.toml"),
        files={"t.toml": TEXT_FOR_NUMBER},
    ),
    "shown text": Wrong(
        USAGE,
        ("rollout_batch_size: got '4' (str)",),
        argv=("config", "show", "--config", "t.toml"),
        files={"t.toml": TEXT_FOR_NUMBER},
    ),
    "shown processes": command(
        "config",
        "show",
        "--nproc_per_node",
        "7",
        num_lines=2,
        expected=("rollout_batch_size", "7 processes"),
    ),
    "checked address": command(
        "data",
        "check",
        "good.jsonl",
        "--remote_rm_url",
        "http://[::1",
        expected=("remote_rm_url", "http://[::1"),
    ),
    "no run": command("report", "nowhere", expected=("nowhere", "--output_dir")),
    "null in a folder": command("init-model", "a\0b", expected=("a\\x00b", "null byte")),
    "folder in proc": command("quickstart", "--output_dir", "/proc/xx", expected=("/proc/xx",)),
    **{
        f"plan of {name}": Wrong(
            USAGE,
            ("m/config.json", part),
            argv=("plan", "--pretrain", "m"),
            files={"m/config.json": content},
        )
        for name, content, part in (
            ("a list", "[]", "an object"),
            ("depth", "[" * 10**5, "nested deeper"),
            ("bytes", b"\xff\xfe{}", "not UTF-8"),
        )
    },
    "nothing to export": command("export", "nowhere", "new", expected=("nowhere", "--output_dir")),
}
TABLE = {
    f"{group}: {name}": wrong
    for group, rows in (
        ("configuration", CONFIGURATION),
        ("data", FILES),
        ("reward", REWARDS),
        ("machine", MACHINE),
        ("command", COMMANDS),
        ("number", NUMBERS),
        ("row", ROWS),
        ("plug-in", PLUG_INS),
    )
    for name, wrong in rows.items()
}


def test_the_table_has_at_least_a_hundred_rows_of_every_kind():
    assert len(TABLE) >= 150
    assert {wrong.code for wrong in TABLE.values()} == {USAGE, PREFLIGHT, DATA, REWARD}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a model, data and a reward; a run in it would be an error."""
    monkeypatch.chdir(tmp_path)
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")  # so that what a run sets is undone afterwards
        monkeypatch.delenv(name)

    def refuse(*_, **more):
        raise AssertionError("a run was started")

    monkeypatch.setattr(train_command, "train", refuse)
    write_inputs(tmp_path)
    return tmp_path


def write_inputs(folder):
    rows = [{"input": f"{n}+1?", "label": str(n + 1)} for n in range(4)]
    write(folder / "good.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    write(folder / "reward.py", GOOD)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        write(folder / "model" / name, "{}")
    write(folder / "used" / "metrics.jsonl", "{}")


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, dict):  # the header of a safetensors file
        header = json.dumps(content).encode()
        content = len(header).to_bytes(8, "little") + header
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def arguments(wrong):
    if wrong.argv:
        return list(wrong.argv)
    options = {
        "pretrain": "model",
        "prompt_data": "good.jsonl",
        "reward_fn": "reward.py:f",
        "rollout_batch_size": "16",
        **wrong.options,
    }
    given = [(f"--{name}", *value.split(" ")) for name, value in options.items() if value]
    given += [(f"--{name}",) for name, value in options.items() if value == ""]
    return ["train", *(word for pair in given for word in pair)]


def test_good_input_reaches_the_run(folder, capsys):
    assert main(arguments(Wrong(0, ()))) == 1
    assert "a run was started" in capsys.readouterr().err


@pytest.mark.parametrize("name", TABLE)
def test_a_mistake_costs_one_clear_message_and_its_exit_code(folder, capsys, monkeypatch, name):
    wrong = TABLE[name]
    if "no gpu" in name and Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    for path, content in wrong.files.items():
        write(folder / path, content)
    if wrong.absent is not None:
        monkeypatch.setitem(sys.modules, wrong.absent, None)
    with socket.create_server(("", 0)) as listener:
        taken = str(listener.getsockname()[1])
        for variable, value in wrong.environment.items():
            monkeypatch.setenv(variable, value.replace("TAKEN", taken))
        before = sorted(path.name for path in folder.rglob("*"))
        # Not the time of a mistake: `test_no_other_mistake_needs_torch_to_be_found`.
        importlib.import_module("torch")
        begin = time.process_time()
        code = main(arguments(wrong))
        # Of this process, so that a busy machine changes nothing.
        assert time.process_time() - begin < 10
    text = capsys.readouterr().err
    assert code == wrong.code, text
    for part in wrong.expected:
        assert part in text, text
    assert "hunter2" not in text
    lines = text.splitlines()
    assert all(line.startswith("lightrft") for line in lines)
    assert wrong.num_lines in (None, len(lines)), text
    assert wrong.code == REWARD or "Traceback" not in text
    assert sorted(path.name for path in folder.rglob("*") if "pycache" not in str(path)) == before


# What depends on the loss and the estimator, whose modules need torch.
OF_THE_ALGORITHM = {
    f"configuration: {name}"
    for name in ("one sample", "range", "dual clip", "frozen", "kl of the loss")
}


def test_no_other_mistake_needs_torch_to_be_found(tmp_path):
    write_inputs(tmp_path)
    rows = {
        name: wrong
        for name, wrong in TABLE.items()
        if wrong.absent is None
        and not wrong.environment
        # `plan` reads the configuration of a model with transformers, as a start does.
        and wrong.argv[:1] not in (("export",), ("eval",), ("data",), ("plan",))
        and name not in OF_THE_ALGORITHM
        and "plug-in" not in name
    }
    assert set(TABLE) > OF_THE_ALGORITHM
    for wrong in rows.values():
        for path, content in wrong.files.items():
            write(tmp_path / path, content)
    # Contents of one name differ between rows: the last ones stay.
    rows = {
        name: wrong
        for name, wrong in rows.items()
        if all(TABLE[name].files[p] is content for p, content in _last_files(rows, wrong).items())
    }
    program = (
        "import json, sys\n"
        "from lightrft.cli.main import main\n"
        "codes = {}\n"
        "for name, argv in json.load(sys.stdin).items():\n"
        "    codes[name] = (main(argv), 'torch' in sys.modules)\n"
        "print(json.dumps(codes))\n"
    )
    kept = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=kept,
        input=json.dumps({name: arguments(wrong) for name, wrong in rows.items()}),
        check=True,
        timeout=seconds(120),
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {name: [wrong.code, False] for name, wrong in rows.items()}
    assert len(found) > 40


def _last_files(rows, wrong):
    last = {path: content for row in rows.values() for path, content in row.files.items()}
    return {path: last[path] for path in wrong.files}


AT_THE_SHELL = (
    "number: gamma nan",
    "row: surrogate",
    "reward: misspelt",
    "command: command",
    "number: short context",
)


@pytest.mark.parametrize("name", AT_THE_SHELL)
def test_the_same_at_the_shell(folder, name):
    wrong = TABLE[name]
    for path, content in wrong.files.items():
        write(folder / path, content)
    done = subprocess.run(
        [sys.executable, "-m", "lightrft.cli.main", *arguments(wrong)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=seconds(120),
        check=False,
    )
    assert (done.returncode, done.stdout) == (wrong.code, "")
    assert all(part in done.stderr for part in wrong.expected), done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_beside_a_loss_can_be_imported(folder, capsys):
    (folder / "here").mkdir()
    write(folder / "here" / "beside.py", "def f(a, b): return -(a - b).exp()\n")
    write(
        folder / "here" / "l.py",
        "from beside import f\n"
        "def loss(logprobs, old_logprobs, advantages, response_mask):\n"
        "    return f(logprobs, old_logprobs) * advantages\n",
    )
    assert main(arguments(Wrong(1, (), {"policy_loss": "here/l.py:loss"}))) == 1
    assert "a run was started" in capsys.readouterr().err


def test_one_reward_may_be_a_text_in_toml(folder, capsys):
    write(folder / "t.toml", "reward_fn = 'gsm8k'\n")
    assert main(arguments(Wrong(1, (), {"config": "t.toml", "reward_fn": None}))) == 1
    assert "a run was started" in capsys.readouterr().err


def test_a_reward_model_is_reward_enough(folder, capsys):
    assert main(arguments(Wrong(1, (), {"reward_fn": None, "reward_pretrain": "model"}))) == 1
    assert "a run was started" in capsys.readouterr().err


def test_all_problems_of_a_command_line_come_at_once(folder, capsys):
    wrong = Wrong(2, (), {"foo": "1", "temperature": "hot", "top_k": "0", "load_in_4bit": "8"})
    assert main(arguments(wrong)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("lightrft: ") for line in lines)


def test_all_that_a_machine_lacks_comes_at_once(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("MASTER_PORT", "high")
    assert main(arguments(Wrong(3, (), {"zero_stage": "3"}))) == 3
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_without_deepspeed_fsdp2_is_taken_in_one_line(folder, capsys, monkeypatch):
    said_once.cache_clear()
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert main(arguments(Wrong(1, ()))) == 1
    err = capsys.readouterr().err
    assert "a run was started" in err
    assert err.count("FSDP2 trains, as with --fsdp: DeepSpeed is not installed") == 1


def test_options_without_effect_are_only_errors_under_strict(folder, capsys):
    assert main(arguments(Wrong(1, (), {"kl_horizon": "5"}))) == 1
    assert "a run was started" in capsys.readouterr().err


def test_the_same_mistake_is_found_in_a_worker(folder, capsys, monkeypatch):
    launched = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert main(arguments(Wrong(2, ()))) == 2
    assert "lightrft[1]: rollout_batch_size" in capsys.readouterr().err
