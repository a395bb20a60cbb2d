"""Checks of the machine and of the input before torch is imported and a model is built."""

import contextlib
import importlib.util
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightrft.config import (
    BuildOptions,
    ConfigError,
    MonitoringOptions,
    PromptDataOptions,
    PromptOptions,
    ScoringOptions,
    TeacherOptions,
    TrainConfig,
)
from lightrft.config.files import FileError, read_bytes
from lightrft.config.other_names import A_REWARD
from lightrft.config.parts.data import split_sources
from lightrft.config.parts.learning import NO_REWARDS
from lightrft.config.registry import LOGGERS
from lightrft.datasets.files import Row, read_sources, scan_rows
from lightrft.datasets.render import as_flags, found_keys, label_of, render
from lightrft.datasets.types import DataError
from lightrft.engines.factory import resolve_engine_type
from lightrft.models.weight_files import count_model, cut_files, tensor_shapes
from lightrft.reporting.files import read_json

_DEVICE = re.compile(r"nvidia\d+\Z")
_WITHOUT_ADAPTERS = re.compile("embed|experts|head")
# Rows on which a reward function is tried.
NUM_EXAMPLES = 4
_LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+\Z")
ADAPTER_FILE = "adapter_config.json"
MODEL_FILES = {
    "configuration": ("config.json",),
    "tokenizer": ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    "weights": ("*.safetensors", "pytorch_model*.bin"),
}


def machine_problems(config: TrainConfig, num_processes: int) -> list[str]:
    """Return missing packages, devices, ports and disk space, one line each.

    Args:
        config: Options of the run.
        num_processes: Processes of this machine.
    """
    return [
        *engine_problems(config.engine_type),
        *package_problems(config),
        *login_problems(config),
        *device_problems(num_processes),
        *port_problems(num_processes),
        *disk_problems(config),
    ]


def environment_problems() -> list[str]:
    """Return launcher variables that are missing or contradict each other, one line each."""
    if "RANK" not in os.environ:
        return []
    missing = [name for name in _LAUNCHER_NAMES if name not in os.environ]
    if missing:
        return [
            f"RANK is set, but {', '.join(missing)} not: start by lightrft train "
            "--nproc_per_node N or by torchrun, which set all of them, or unset RANK"
        ]
    numbers = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    wrong = [f"{name}={text!r}" for name, text in numbers.items() if not text.isdigit()]
    if wrong:
        return [f"expected whole numbers in the launcher's variables: got {', '.join(wrong)}"]
    rank, world_size = int(numbers["RANK"]), int(numbers["WORLD_SIZE"])
    if rank >= world_size:
        return [f"RANK must be below WORLD_SIZE: got {rank} and {world_size}; check the launcher"]
    return []


def engine_problems(name: str) -> list[str]:
    """Return reasons why a named engine cannot start here; "auto" always has one that can."""
    if name == "auto":
        return []
    try:
        resolve_engine_type(name)
    except (ImportError, ValueError) as err:
        return [f"--engine_type: {err}"]
    return []


def package_problems(config: TrainConfig) -> list[str]:
    """Return optional packages that an option needs and that are not installed."""
    needed = [
        (
            not config.fsdp,
            "deepspeed",
            ", ".join(f"--{name}" for name in config.deepspeed_options()) or "--no_fsdp",
            "install lightrft[deepspeed], or choose --fsdp",
        ),
        (
            config.plot_every > 0 and config.log_dir is not None,
            "matplotlib",
            "--plot_every",
            "install lightrft[plots], or leave plot_every at -1",
        ),
        *(
            (
                bool(config.__dict__[name]),
                package,
                f"--{name}",
                f"install lightrft[{extra}], or leave it out",
            )
            for name, package, extra in (
                ("use_tensorboard", "tensorboard", "tensorboard"),
                ("use_wandb", "wandb", "wandb"),
                ("adam_8bit", "bitsandbytes", "adam-8bit"),
                ("quantize", "bitsandbytes", "adam-8bit"),
                ("lora_rank", "peft", "lora"),
            )
        ),
        *(
            (
                name in config.loggers,
                name,
                f"--loggers {name}",
                f"pip install {name}, or leave it out",
            )
            for name in LOGGERS
            if LOGGERS.is_built_in(name)
        ),
    ]
    return [
        f"{option} needs the package {package}, which is not installed: {remedy}"
        for is_used, package, option, remedy in needed
        if is_used and importlib.util.find_spec(package) is None
    ]


def login_problems(config: MonitoringOptions) -> list[str]:
    """Return a problem for W&B without a key, which would ask for it during the start."""
    is_offline = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
    if config.use_wandb is not True or is_offline or "WANDB_API_KEY" in os.environ:
        return []
    login = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    with contextlib.suppress(FileError):
        if b"wandb" in read_bytes(login):
            return []
    return [
        "--use_wandb: no key found: set WANDB_API_KEY, run wandb login once, or set "
        "WANDB_MODE=offline"
    ]


def device_files(folder: Path = Path("/dev")) -> int:
    """Return the number of GPUs that the driver shows."""
    return sum(bool(_DEVICE.match(path.name)) for path in folder.glob("nvidia*"))


def device_problems(num_processes: int) -> list[str]:
    """Return missing devices; a machine without any trains on its CPU."""
    present = device_files()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    asked = [name for name in (chosen or "").split(",") if name.strip() not in ("", "-1")]
    if asked and present == 0:
        return [
            f"CUDA_VISIBLE_DEVICES={chosen} asks for a GPU, but this machine has none (no "
            "/dev/nvidia0): unset it to train on the CPU"
        ]
    available = present if chosen is None else min(present, len(asked))
    if available and num_processes > available:
        return [
            f"--nproc_per_node {num_processes} needs as many GPUs, got {available}"
            + (f" (CUDA_VISIBLE_DEVICES={chosen})" if chosen is not None else "")
            + f": lower it to {available}"
        ]
    return []


def port_problems(num_processes: int) -> list[str]:
    """Return a problem of an invalid or taken MASTER_PORT; several processes get a free port."""
    text = os.environ.get("MASTER_PORT")
    if text is None or "RANK" in os.environ or num_processes > 1:
        return []
    if not text.isdigit() or not 0 < int(text) < 1 << 16:
        return [f"MASTER_PORT={text!r} is no port: unset it, and a free one is taken"]
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", int(text)))
        except OSError as err:
            return [f"MASTER_PORT={text} cannot be used ({err.strerror}): unset it or change it"]
    return []


def disk_problems(config: TrainConfig) -> list[str]:
    """Return problems of run folders: not writable, or too small for checkpoint and model."""
    sizes = [*map(count_model, _models(config))]
    checkpoint_bytes, model_bytes = written_bytes(config, sizes, has_average=config.enable_ema)
    num_checkpoints = 1 + (config.save_steps > 0)  # the old one is deleted after the new one
    needs = (
        ("output_dir", Path(config.output_dir), 0),
        ("ckpt_path", config.checkpoint_dir, checkpoint_bytes * num_checkpoints),
        ("save_path", config.model_dir, model_bytes),
    )
    problems = []
    files: set[Path] = set()
    for name, folder, num_bytes in needs:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            if existing.resolve() not in files:  # others are below output_dir by default
                problems.append(f"--{name}: {existing} is a file: give a folder")
            files.add(existing.resolve())
        elif not os.access(existing, os.W_OK | os.X_OK):
            problems.append(f"--{name}: {existing} may not be written by this user: give another")
        elif not (disk := shutil.disk_usage(existing)).total:
            problems.append(
                f"--{name}: {existing} is no disk, nothing can be kept there: give another"
            )
        elif (free := disk.free) < num_bytes:
            flag = name if getattr(config, name) is not None else "output_dir"
            problems.append(
                f"--{flag}: {existing} has {_shown_bytes(free)} free, the run needs about "
                f"{_shown_bytes(num_bytes)} there for {sum(sizes):,} parameters: free some or give "
                "another folder"
            )
    return problems


def written_bytes(
    config: BuildOptions, sizes: Sequence[int], *, has_average: bool = False
) -> tuple[int, int]:
    """Return the bytes of a checkpoint and of the final model in float32.

    A checkpoint holds all weights except those of 4 bits, Adam's two moments of the trained ones,
    and maybe an average of all; DeepSpeed keeps the trained weights twice.
    """
    actor, *others = sizes
    shapes = tensor_shapes(str(config.pretrain)) if config.lora_rank else {}
    adapters = config.lora_rank * sum(
        sum(shape)
        for name, shape in shapes.items()
        if len(shape) == 2 and not _WITHOUT_ADAPTERS.search(name)
    )
    trained = (adapters or actor) + sum(others)
    frozen = actor if adapters and config.quantize is None else 0
    bytes_each = 6 if config.adam_8bit else 12 if config.fsdp else 16
    model_bytes = 4 * (actor + adapters)
    return bytes_each * trained + 4 * frozen + model_bytes * has_average, model_bytes


def _shown_bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _models(config: TrainConfig) -> Iterator[str]:
    yield str(config.pretrain)
    # By name: an estimator's declaration is available only with torch.
    critic = config.critic_pretrain
    if config.advantage_estimator == "gae" or isinstance(critic, str):
        yield critic if isinstance(critic, str) else str(config.pretrain)


def check_paths(config: TrainConfig) -> list[str]:
    """Return missing parts of the model, the data and the rewards, one line each."""
    problems = config.missing_inputs
    if config.pretrain is not None:
        problems += model_problems("--pretrain", config.pretrain) or context_problems(config)
    if isinstance(config.critic_pretrain, str):
        problems += model_problems("--critic_pretrain", config.critic_pretrain)
    problems += teacher_problems(config)
    for path in config.reward_pretrain:
        problems += model_problems("--reward_pretrain", path)
    return problems if config.advantage_estimator == NO_REWARDS else problems + no_reward(config)


def no_reward(config: ScoringOptions) -> list[str]:
    """Return a line if nothing scores the responses."""
    is_scored = config.num_rewards or config.environment is not None or config.has_agent
    return [] if is_scored else [f"--reward_fn is missing: {A_REWARD}"]


def teacher_problems(config: TeacherOptions) -> list[str]:
    """Return missing files of the teachers that are folders."""
    flag = "--teachers" if config.teachers else "--teacher"
    folders = config.teacher_folders.values()
    return [problem for folder in folders for problem in model_problems(flag, folder)]


def model_problems(flag: str, name: str) -> list[str]:
    """Return missing files of a model directory; transformers checks a hub id (owner/name)."""
    directory = Path(name)
    if not directory.is_dir():
        if HUB_ID.match(name) and not directory.parent.is_dir():
            return []
        return [f"{flag}: no model directory at {name}"]
    if (directory / ADAPTER_FILE).is_file() and not (directory / "config.json").is_file():
        return [
            f"{flag}: {name} holds adapters alone: give a whole model, such as the folder model/ "
            "of their run, in which they are merged, or their own model and --lora_path with these"
        ]
    return [
        f"{flag}: no {what} in {name}: expected {' or '.join(patterns)}"
        for what, patterns in MODEL_FILES.items()
        if not any(any(directory.glob(pattern)) for pattern in patterns)
    ] + [
        f"{flag}: {file} is cut: it has {size:,} bytes and its header says {whole:,}: get it again"
        for file, size, whole in cut_files(name)
    ]


def context_problems(config: ScoringOptions) -> list[str]:
    """Return a problem of a response too long for any prompt, by the model's configuration."""
    values = read_json(Path(str(config.pretrain)) / "config.json")
    text = values.get("text_config")
    longest = (text if isinstance(text, dict) else values).get("max_position_embeddings")
    if not isinstance(longest, int) or config.generate_max_len < longest:
        return []
    return [
        f"generate_max_len: got {config.generate_max_len}, expected less than the "
        f"{longest} positions of {config.pretrain}"
    ]


def check_algorithm(config: TrainConfig) -> None:
    """Load loss, estimator and corrections, and try a user-defined one on an example batch.

    Raises:
        ConfigError: They cannot be computed with these options; or `strict`, and a changed option
            has no use.
    """
    # Here rather than in the rules of the options, because it needs torch.
    from lightrft.stages.policy.algorithm import (
        algorithm_problems,
        build_algorithm,
        unused_algorithm_options,
    )

    problems = algorithm_problems(config)
    if config.strict and not problems:
        problems = unused_algorithm_options(
            config, build_algorithm(config), has_reference=config.init_kl_coef > 0
        )
    if problems:
        raise ConfigError("\n".join(problems))


@dataclass(frozen=True, slots=True)
class CheckedData:
    """Facts of the data that rewards depend on.

    Args:
        columns: Columns that every training row has beside its prompt and its label.
        labels: Labels of all rows, each with the place of the row.
        examples: First training rows, each with its prompt.
    """

    columns: frozenset[str] = frozenset()
    labels: tuple[tuple[str, str | None], ...] = ()
    examples: tuple[tuple[str, Row], ...] = ()


def found_columns(
    config: PromptOptions, source: str | None, split: str, *, says: bool
) -> dict[str, object]:
    """Return the column of the prompts as options, if only its name identifies it.

    Args:
        config: Options of the command.
        source: Data whose first row is read, or None.
        split: Part of the data.
        says: Whether to print the result in a line.
    """
    try:
        parts = [] if source is None else split_sources(source)[:1]
        items = (item for part in parts for item in scan_rows(part, split=split))
        row = next((item for item in items if isinstance(item, Row)), None)
    except DataError:  # reported where the data are read
        row = None
    options = {} if row is None else found_keys(row.columns, config)
    if options and says:
        print(f"{source}: prompts are taken by {as_flags(options)}", flush=True)
    return options


def check_data(config: PromptDataOptions, *, keeps: bool = False) -> CheckedData:
    """Read and render every row of the training and evaluation data, without a tokenizer.

    Args:
        config: Options that name the data.
        keeps: Whether the run in this process takes over the rows; see `read_sources`.

    Raises:
        DataError: A file is missing, malformed or empty, or a row lacks its prompt.
    """
    sources = (
        (config.prompt_data, config.prompt_split, config.prompt_data_probs),
        (config.eval_data, config.eval_split, ()),
    )
    columns: frozenset[str] | None = None
    labels, examples = list[tuple[str, str | None]](), list[tuple[str, Row]]()
    for text, split, probabilities in sources:
        if text is None:
            continue
        for row in read_sources(
            text, split=split, probabilities=probabilities, seed=config.seed, keeps=keeps
        ):
            prompt = render(row, PlainTokenizer(), config)
            labels.append((row.location, label_of(row, config)))
            if text == config.prompt_data:
                columns = frozenset(row.columns).intersection(columns or row.columns)
                if len(examples) < NUM_EXAMPLES:
                    examples.append((prompt, row))
    return CheckedData(columns or frozenset(), tuple(labels), tuple(examples))


def check_reward(config: ScoringOptions, data: CheckedData) -> None:
    """Load the reward functions, compare their needs with the data, and try user-defined ones.

    Raises:
        ConfigError: An unknown function or file.
        DataError: A label that no response can meet.
        RewardError: A file that cannot be loaded, or a function that cannot be called.
    """
    from lightrft.rewards.build import build_reward, reward_urls

    if not config.reward_fn and not reward_urls(config):
        return  # only reward models
    with build_reward(config.reward_fn, config=config) as reward:
        reward.check_columns(data.columns)
        if config.reward_recipe is not None or config.has_episodes:
            return  # a row's function and its arguments are known later
        label_problems = ((place, reward.label_problem(label)) for place, label in data.labels)
        problems = [
            f"{place}: {problem}" for place, problem in label_problems if problem is not None
        ]
        if problems:
            more = f" (and {len(problems) - 1} rows more)" if len(problems) > 1 else ""
            raise DataError(problems[0] + more)
        reward.try_out(
            [prompt for prompt, _ in data.examples],
            [label_of(row, config) for _, row in data.examples],
            {name: [row.columns[name] for _, row in data.examples] for name in data.columns},
        )


class PlainTokenizer:
    """Stand-in for the model's tokenizer; loading that one checks the rendering itself."""

    chat_template: str | None = "plain"

    def __call__(
        self, text: list[str], *, add_special_tokens: bool
    ) -> Mapping[str, list[list[int]]]:
        """Return one id per character."""
        return {"input_ids": [list(map(ord, item)) for item in text]}

    def apply_chat_template(
        self,
        conversation: Iterable[Mapping[str, object]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        tools: object = None,
    ) -> object:
        """Return the contents of the messages, then their other fields."""
        del tokenize, add_generation_prompt
        others = [
            str(value)
            for message in conversation
            for name, value in message.items()
            if name not in ("role", "content")
        ]
        texts = [str(message["content"]) for message in conversation]
        return "\n".join([*texts, *others, *([str(tools)] if tools else [])])
