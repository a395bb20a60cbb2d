"""The options of a whole run, beside those of its strategy."""

from dataclasses import dataclass

from lightrft.config.options import CRITIC, option
from lightrft.config.registry import AGGREGATIONS, LOGGERS, POLICY_LOSSES
from lightrft.config.strategy_config import ENGINE_TYPES, Arguments, StrategyConfig


@dataclass(kw_only=True)
class RunOptions(StrategyConfig):
    """Options of `TrainConfig` beside those of a strategy; rules and methods are there."""

    prompt_data: str | None = option(
        None,
        "Training prompts: a JSONL, JSON or Parquet file, a folder, or the name of a data "
        "set (owner/name[:configuration]); several separated by commas.",
        group="data",
        common=True,
        path="file",
    )
    prompt_data_probs: tuple[float, ...] = option(
        (),
        "Shares of several sources of prompt_data; unset follows their sizes.",
        group="data",
    )
    prompt_split: str = option(
        "train",
        "Part of a folder or data set to train on.",
        group="data",
        commands=("data",),
    )
    eval_data: str | None = option(
        None,
        "Evaluation prompts, in the same formats.",
        group="data",
        may_change=True,
        common=True,
        path="file",
        commands=("eval",),
    )
    eval_split: str = option(
        "test",
        "Part of a folder or data set of eval_data.",
        group="data",
        may_change=True,
        commands=("eval",),
    )
    input_key: str = option(
        "input",
        "Column that holds the prompt.",
        group="data",
        common=True,
        commands=("data", "eval"),
    )
    label_key: str | None = option(
        "label",
        "Column that holds the reference answer.",
        group="data",
        common=True,
        commands=("data", "eval"),
    )
    apply_chat_template: bool = option(
        False,
        "Render prompts by the model's chat template.",
        group="data",
        common=True,
        commands=("data", "eval"),
    )
    system_prompt: str | None = option(
        None,
        "System message put before every prompt.",
        group="data",
        commands=("data", "eval"),
    )
    input_template: str | None = option(
        None,
        "Text around the prompt, which replaces {}.",
        group="data",
        commands=("data", "eval"),
    )
    prompt_max_len: int = option(
        1024,
        "Longest prompt, in tokens.",
        group="data",
        at_least=1,
        common=True,
        commands=("data", "eval"),
    )
    max_samples: int = option(
        1_000_000,
        "Use at most this many training prompts.",
        group="data",
        at_least=1,
    )
    max_eval_samples: int = option(
        500,
        "Use at most this many evaluation prompts.",
        group="data",
        at_least=1,
        acts_with="eval_data",
        may_change=True,
        commands=("eval",),
    )
    images_key: str = option(
        "images",
        "Column with the images of a prompt: paths relative to the file, bytes or "
        "base64, one or a list.",
        group="data",
        commands=("data", "eval"),
    )
    videos_key: str = option(
        "videos",
        "Column with the videos of a prompt: animated images, or objects with frames and fps.",
        group="data",
        commands=("data", "eval"),
    )
    text_only: bool = option(
        False,
        "Leave images and videos of the data out.",
        group="data",
        commands=("data", "eval"),
    )
    max_pixels: int | None = option(
        None,
        "Most pixels of an image or frame; larger ones are scaled down. Unset is the "
        "processor's own.",
        group="data",
        at_least=1,
        commands=("data", "eval"),
    )
    min_pixels: int | None = option(
        None,
        "Fewest pixels of an image or frame; smaller ones are scaled up. Unset is the "
        "processor's own.",
        group="data",
        at_least=1,
        commands=("data", "eval"),
    )
    limit_mm_image_per_prompt: int | None = option(
        None,
        "Most images of a prompt; a row with more is an error. Unset sets no limit.",
        group="data",
        at_least=0,
        commands=("data", "eval"),
    )
    limit_mm_video_per_prompt: int | None = option(
        None,
        "Most videos of a prompt; a row with more is an error. Unset sets no limit.",
        group="data",
        at_least=0,
        commands=("data", "eval"),
    )
    reward_fn: tuple[str, ...] = option(
        (),
        "Rewards, summed: boxed_math, gsm8k, unit_tests, judge, reasoning_gym:NAME or "
        "FILE.py:FUNCTION.",
        group="reward",
        common=True,
        path="file",
        commands=("data", "eval"),
    )
    reward_args: Arguments = option(
        None,
        "Keyword-only arguments of own reward functions.",
        group="reward",
        commands=("data", "eval"),
    )
    reward_timeout_seconds: float = option(
        120.0,
        "Deadline of one call of a reward function.",
        group="reward",
        above=0,
        at_most=1e7,
        may_change=True,
        commands=("data", "eval"),
    )
    reward_weights: tuple[float, ...] = option(
        (),
        "Factor of each reward_fn, then remote_rm_url, then reward_pretrain; unset is 1 each.",
        group="reward",
        commands=("eval",),
    )
    reward_pretrain: tuple[str, ...] = option(
        (),
        "Reward models: sequence classifiers with one label; their scores are added.",
        group="reward",
    )
    reward_recipe: str | None = option(
        None,
        "TOML file: a table per value of reward_recipe_column with weights of rewards.",
        group="reward",
    )
    reward_recipe_column: str = option(
        "task",
        "Column that names the recipe of a row.",
        group="reward",
        acts_with="reward_recipe",
    )
    reward_failure: str = option(
        "raise",
        "A failed reward ends the run, or excludes (masks) its sample.",
        group="reward",
        choices=("raise", "mask"),
    )
    reward_memory_gb: float | None = option(
        16.0,
        "Memory in GB that the process of an own reward function and its children may hold; "
        "none sets no limit.",
        group="reward",
        above=0,
        may_change=True,
        commands=("data", "eval"),
    )
    reward_env: tuple[str, ...] = option(
        (),
        "Environment variables with secrets that own reward functions may read; others, such "
        "as WANDB_API_KEY, are kept from them.",
        group="reward",
        may_change=True,
        commands=("data", "eval"),
    )
    reward_workers: int = option(
        1,
        "Groups of responses that an own reward function (each in a process of its own), "
        "reasoning_gym or a service scores at once, beside the generation.",
        group="reward",
        at_least=1,
        at_most=256,
        may_change=True,
        commands=("data", "eval"),
    )
    sandbox: str = option(
        "bubblewrap",
        "Where the reward unit_tests runs programs; unsafe has limits of resources only.",
        group="reward",
        choices=("bubblewrap", "unsafe"),
        commands=("data", "eval"),
    )
    test_timeout_seconds: float = option(
        5.0,
        "Processor time of a program of the reward unit_tests; by the clock it may take three "
        "times as long.",
        group="reward",
        above=0,
        at_most=1e7,
        commands=("data", "eval"),
    )
    judge_url: str | None = option(
        None,
        "OpenAI-compatible server of the reward judge, http://HOST:PORT/v1; the environment "
        "variable LIGHTRFT_JUDGE_KEY is its key.",
        group="reward",
        may_change=True,
        commands=("data", "eval"),
    )
    judge_model: str | None = option(
        None,
        "Name of the judge's model.",
        group="reward",
        acts_with="judge_url",
        commands=("data", "eval"),
    )
    judge_template: str | None = option(
        None,
        "Text file with the question to the judge: {response} between marks with {mark}, "
        "{prompt} and {label}.",
        group="reward",
        acts_with="judge_url",
        path="file",
        commands=("data", "eval"),
    )
    judge_args: Arguments = option(
        None,
        "Fields of the request to the judge, such as max_tokens=2048.",
        group="reward",
        acts_with="judge_url",
        commands=("data", "eval"),
    )
    remote_rm_token: str | None = option(
        None,
        "Token of the reward services, sent as Authorization: Bearer; unset takes "
        "LIGHTRFT_REWARD_TOKEN of the environment.",
        group="reward",
        may_change=True,
        secret=True,
        acts_with="remote_rm_url",
        commands=("data", "eval"),
    )
    rollout_batch_size: int = option(
        512,
        "Prompts per step, over all ranks.",
        group="rollout",
        at_least=1,
        common=True,
    )
    generate_max_len: int = option(
        1024,
        "Longest response, in tokens.",
        group="rollout",
        at_least=1,
        common=True,
        commands=("data", "eval"),
    )
    temperature: float = option(
        1.0,
        "Sampling temperature.",
        group="rollout",
        above=0,
        common=True,
        commands=("eval",),
    )
    top_p: float = option(
        1.0,
        "Sample from the smallest set of tokens with this probability; 1 keeps all.",
        group="rollout",
        above=0,
        at_most=1,
        commands=("eval",),
    )
    top_k: int = option(
        -1,
        "Sample from the k most likely tokens; -1 keeps all.",
        group="rollout",
        at_least=-1,
        commands=("eval",),
    )
    stop: tuple[str, ...] = option(
        (),
        "Texts that end a response, beside the model's own end; they stay in it.",
        group="rollout",
        commands=("eval",),
    )
    use_fire: bool = option(
        False,
        "Draw the first token at first_token_temperature (FIRE).",
        group="rollout",
    )
    first_token_temperature: float = option(
        10.0,
        "Temperature of the first token with use_fire.",
        group="rollout",
        above=0,
        acts_with="use_fire",
    )
    max_num_gen_batches: int = option(
        10,
        "Rollout batches of one step with dynamic_sampling, at most.",
        group="rollout",
        at_least=1,
        acts_with="dynamic_sampling",
    )
    partial_rollout: bool = option(
        False,
        "Carry responses that are not finished over to the next step.",
        group="rollout",
    )
    partial_rollout_prompts: int | None = option(
        None,
        "Prompts in flight with partial_rollout; unset is 1.5 rollout_batch_size.",
        group="rollout",
        at_least=1,
        acts_with="partial_rollout",
    )
    partial_rollout_tokens: int | None = option(
        None,
        "Tokens of each response between two looks at what is finished, with "
        "partial_rollout; unset is a quarter of generate_max_len.",
        group="rollout",
        at_least=1,
        acts_with="partial_rollout",
    )
    max_staleness: int = option(
        4,
        "Updates between a token and the step that trains on it, at most, with partial_rollout.",
        group="rollout",
        at_least=1,
        acts_with="partial_rollout",
    )
    environment: str | None = option(
        None,
        "Class FILE.py:NAME whose reset(**row) begins an episode and whose other public "
        "methods are tools of the model; get_reward() is added to the reward. A dict of classes "
        "is chosen from by the column environment. Also skyrl_gym:FILE.py:NAME and "
        "openenv:http://HOST:PORT.",
        group="rollout",
        path="file",
        commands=("eval",),
    )
    tools: tuple[str, ...] = option(
        (),
        "Functions FILE.py:NAME that the model may call, beside the environment's methods.",
        group="rollout",
        path="file",
        commands=("eval",),
    )
    max_turns: int = option(
        8,
        "Turns of an episode; the calls in the last one are not made.",
        group="rollout",
        acts_with="environment or tools",
        at_least=1,
        commands=("eval",),
    )
    max_tool_calls: int | None = option(
        None,
        "Calls that an episode may make; further ones are answered by an error.",
        group="rollout",
        acts_with="environment or tools",
        at_least=1,
        commands=("eval",),
    )
    tool_timeout_seconds: float = option(
        60.0,
        "Deadline of one reset, call or reward of an environment; past it its worker is killed.",
        group="rollout",
        acts_with="environment or tools",
        above=0,
        may_change=True,
        commands=("eval",),
    )
    tool_parser: str = option(
        "auto",
        "How calls are written; auto takes the tokenizer's response template or what its "
        "chat template shows.",
        group="rollout",
        acts_with="environment or tools",
        choices=("auto", "hermes", "llama", "pythonic"),
        commands=("eval",),
    )
    max_observation_tokens: int = option(
        1024,
        "Longest answer of a call, in tokens; the rest is cut.",
        group="rollout",
        acts_with="environment or tools",
        at_least=16,
        commands=("eval",),
    )
    environment_workers: int | None = option(
        None,
        "Worker processes that host the environments of one rank; unset is one a core.",
        group="rollout",
        acts_with="environment or tools",
        at_least=1,
        may_change=True,
        commands=("eval",),
    )
    late_join: bool = option(
        False,
        "Let an episode whose tool is busy join a later round, once half of the others are "
        "ready; off, a round waits for all, and timing changes no bit.",
        group="rollout",
        acts_with="environment or tools",
        commands=("eval",),
    )
    chat_template: str | None = option(
        None,
        "File with a Jinja chat template in place of the tokenizer's.",
        group="data",
        path="file",
        acts_with="apply_chat_template",
        commands=("data", "eval"),
    )
    use_rollout_logprobs: bool = option(
        False,
        "Take the old logprobs from the engine instead of a forward pass of the actor.",
        group="rollout",
    )
    use_wandb: str | bool | None = option(
        False,
        "Log to Weights & Biases; a key given here is neither shown nor saved, without one "
        "WANDB_API_KEY or an earlier login counts.",
        group="monitoring",
        may_change=True,
        secret=True,
    )
    wandb_org: str | None = option(
        None, "W&B entity, SwanLab workspace.", group="monitoring", may_change=True
    )
    wandb_group: str | None = option(
        None, "Group in W&B, Trackio and SwanLab.", group="monitoring", may_change=True
    )
    wandb_project: str = option(
        "lightrft_train_ppo",
        "Project (MLflow: experiment) of the trackers.",
        group="monitoring",
        may_change=True,
    )
    wandb_run_name: str = option(
        "ppo_%m%dT%H:%M",
        "W&B name of the run; %-codes are those of strftime.",
        group="monitoring",
        may_change=True,
    )
    heartbeat_seconds: float = option(
        60.0,
        "Say which phase is under way after so long without a line.",
        group="monitoring",
        above=0,
        at_most=1e7,
        may_change=True,
    )
    engine_type: str = option(
        "auto",
        "Rollout engine; auto takes vllm or sglang on a GPU, else hf.",
        group="engine",
        choices=ENGINE_TYPES,
        common=True,
        commands=("eval",),
    )
    policy_loss: str | None = option(
        None,
        "Policy loss; unset is ppo, the clipped surrogate.",
        group="algorithm",
        choices=POLICY_LOSSES,
        common=True,
    )
    policy_loss_args: Arguments = option(
        None,
        "Hyper-parameters of the policy loss under their own names.",
        group="algorithm",
    )
    loss_agg_mode: str | None = option(
        None,
        "How the losses of tokens become one number; unset is that of the loss's paper.",
        group="algorithm",
        choices=AGGREGATIONS,
    )
    eps_clip: float | None = option(
        None,
        "Clip range of the ratio; unset is that of the loss's paper.",
        group="algorithm",
        at_least=0,
    )
    eps_clip_low: float | None = option(
        None,
        "Lower clip range; unset is eps_clip.",
        group="algorithm",
        at_least=0,
        at_most=1,
    )
    eps_clip_high: float | None = option(
        None,
        "Upper clip range; unset is eps_clip.",
        group="algorithm",
        at_least=0,
    )
    use_gspo: bool = option(False, "The same as policy_loss gspo.", group="algorithm")
    use_cpg_loss: bool = option(False, "The same as policy_loss cpgd.", group="algorithm")
    dual_clip: float | None = option(
        None,
        "Cap of the ratio where the advantage is negative; unset is off.",
        group="algorithm",
        above=1,
    )
    high_entropy_token_ratio: float = option(
        0.0,
        "Train on this share of tokens, the least certain ones; 0 takes all.",
        group="algorithm",
        at_least=0,
        at_most=1,
    )
    high_entropy_scope: str = option(
        "batch",
        "Take that share of the optimizer batch or of each response.",
        group="algorithm",
        choices=("batch", "sequence"),
        acts_with="high_entropy_token_ratio",
    )
    off_policy_correction: str | tuple[str, ...] | None = option(
        None,
        "Corrections for the difference between engine and trainer: presets (tis, icepop, "
        "mis, geometric ...) or terms such as reject:k3:sequence:high=0.01; several at once.",
        group="algorithm",
    )
    advantage_args: Arguments = option(
        None,
        "Hyper-parameters of the advantage estimator under their own names.",
        group="algorithm",
    )
    correction_args: Arguments = option(
        None,
        "Bounds and further arguments of off_policy_correction.",
        group="algorithm",
    )
    correction_low: float | None = option(
        None,
        "Lower bound of off_policy_correction; unset is its own.",
        group="algorithm",
        at_least=0,
        acts_with="off_policy_correction",
    )
    correction_high: float | None = option(
        None,
        "Upper bound of off_policy_correction; unset is its own.",
        group="algorithm",
        above=0,
        acts_with="off_policy_correction",
    )
    value_clip: float = option(
        0.2,
        "Clip range of the change of a value; 0 is off.",
        group="algorithm",
        at_least=0,
        acts_with=CRITIC,
    )
    gamma: float = option(1.0, "Discount per token.", group="algorithm", at_least=0, at_most=1)
    lambd: float = option(
        0.95,
        "Lambda of generalised advantage estimation.",
        group="algorithm",
        at_least=0,
        at_most=1,
        acts_with=CRITIC,
    )
    init_kl_coef: float = option(
        0.01,
        "Weight of the KL divergence; 0 loads no reference model.",
        group="algorithm",
        at_least=0,
        common=True,
    )
    kl_target: float | None = option(
        None,
        "Adapt the weight towards this KL divergence per response.",
        group="algorithm",
        above=0,
        acts_with="init_kl_coef",
    )
    kl_horizon: int = option(
        10_000,
        "Samples over which the weight adapts to kl_target.",
        group="algorithm",
        at_least=1,
        acts_with="kl_target",
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", group="algorithm", at_least=0)
    aux_loss_coef: float = option(
        0.0,
        "Weight of the loss that balances the experts of a mixture-of-experts model.",
        group="algorithm",
        at_least=0,
    )
    ptx_coef: float = option(
        0.05,
        "Weight of the language-modelling loss on pretrain_data.",
        group="algorithm",
        at_least=0,
        acts_with="pretrain_data",
    )
    ptx_batch_size: int | None = option(
        None,
        "Texts of pretrain_data per optimizer step over all ranks; unset is train_batch_size.",
        group="algorithm",
        at_least=1,
        acts_with="pretrain_data",
    )
    pretrain_column: str = option(
        "text",
        "Column of the texts in pretrain_data.",
        group="data",
        acts_with="pretrain_data",
    )
    max_epochs: int = option(
        1,
        "Passes over the samples of one step.",
        group="algorithm",
        at_least=1,
    )
    freezing_actor_steps: int = option(
        -1,
        "Train only the critic in the first N steps; -1 is off.",
        group="algorithm",
        at_least=-1,
    )
    enable_ema: bool = option(
        False,
        "Keep a moving average of the actor and save it in OUTPUT_DIR/model_ema.",
        group="algorithm",
    )
    ema_beta: float = option(
        0.992,
        "Weight of the past in the moving average.",
        group="algorithm",
        at_least=0,
        at_most=1,
        acts_with="enable_ema",
    )
    turn_credit: str = option(
        "last",
        "What gamma counts from the reward at the end of an episode backwards: last, its "
        "tokens; discounted, its turns.",
        group="algorithm",
        acts_with="environment or tools",
        choices=("last", "discounted"),
    )
    lora_rank: int = option(
        0,
        "Train adapters of this rank on the actor instead of its weights; 0 trains the weights.",
        group="training",
        at_least=0,
        common=True,
    )
    lora_alpha: float = option(
        16.0,
        "Adapters count lora_alpha / lora_rank.",
        group="training",
        above=0,
        acts_with="lora_rank",
    )
    lora_dropout: float = option(
        0.0,
        "Probability of leaving an input of an adapter out.",
        group="training",
        at_least=0,
        at_most=0.99,
        acts_with="lora_rank",
    )
    target_modules: tuple[str, ...] = option(
        ("all-linear",),
        "Layers that get adapters: names of linear layers, or all-linear.",
        group="training",
        acts_with="lora_rank",
    )
    freeze_prefix: tuple[str, ...] = option(
        (),
        "Parts of actor and critic that are not trained, by the beginnings of their names: "
        "visual is the vision tower of Qwen-VL.",
        group="training",
    )
    micro_batch_tokens: int | None = option(
        None,
        "Cut micro-batches by this many tokens, padding included, instead of by rows.",
        group="training",
        at_least=1,
    )
    peak_tflops: float | None = option(
        None,
        "Peak of a device for the metric mfu, in 1e12 operations per second; unset knows "
        "common GPUs.",
        group="monitoring",
        above=0,
    )
    alarm_kl: float | None = option(
        None,
        "Warn when the KL to the reference or of an update exceeds this.",
        group="monitoring",
        above=0,
        may_change=True,
    )
    alarm_entropy: float | None = option(
        None,
        "Warn when the entropy falls below this.",
        group="monitoring",
        above=0,
        may_change=True,
    )
    alarm_length: float | None = option(
        None,
        "Warn when the mean response length exceeds this.",
        group="monitoring",
        above=0,
        may_change=True,
    )
    alarm_reward_std: float | None = option(
        None,
        "Warn when the standard deviation of rewards falls below this.",
        group="monitoring",
        above=0,
        may_change=True,
    )
    stop_on_alarm: bool = option(
        False,
        "End the run after the step of an alarm, with a checkpoint and exit code 9; also "
        "without any alarm_* bound numbers that are not finite, skipped steps and steps that "
        "change nothing are alarms.",
        group="monitoring",
        may_change=True,
    )
    parity_check_steps: int = option(
        0,
        "Compare engine and trainer logprobs in the first step and every N; 0: first only, -1: "
        "never.",
        group="monitoring",
        at_least=-1,
    )
    parity_limit: float | None = option(
        None,
        "Mean distance of a logprob which that allows; unset depends on the dtype.",
        group="monitoring",
        above=0,
    )
    ledger_gate: bool = option(
        True,
        "Compare each row to train on with what the engine wrote down as it sampled, bit for bit.",
        group="monitoring",
    )
    output_dir: str = option(
        "lightrft_run",
        "Folder for everything that the run writes.",
        group="run",
        may_change=True,
        common=True,
        path="folder",
    )
    num_episodes: int = option(
        1,
        "Passes over the training prompts.",
        group="run",
        at_least=1,
        may_change=True,
        common=True,
    )
    max_steps: int | None = option(
        None,
        "Stop after this many steps (rollout batches).",
        group="run",
        at_least=1,
        may_change=True,
        common=True,
    )
    save_steps: int = option(
        -1,
        "Steps between checkpoints; -1 writes one at the end.",
        group="run",
        at_least=-1,
        may_change=True,
        common=True,
    )
    eval_steps: int = option(
        -1,
        "Steps between evaluations; -1 evaluates at both ends.",
        group="run",
        at_least=-1,
        acts_with="eval_data",
        may_change=True,
    )
    logging_steps: int = option(
        1,
        "Steps between lines on the console.",
        group="run",
        at_least=1,
        may_change=True,
    )
    ckpt_path: str | None = option(
        None,
        "Folder of checkpoints; unset is OUTPUT_DIR/checkpoints.",
        group="run",
        may_change=True,
        path="folder",
    )
    save_trajectories: bool = option(
        False,
        "Write tokens with logprobs, advantages and rewards to trajectories.jsonl.",
        group="run",
        may_change=True,
    )
    num_trajectories_to_save: int = option(
        10,
        "Samples of one step in trajectories.jsonl.",
        group="run",
        at_least=1,
        acts_with="save_trajectories",
        may_change=True,
    )
    trajectory_steps: int | None = option(
        None,
        "Write the first step and every N-th to trajectories.jsonl; unset is save_steps, or "
        "every step without. A step that is written costs a forward pass that others save.",
        group="run",
        at_least=1,
        acts_with="save_trajectories",
        may_change=True,
    )
    save_path: str | None = option(
        None,
        "Folder of the trained model; unset is OUTPUT_DIR/model.",
        group="run",
        may_change=True,
        path="folder",
    )
    best_metric: str | None = option(
        None,
        "Keep the model of the best evaluation by this metric, such as eval/reward, in the "
        "folder best beside the checkpoints; larger is better.",
        group="run",
        acts_with="eval_data",
    )
    load_checkpoint: bool = option(
        False,
        "Continue also a complete run; an unfinished one continues without it.",
        group="run",
        may_change=True,
    )
    allow_changes: bool = option(
        False,
        "Continue a run although a changed option makes it inexact.",
        group="run",
        may_change=True,
    )
    max_ckpt_num: int = option(3, "Checkpoints to keep.", group="run", at_least=1, may_change=True)
    max_ckpt_mem: float = option(
        1e8,
        "MB of checkpoints to keep; the newest always stays.",
        group="run",
        above=0,
        finite=False,
        may_change=True,
    )
    loggers: tuple[str, ...] = option(
        (),
        "Further receivers of metrics: trackio, mlflow, swanlab (offline, in OUTPUT_DIR), or "
        "FILE.py:CLASS, made from the options.",
        group="monitoring",
        choices=LOGGERS,
        may_change=True,
    )
    allow_new_weights: tuple[str, ...] = option(
        (),
        "Names of tensors (patterns like 'score.*') that may be missing from a checkpoint, of "
        "another shape or unused; those the model needs are initialised anew, alike in actor and "
        "reference.",
        group="models",
    )
    audit_every: int = option(
        0,
        "Record every K-th step, with the states before and after, for lightrft audit; 0 is never.",
        group="monitoring",
        at_least=0,
        may_change=True,
    )
    check_memory: bool = option(
        True,
        "Compare the memory that a run will need with that of its machine before it starts; "
        "on GPUs refuse what cannot fit.",
        group="run",
        may_change=True,
    )
    num_threads: int | None = option(
        None,
        "CPU threads of a process; unset on a CPU is what the size of the model's operations "
        "is worth, or OMP_NUM_THREADS.",
        group="run",
        at_least=1,
        by_machine=True,
    )
    verbose: bool = option(
        False,
        "Show on the console what else is in OUTPUT_DIR/logs: engine, memory, weight sync "
        "and more metrics of each step.",
        group="monitoring",
        may_change=True,
        common=True,
    )
