"""Evaluation of a model without training: greedy answers, and several samples of each prompt."""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from lightrft.config import (
    ConfigError,
    PromptDataOptions,
    SamplingOptions,
    ScoringOptions,
    TrainConfig,
)
from lightrft.config.other_names import A_REWARD
from lightrft.config.toml import write_whole
from lightrft.datasets import Prompt
from lightrft.datasets.files import read_sources
from lightrft.datasets.pass_rates import PassRate, write_rates
from lightrft.engines.text import Tokenizer
from lightrft.engines.types import SamplingParams
from lightrft.models import Actor, load_tokenizer
from lightrft.models.loading import is_reward_model
from lightrft.models.proof import prove_model
from lightrft.models.statements import read_statements
from lightrft.records.answer_order import position_metrics
from lightrft.records.table import RowTable, SampleTable, deliver_rows, tabulate
from lightrft.reporting.files import CONFIG_FILE, EVAL_FILE, ROLLOUTS_FILE
from lightrft.reporting.loggers import JsonLinesFile
from lightrft.reporting.rollouts import RolloutLog
from lightrft.rollout.sampler import (
    RolloutSampler,
    greedy_params,
    training_params,
)
from lightrft.rollout.source import SourceParts
from lightrft.run.provenance import run_of_model
from lightrft.stages.policy.inputs import build_environments, load_run_prompts
from lightrft.stages.policy.rewards import (
    build_model_rewards,
    build_run_reward,
    prepare_reward_models,
    reward_recipes,
)
from lightrft.stages.start_checks import load_modality
from lightrft.strategy import get_strategy
from lightrft.strategy.distributed.context import DistributedContext

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.rollout.environments.environments import Environments

RESPONSES_FILE = "responses.jsonl"


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """Number of answers drawn beside the greedy one, and the way they are counted.

    Args:
        num_samples: Number of samples of each prompt, drawn as in training; 0 draws none.
        pass_k: Values of k of pass@k; empty takes 1, 2, 4 ... num_samples.
        threshold: Least accuracy of a right response; the reward counts if the reward function
            reports no accuracy.
        held_out: Data of prompts that are kept out of rows; None takes the `eval_data` of the
            model's run.
        rates: File for the pass rate of each prompt; None writes none.
    """

    num_samples: int = 0
    pass_k: tuple[int, ...] = ()
    threshold: float = 1.0
    held_out: str | None = None
    rates: str | None = None

    def save_rates(self, prompts: Sequence[Prompt], tables: Mapping[str, RowTable]) -> None:
        """Write the pass rates, if asked to; samples without a reward are not right."""
        if self.rates is None:
            return
        table = tables["sampled"]
        is_right = ~table.is_masked & (table.accuracies >= self.threshold)
        counts = is_right.reshape(-1, self.num_samples).sum(axis=1).tolist()
        rates = [PassRate(count, self.num_samples) for count in counts]
        write_rates(Path(self.rates), prompts, rates)

    def problems(self) -> list[str]:
        """Return the problems of the values, one line each."""
        if self.rates is not None and not self.num_samples:
            return ["--rates is of samples: add --num_samples 8, say"]
        if any(not 1 <= k <= self.num_samples for k in self.pass_k):
            return [
                f"pass_k: got {list(self.pass_k)}, expected numbers from 1 to num_samples = "
                f"{self.num_samples}"
            ]
        return []


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Results of an evaluation; the same on every rank.

    Args:
        num_prompts: Number of prompts of the evaluation.
        metrics: Values by name: `greedy/...`, and with samples `avg@n`, `pass@k`, `sampled/...`;
            each of the first three kinds with its standard error over prompts, `.../stderr`.
    """

    num_prompts: int
    metrics: dict[str, float]


def run_evaluation(config: TrainConfig, settings: EvalSettings) -> EvalResult:
    """Evaluate `pretrain` on `eval_data`, as one of several processes with known ranks.

    Write eval.json and responses.jsonl to the folder `output_dir`.

    Args:
        config: Options of model, data, reward and engine. FSDP2 or one process holds the models.
        settings: Settings of the evaluation.

    Raises:
        DataError, ModelLoadError: The prompts, a model or a tokenizer cannot be read.
        RewardError: A reward function cannot be loaded, or fails.
    """
    path = str(config.pretrain)
    if is_reward_model(path):
        raise ConfigError(
            f"{path} is a reward model: it scores answers and gives none; give the run of a policy"
        )
    with ExitStack() as stack:
        tokenizer = load_tokenizer(path, config)
        statements = read_statements(path, config, tokenizer=tokenizer).require_consistent()
        modality = load_modality(config, tokenizer)
        environments = build_environments(config, tokenizer, modality, has_journal=False)
        stack.callback(environments.close)
        _require_reward(config, environments)
        shown = environments.prompt_tokenizer
        prompts = load_run_prompts(config, shown, for_evaluation=True).prompts
        held_out = held_out_prompts(config, settings.held_out, shown)
        rollouts, has_texts = Path(config.output_dir) / ROLLOUTS_FILE, config.save_rollout_texts
        log = RolloutLog(rollouts, held_out=held_out, has_texts=has_texts)
        stack.callback(log.close)
        recipes = reward_recipes(config, prompts)
        reward = stack.enter_context(build_run_reward(config, recipes=recipes))
        strategy = stack.enter_context(get_strategy(config))
        with strategy.init_model_context():
            actor = Actor.from_pretrained(path)
            actor.use_vocabulary(statements.vocabulary)
        statements.say(strategy.print)
        model = strategy.prepare_model(actor)
        prove_model(model, strategy.context, is_random=True)
        models = build_model_rewards(
            config,
            strategy.backend,
            prepare_reward_models(config, strategy.backend),
            tokenizer=tokenizer,
            recipes=recipes,
        )
        strategy.setup_inference_engine(config, config.engine_type, actor=model)
        strategy.update_engine_weights(model)
        session, encoder = strategy.session, modality.encoder
        parts = SourceParts(session, config, tokenizer, reward, models, encoder)
        sampler = RolloutSampler(parts, environments.source)
        result, tables = _sample_passes(config, settings, sampler, prompts, strategy.context, log)
        if strategy.is_rank_0():
            # The result comes last: it shows that all files are complete.
            write_responses(config, prompts, tables, tokenizer)
            settings.save_rates(prompts, tables)
            write_result(config, settings, result, num_held_out=len(held_out))
        strategy.barrier()
        return result


def _sample_passes(
    config: TrainConfig,
    settings: EvalSettings,
    sampler: RolloutSampler,
    prompts: Sequence[Prompt],
    context: DistributedContext,
    log: RolloutLog,
) -> tuple[EvalResult, dict[str, SampleTable]]:
    """Return the result of all passes, and on the first rank all responses of each pass.

    With `save_rollouts`, log the greedy pass as step 0 and the samples as step 1.
    """
    metrics: dict[str, float] = {}
    tables = {}
    for number, (name, params) in enumerate(sampling(config, settings).items()):
        local_samples, table = sampler.sample_all(prompts, params)
        if config.save_rollouts:
            log.log(number, local_samples, context)
        metrics |= summarise(name, table, settings, params.n)
        position_values = position_metrics(table, prompts)
        metrics |= {f"{name}/{metric}": value for metric, value in position_values.items()}
        wanted = [np.arange(len(table) if rank == 0 else 0) for rank in range(context.world_size)]
        tables[name] = deliver_rows(table, tabulate(local_samples), wanted, context)
    return EvalResult(len(prompts), metrics), tables


def sampling(config: SamplingOptions, settings: EvalSettings) -> dict[str, SamplingParams]:
    """Return the passes over the prompts: "greedy", and with samples "sampled"."""
    passes = {"greedy": greedy_params(config)}
    if settings.num_samples:
        passes["sampled"] = replace(training_params(config), n=settings.num_samples)
    return passes


def summarise(
    name: str, table: RowTable, settings: EvalSettings, num_samples: int
) -> dict[str, float]:
    """Return the metrics of one pass over the prompts.

    A response without a reward (failed or undecided) is not right. It counts in `masked_share` and
    not in the mean rewards.

    Args:
        name: Name of the pass, "greedy" or "sampled".
        table: Table with num_samples rows of each prompt, prompt after prompt.
        settings: Settings with k and the threshold.
        num_samples: Number of samples of each prompt.
    """
    is_scored = ~table.is_masked
    is_right = (is_scored & (table.accuracies >= settings.threshold)).reshape(-1, num_samples)
    num_scored = is_scored.reshape(-1, num_samples).sum(axis=1)
    sums = (table.rewards * is_scored).reshape(-1, num_samples).sum(axis=1)
    by_prompt = {f"{name}/reward": sums[num_scored > 0] / num_scored[num_scored > 0]}
    if name == "greedy":
        by_prompt["greedy/accuracy"] = is_right.mean(axis=1)
    else:
        by_prompt[f"avg@{num_samples}"] = is_right.mean(axis=1)
        counts = is_right.sum(axis=1).astype(np.int64)
        for k in settings.pass_k or default_k(num_samples):
            by_prompt[f"pass@{k}"] = pass_at_k(counts, num_samples=num_samples, k=k)
    metrics = {}
    for metric, values in by_prompt.items():
        if not len(values):
            continue
        metrics[metric] = float(values.mean())
        if len(values) > 1:
            metrics[f"{metric}/stderr"] = float(values.std(ddof=1) / len(values) ** 0.5)
    metrics[f"{name}/response_length"] = float(table.sampled_lengths.mean())
    metrics[f"{name}/truncated_share"] = float(table.is_truncated.mean())
    if not is_scored.all():
        metrics[f"{name}/masked_share"] = float(table.is_masked.mean())
    for column, component in enumerate(table.component_names):
        values_of_component = table.components[is_scored, column]
        if not np.isnan(values_of_component).all():
            metrics[f"{name}/component/{component}"] = float(np.nanmean(values_of_component))
    return metrics


def held_out_prompts(
    config: TrainConfig, source: str | None, tokenizer: Tokenizer
) -> frozenset[tuple[object, ...]]:
    """Return the keys of prompts that are kept out of rows; none unless samples are saved.

    Args:
        config: Options of the evaluation.
        source: Data in the form of its `eval_data`; None takes that of the model's run, with the
            run's options.
        tokenizer: Tokenizer that renders prompts.

    Raises:
        DataError: The prompts cannot be read.
        ConfigError: The options of the run cannot be read.
    """
    if not config.save_rollouts:
        return frozenset()
    run = run_of_model(Path(str(config.pretrain)))
    file = Path(str(run.get("path"))) / CONFIG_FILE
    if source is None and run.get("stage") == "policy" and file.is_file():
        config = TrainConfig.load(file)
        source = config.eval_data
    if source is None:
        return frozenset()
    # No length limit: the run's model, whose context limits prompts, may no longer exist.
    all_of_them = {"eval_data": source, "max_eval_samples": sys.maxsize, "pretrain": None}
    config = config.replaced(all_of_them)
    prompts = load_run_prompts(config, tokenizer, for_evaluation=True).prompts
    return frozenset(prompt.key for prompt in prompts)


def _require_reward(config: ScoringOptions, environments: object) -> None:
    if not (config.num_rewards or config.has_agent):
        spec = cast("Environments", environments).spec
        if not spec.has_reward:
            text = f"environment {spec.name} has no get_reward, and --reward_fn is missing"
            raise ConfigError(f"{text}: {A_REWARD}")


def write_result(
    config: TrainConfig, settings: EvalSettings, result: EvalResult, *, num_held_out: int
) -> None:
    """Write eval.json, and with saved samples the options that `lightrft rows` needs."""
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if config.save_rollouts:
        config.save(folder / CONFIG_FILE)
    content = {
        "model": config.pretrain,
        "data": config.eval_data,
        "reward_fn": config.reward_fn,
        "reward_pretrain": config.reward_pretrain,
        "seed": config.seed,
        "max_tokens": config.generate_max_len,
        "settings": {
            **asdict(settings),
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "min_p": config.min_p,
        },
        "num_held_out": num_held_out,
        **asdict(result),
    }
    write_whole(folder / EVAL_FILE, json.dumps(content, indent=2) + "\n")


def own_prompts(config: PromptDataOptions, prompts: Sequence[Prompt]) -> list[object]:
    """Return each prompt as text or messages of its row, to which the options apply again.

    A prompt is its rendered text if its row has none or JSON cannot hold it.
    """
    rows = read_sources(str(config.eval_data), split=config.eval_split, seed=config.seed)
    originals: list[object] = []
    for prompt in prompts:
        original = rows[prompt.id].columns.get(config.input_key)
        try:
            json.dumps(original)
        except (TypeError, ValueError):
            original = None
        originals.append(prompt.text if original is None else original)
    return originals


def write_responses(
    config: TrainConfig,
    prompts: Sequence[Prompt],
    tables: dict[str, SampleTable],
    decoder: "PreTrainedTokenizerBase",
) -> None:
    """Write one line for each response, in the order of the prompts."""
    originals = own_prompts(config, prompts)
    lines = JsonLinesFile(Path(config.output_dir) / RESPONSES_FILE)
    for name, table in tables.items():
        starts = np.cumsum(table.lengths) - table.lengths
        for row, start in enumerate(starts.tolist()):
            stop = start + int(table.lengths[row])
            token_ids = table.token_ids[start + int(table.prompt_lengths[row]) : stop].tolist()
            place = int(table.group_ids[row])
            prompt = prompts[place]
            lines.append(
                {
                    "pass": name,
                    "prompt_id": prompt.id,
                    "prompt": originals[place],
                    "rendered": prompt.text,
                    "label": prompt.label,
                    "response": decoder.decode(token_ids, skip_special_tokens=True),
                    "reward": float(table.rewards[row]),
                    "accuracy": float(table.accuracies[row]),
                    "truncated": bool(table.is_truncated[row]),
                    "masked": bool(table.is_masked[row]),
                }
            )
    lines.close()


def pass_at_k(num_correct: NDArray[np.int64], *, num_samples: int, k: int) -> NDArray[np.float64]:
    """Return the unbiased estimate of pass@k of every prompt.

    1 - C(n - c, k) / C(n, k) = 1 - prod_{i = n - c + 1 .. n} (1 - k / i), for c right samples of n

    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1 and fig. 3.

    Args:
        num_correct: Numbers of right samples, [prompts] int64, each in [0, num_samples].
        num_samples: Number n of samples of each prompt.
        k: Number of tries, in [1, num_samples].

    Returns:
        [prompts] float64.
    """
    places = np.arange(1, num_samples + 1)
    # A counted factor is negative only for i < k; then factor k is counted, too, and is 0.
    factors = np.maximum(0.0, 1.0 - k / places)
    is_counted = places[None, :] > num_samples - num_correct[:, None]
    missing: NDArray[np.float64] = np.where(is_counted, factors[None, :], 1.0).prod(axis=1)
    return 1.0 - missing


def default_k(num_samples: int) -> tuple[int, ...]:
    """Return 1, 2, 4 ... up to and including the number of samples."""
    powers = [2**i for i in range(num_samples.bit_length())]
    return tuple(sorted({*(power for power in powers if power <= num_samples), num_samples}))
