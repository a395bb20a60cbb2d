"""Writes what follows from the code: pages, parts of pages, and the types of `train`.

Run `python docs/generate.py` after an option or a metric has changed; a test compares them.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path

from lightrft.algorithms.correction_terms import CORRECTION_PRESETS
from lightrft.algorithms.interface import AdvantageTraits, PolicyLossTraits
from lightrft.cli.options import UNAVAILABLE, available_options
from lightrft.config import TrainConfig
from lightrft.config.options import OptionInfo, options_of, type_hints
from lightrft.config.other_names import OTHER_NAMES, option_hint
from lightrft.config.registry import REGISTRIES, keyword_options
from lightrft.config.train_config import command_options
from lightrft.reporting.metric_table import METRICS
from lightrft.run.gpus import GPUS
from lightrft.tools.plan.advice import advise
from lightrft.tools.plan.memory import MemoryPlan, fitting_share, plan_memory
from lightrft.tools.plan.plan_command import count_table, setup_of
from lightrft.tools.plan.setup import Setup
from lightrft.tools.plan.sizes import CONSTANTS, GB, SHAPES
from lightrft.utils.arguments import GROUPS

FOLDER = Path(__file__).resolve().parent
NOTE = "<!-- Written by docs/generate.py from the code; changes here are lost. -->"


def constants_table() -> str:
    """The constants of the plan, as Markdown."""
    lines = ["| constant | value | meaning | from |", "|---|---:|---|---|"]
    for name, found in CONSTANTS.items():
        lines.append(f"| `{name}` | {found.value:g} | {found.meaning} | {found.source} |")
    return "\n".join(lines)


def gpus_table() -> str:
    """The presets and their sources, as Markdown."""
    lines = ["| `--gpu` | GB | dense TFLOPS | from |", "|---|---:|---:|---|"]
    for name, gpu in GPUS.items():
        lines.append(
            f"| `{name}` | {gpu.memory_bytes / GB:g} | {gpu.tflops:g} | NVIDIA {gpu.source} |"
        )
    return "\n".join(lines)


OPTIONS = available_options("config")


def configuration() -> str:
    """The page of all options of `lightrft train`."""
    lines = [
        "# Configuration reference",
        "",
        NOTE,
        "",
        "After this page you know every option. It is a flag of `lightrft train` (under Supervised "
        "of `lightrft sft` and others that train on rows, under Preference of `lightrft prefer`): "
        "`--name value`, and `--no_name` for booleans. It is also a key of a TOML file "
        "(`--config run.toml`) and a field of `lightrft.config.TrainConfig`. "
        "Later files win over earlier ones, flags over files; a flag of several values may be "
        "repeated. Unknown names and wrong values are "
        "errors, all reported at once; options that do not act in the run are listed at the start, "
        "or refused with `--strict`.",
        "",
    ]
    for group in GROUPS:
        lines += [f"## {group.capitalize()}", "", "| option | type | default | meaning |"]
        lines += ["|---|---|---|---|"]
        lines += [_option_row(name, info) for name, info in OPTIONS.items() if info.group == group]
        lines.append("")
    lines += [
        "## Names that are refused",
        "",
        "These names are known from other versions. They are refused rather than ignored.",
        "",
        "| name | instead |",
        "|---|---|",
        *(f"| `{name}` | {_cell(reason)} |" for name, reason in sorted(UNAVAILABLE.items())),
        "",
        "## Names in other libraries",
        "",
        "Options of TRL, verl and OpenRLHF: where the name here stands alone it means the same "
        "and is taken, which one line says; others are refused with what is said here.",
        "",
        "| there | here |",
        "|---|---|",
        *(f"| `{name}` | {_cell(there)} |" for name, there in sorted(OTHER_NAMES.items())),
    ]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """The page of all metrics."""
    lines = [
        "# Metrics reference",
        "",
        NOTE,
        "",
        "After this page you know what a metric means. `metrics.jsonl` has one line a step with "
        "these names; the report and the trackers use the same ones. A name that ends in `/*` "
        "stands for all of its group. Outside the healthy range the report raises an alarm: look "
        "there first, not at the loss. `--best_metric` keeps the model with the better value, and "
        "refuses metrics of evaluations without one.",
        "",
        "| metric | unit | meaning | healthy | better |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{row.name}` | {row.unit} | {_cell(row.meaning)} | {row.healthy_range} | {row.better} |"
        for row in METRICS.values()
    ]
    return "\n".join(lines) + "\n"


ON_ONE = {
    "--stage sft": {
        "whole": "",
        "LoRA": "--lora_rank 16",
        "QLoRA": "--lora_rank 16 --quantize nf4",
    },
    "--engine_type hf --rollout_batch_size 8 --train_batch_size 64": {
        "whole": "",
        "LoRA": "--lora_rank 16",
        "LoRA, held once": "--lora_rank 16 --lora_sync adapter",
        "QLoRA": "--lora_rank 16 --quantize nf4",
    },
    "--engine_type vllm --rollout_batch_size 8 --train_batch_size 64": {
        "whole": "",
        "LoRA": "--lora_rank 16",
        "LoRA, held once": "--lora_rank 16 --lora_sync adapter",
    },
}
ONE_GPU = "--fsdp --gradient_checkpointing --micro_train_batch_size 1 --micro_rollout_batch_size 1"


def one_gpu() -> str:
    """docs/one_gpu.md with what fits on common devices, by the plan."""
    before, _, rest = (FOLDER / "one_gpu.md").read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = [""]
    for flags, ways in ON_ONE.items():
        lines = [f"| | {' | '.join(ways)} |", f"|---|{'---:|' * len(ways)}"]
        for name in ("qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-32b"):
            cells = (peak(name, f"{ONE_GPU} {flags} {each}".split()) for each in ways.values())
            lines.append(f"| {name} | {' | '.join(cells)} |")
        command = f"lightrft plan --pretrain NAME --gpus 1 --gpu h100-80g {ONE_GPU} {flags}"
        kinds = "; ".join(f"{way}: `{each}`" for way, each in ways.items() if each)
        parts += [f"`{command}` ({kinds}):", "\n".join(lines)]
    return before + BEGIN + "\n\n".join([*parts, ""]) + END + after


def peak(name: str, flags: list[str]) -> str:
    """Return the planned GB of the largest phase, and the smallest device on which all fit."""
    setup, *_ = setup_of([*flags, "--pretrain", name, "--gpus", "1", "--gpu", "h100-80g"])
    plans = [plan_on(replace(setup, capacity_bytes=number * GB)) for number in (8, 16, 24, 80)]
    fitting = next((plan for plan in plans if plan.fits), None)
    number = f"{fitting.setup.capacity_bytes / GB:g}" if fitting else "none"
    return f"{(fitting or plans[-1]).worst.device_bytes / GB:.1f} ({number})"


def plan_on(setup: Setup) -> MemoryPlan:
    """Return the plan of a device, with the engine's share that a start chooses there."""
    plan = plan_memory(setup)
    share = None if plan.fits else fitting_share(plan)
    if share is None:
        return plan
    return plan_memory(replace(setup, config=setup.config.replaced({"engine_mem_util": share})))


def scaling() -> str:
    """docs/scaling.md with the tables of the plan between its marks."""
    before, _, rest = (FOLDER / "scaling.md").read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    config = TrainConfig(engine_type="vllm", fsdp=True, gradient_checkpointing=True)
    parts = []
    for name, gpu in (("qwen2.5-7b", "h100-80g"), ("qwen2.5-32b", "h200-141g")):
        memory = GPUS[gpu].memory_bytes
        setup = Setup(config, SHAPES[name], 8, 8, True, memory, "vllm")
        advice = advise(setup)
        flags = f" {advice.flags}" if advice.flags else ""
        command = f"lightrft plan --pretrain {name} --gpu {gpu} --fsdp --gradient_checkpointing"
        parts += [f"`{command}{flags}`:", "\n".join(count_table(advice.plan.setup))]
    text = "\n\n".join(["", *parts, constants_table(), gpus_table(), ""])
    return before + BEGIN + text + END + after


def algorithms() -> str:
    """Return docs/algorithms.md with the formulas that the code's docstrings give."""
    before, _, rest = (FOLDER / "algorithms.md").read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = [""]
    for option, title in FORMULAS.items():
        registry = REGISTRIES[option]
        parts.append(f"## {title}: `--{option}`")
        entries: dict[int, list[str]] = {}
        for name in registry:
            entries.setdefault(id(registry.load(name)), []).append(name)
        parts += [_formula(names, registry.load(names[0])) for names in entries.values()]
    parts += ["## Corrections: `--off_policy_correction`", _corrections(), ""]
    return before + BEGIN + "\n\n".join(parts) + END + after


def _formula(names: list[str], entry: object) -> str:
    """Return what the docstring of a loss or an estimator says before its arguments."""
    function = entry
    while isinstance(function, partial):
        function = function.func
    text = VARIANTS.get(names[0]) or inspect.getdoc(function) or ""
    documented = re.split(r"\n\n(?:Args|Returns|Raises):", text)[0]
    lines = [f"### {', '.join(f'`{name}`' for name in names)}", ""]
    for paragraph in documented.split("\n\n"):
        is_formula = re.match(r"(?!Return )[\w()\[\]^* ]{1,24} = ", paragraph)
        lines += ["```text", paragraph, "```", ""] if is_formula else [paragraph, ""]
    bound = entry.keywords if isinstance(entry, partial) else {}
    options = {
        name: bound.get(name, item.default) for name, item in keyword_options(function).items()
    }
    if options:
        shown = "; ".join(f"`{name}` = `{value!r}`" for name, value in options.items())
        lines += [f"Options: {shown}.", ""]
    traits = getattr(entry, "lightrft_traits", None)
    if isinstance(traits, PolicyLossTraits):
        lines += [f"Aggregation: `{traits.aggregation}`.", ""]
    if isinstance(traits, AdvantageTraits):
        needs = [text for trait, text in NEEDS.items() if getattr(traits, trait)]
        lines += [f"It {' and '.join(needs)}.", ""] if needs else []
    return "\n".join(lines).rstrip()


def _corrections() -> str:
    """Return the presets of corrections and their terms, as Markdown."""
    lines = ["| preset | terms |", "|---|---|"]
    lines += [f"| `{name}` | `{terms}` |" for name, terms in CORRECTION_PRESETS.items()]
    return "\n".join(lines)


def renamed(page: str) -> str:
    """Return a page of another library with what each of its options is here."""
    known = available_options()

    def row(match: re.Match[str]) -> str:
        here = option_hint(match[1], known).removeprefix("; here it is ").split(",")[0]
        return f"| `{match[1]}` | `{here}` |"

    text = (FOLDER / page).read_text(encoding="utf-8")
    return re.sub(r"^\| `([^`]+)` \| `\w*` \|$", row, text, flags=re.MULTILINE)


FORMULAS = {
    "advantage_estimator": "Advantage estimators",
    "policy_loss": "Policy losses",
    "preference_loss": "Preference losses",
    "reward_loss": "Losses of reward models",
}
NEEDS = {
    "needs_groups": "needs at least two samples of each prompt",
    "needs_critic": "trains a critic",
    "needs_greedy_rewards": "samples one more response of each prompt, greedily",
    "whitens": "normalises advantages over all tokens of the step",
}
# Losses of the same function with other options, or averaged in another way.
VARIANTS = {
    "dapo": "As `ppo`, but averaged over all tokens of the batch, and with a higher upper clip.\n\n"
    "Source: Yu et al. 2025, arXiv:2503.14476, sec. 3.1 and 3.3.",
    "dr_grpo": "As `ppo`, but each row's sum is divided by one number, the response budget of the "
    "run, so that long wrong responses are not punished less.\n\n"
    "Source: Liu et al. 2025, arXiv:2503.20783.",
}


def train_options() -> str:
    """The stub with the keywords of `lightrft.trainer.train`, which editors complete."""
    lines = [
        '"""Keywords of `lightrft.trainer.train` and its like. Written by docs/generate.py."""',
        "",
        "from collections.abc import Callable, Mapping, Sequence",
        "from typing import Literal, TypedDict",
        "",
        "class TrainOptions(TypedDict, total=False):",
        '    """Options of `TrainConfig`; what is not given keeps its default."""',
        "",
        *_keywords(of_rows=False),
        "    peft_config: object",
        "",
        "class RowOptions(TrainOptions, total=False):",
        '    """Options of stages that train on rows, too."""',
        "",
        *_keywords(of_rows=True),
    ]
    return "\n".join(lines) + "\n"


def _keywords(*, of_rows: bool) -> list[str]:
    """Return lines with the options of `train`, or those of rows alone."""
    lines: list[str] = []
    for name, (entry, info) in options_of(TrainConfig).items():
        if name not in NAMED_ARGUMENTS and (name not in command_options("train")) is of_rows:
            hint = entry.type.__name__ if isinstance(entry.type, type) else str(entry.type)
            lines.append(f"    {name}: {_editor_type(name, hint, info)}")
            text = f'"""{info.help}"""'
            lines += textwrap.wrap(text, 96, initial_indent=" " * 4, subsequent_indent=" " * 4)
    return lines


def _editor_type(name: str, text: str, info: OptionInfo) -> str:
    """The type of an option, its choices spelled out; functions where a choice may be one."""
    text = text.replace("collections.abc.", "").replace("Arguments", "Mapping[str, object]")
    text = re.sub(r"tuple\[(.+), \.\.\.\]", r"Sequence[\1]", text)
    names = [f'"{choice}"' for choice in info.choices or () if isinstance(choice, str)]
    if names and "Literal" not in text:
        own = " | str | Callable[..., object]" if name in REGISTRIES else ""
        text = text.replace("str", f"Literal[{', '.join(names)}]{own}")
    return text


BEGIN, END = "<!-- written by docs/generate.py -->", "<!-- end -->"
# Arguments of `train` by other names, or set by it.
NAMED_ARGUMENTS = ("pretrain", "prompt_data", "eval_data", "reward_fn", "loggers")
OPTIONS_STUB = "../packages/trainer/src/lightrft/trainer/train_options.pyi"
# Packages in the Python reference; options have their own page.
PUBLIC = (
    "trainer", "algorithms", "rewards", "datasets", "models", "strategy", "engines", "kernels",
)  # fmt: skip


def api() -> str:
    """Return the page that mkdocstrings fills: the public names of each package."""
    lines = [
        "---\nsearch: {boost: 0.2}\n---\n",
        "# Python",
        "",
        NOTE,
        "",
        "After this page you know a public class or function of Python: its arguments and results. "
        "Import it from the package under which it stands; "
        "[training from Python](library.md) shows them at work.",
    ]
    for package in PUBLIC:
        module = importlib.import_module(f"lightrft.{package}")
        lines += ["", f"## lightrft.{package}", "", f"{(module.__doc__ or '').splitlines()[0]}"]
        instances: dict[type[object], list[str]] = {}
        for name in module.__all__:
            entry = getattr(module, name)
            if isinstance(entry, type) or inspect.isroutine(entry):
                lines += ["", f"::: {entry.__module__}.{entry.__qualname__}"]
            else:
                instances.setdefault(type(entry), []).append(f"`{name}`")
        for kind, names in instances.items():
            if kind.__module__.startswith("lightrft."):
                lines += ["", f"{', '.join(names)}: objects of the next class.", ""]
                lines += [f"::: {kind.__module__}.{kind.__qualname__}"]
    return "\n".join([*lines, ""])


PAGES = {
    "api.md": api,
    "algorithms.md": algorithms,
    "configuration.md": configuration,
    "from_openrlhf.md": partial(renamed, "from_openrlhf.md"),
    "from_verl.md": partial(renamed, "from_verl.md"),
    "metrics.md": metrics,
    "one_gpu.md": one_gpu,
    "scaling.md": scaling,
}
PAGES[OPTIONS_STUB] = train_options


def main() -> int:
    """Write the pages that differ, and name them."""
    for name, make in PAGES.items():
        path, text = FOLDER / name, make()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote {path}\n")
    return 0


def _option_row(name: str, info: OptionInfo) -> str:
    text = info.help
    if info.choices:
        text += " One of " + ", ".join(f"`{str(choice).lower()}`" for choice in info.choices) + "."
    default = TrainConfig.__dataclass_fields__[name].default
    hint = type_hints(TrainConfig)[name]
    return f"| `{name}` | {_type(hint)} | {_default(default)} | {_cell(text)} |"


def _type(hint: object) -> str:
    name = hint.__name__ if isinstance(hint, type) else str(hint)
    name = name.replace("collections.abc.", "").replace("typing.", "")
    return f"`{name.replace(' | ', ' or ')}`"


def _default(value: object) -> str:
    if value is None or value == ():
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"`{_cell(shown)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
