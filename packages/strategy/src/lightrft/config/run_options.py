"""The options of a whole run, beside those of its strategy."""

from dataclasses import dataclass

from lightrft.config.options import (
    CRITIC,
    DATA_AND_EVAL,
    DISTILL,
    EVAL,
    NOT_SFT,
    SFT,
    SFT_ALONE,
    algorithm_option,
    data_option,
    engine_option,
    models_option,
    monitoring_option,
    preference_option,
    reward_option,
    rollout_option,
    run_option,
    supervised_option,
    training_option,
)
from lightrft.config.registry import (
    AGGREGATIONS,
    LOGGERS,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    REWARD_LOSSES,
    SCORE_POOLINGS,
    SFT_LOSSES,
    TRAIN_ON,
)
from lightrft.config.strategy_config import ENGINE_TYPES, Arguments, StrategyConfig
from lightrft.engines.types import MIN_TEMPERATURE


@dataclass(kw_only=True)
class RunOptions(StrategyConfig):
    """Options of `TrainConfig` beside those of a strategy; rules and methods are there."""

    prompt_data: str | None = data_option(
        None,
        "Training prompts (rows of lightrft sft, prefer, reward): a JSONL, JSON, Parquet or CSV "
        "file, a folder, or the name of a data set (owner/name[:configuration]); several separated "
        "by commas.",
        common=True,
        path="file",
        commands=SFT,
    )
    prompt_data_probs: tuple[float, ...] = data_option(
        (),
        "Shares of several sources of prompt_data; unset follows their sizes.",
        commands=SFT,
    )
    prompt_split: str = data_option(
        "train",
        "Part of a folder or data set to train on.",
        commands=("data", *SFT),
    )
    eval_data: str | None = data_option(
        None,
        "Evaluation prompts, in the same formats.",
        may_change=True,
        common=True,
        path="file",
        commands=(*EVAL, *SFT),
    )
    eval_split: str = data_option(
        "test",
        "Part of a folder or data set of eval_data.",
        may_change=True,
        commands=(*EVAL, *SFT),
    )
    input_key: str = data_option(
        "input",
        "Column that holds the prompt.",
        common=True,
        commands=DATA_AND_EVAL,
    )
    label_key: str | None = data_option(
        "label",
        "Column that holds the reference answer.",
        common=True,
        commands=DATA_AND_EVAL,
    )
    apply_chat_template: bool = data_option(
        False,
        "Render prompts by the model's chat template.",
        common=True,
        commands=(*DATA_AND_EVAL, *SFT),
    )
    system_prompt: str | None = data_option(
        None,
        "System message put before every prompt.",
        commands=DATA_AND_EVAL,
    )
    input_template: str | None = data_option(
        None,
        "Text around the prompt, which replaces {}.",
        commands=DATA_AND_EVAL,
    )
    prompt_max_len: int = data_option(
        1024,
        "Longest prompt, in tokens; longer ones, and those that leave no room for "
        "generate_max_len in the model's context, are left out and counted.",
        at_least=1,
        common=True,
        commands=DATA_AND_EVAL,
    )
    max_samples: int = data_option(
        1_000_000,
        "Use at most this many training prompts.",
        at_least=1,
        commands=SFT,
    )
    max_eval_samples: int = data_option(
        500,
        "Use at most this many evaluation prompts.",
        at_least=1,
        acts_with="eval_data",
        may_change=True,
        commands=(*EVAL, *SFT),
    )
    images_key: str = data_option(
        "images",
        "Column with the images of a prompt: paths relative to the file, bytes or "
        "base64, one or a list. The default also finds a column called image.",
        commands=(*DATA_AND_EVAL, *SFT),
    )
    videos_key: str = data_option(
        "videos",
        "Column with the videos of a prompt: films, animated images, or objects with frames and "
        "fps. "
        "The default also finds a column called video.",
        commands=(*DATA_AND_EVAL, *SFT),
    )
    audios_key: str = data_option(
        "audios",
        "Column with the sounds of a prompt: paths relative to the file, bytes, base64 or arrays "
        "with a sampling_rate. The default also finds a column called audio.",
        commands=(*DATA_AND_EVAL, *SFT),
    )
    media_root: str | None = data_option(
        None,
        "Folder in which media of rows may lie, beside that of the data file; / allows every file.",
        may_change=True,
        commands=(*DATA_AND_EVAL, *SFT),
    )
    text_only: bool = data_option(
        False,
        "Leave images, videos and sounds of the data out, with their places.",
        commands=(*DATA_AND_EVAL, *SFT),
    )
    max_pixels: int | None = data_option(
        None,
        "Most pixels of an image or frame; larger ones are scaled down. Unset is the "
        "processor's own.",
        at_least=1,
        commands=(*DATA_AND_EVAL, *SFT),
    )
    min_pixels: int | None = data_option(
        None,
        "Fewest pixels of an image or frame; smaller ones are scaled up. Unset is the "
        "processor's own.",
        at_least=1,
        commands=(*DATA_AND_EVAL, *SFT),
    )
    video_fps: float | None = data_option(
        None,
        "Frames a second that are taken of a video. Unset takes 2 of a film, and all of what is "
        "given as frames.",
        above=0,
        commands=(*DATA_AND_EVAL, *SFT),
    )
    video_max_frames: int | None = data_option(
        None,
        "Most frames of a video, spread evenly. Unset takes 768 of a film.",
        at_least=2,
        at_most=4096,
        commands=(*DATA_AND_EVAL, *SFT),
    )
    limit_mm_image_per_prompt: int | None = data_option(
        None,
        "Most images of a prompt; a row with more is an error. Unset sets no limit.",
        at_least=0,
        commands=(*DATA_AND_EVAL, *SFT),
    )
    limit_mm_video_per_prompt: int | None = data_option(
        None,
        "Most videos of a prompt; a row with more is an error. Unset sets no limit.",
        at_least=0,
        commands=(*DATA_AND_EVAL, *SFT),
    )
    limit_mm_audio_per_prompt: int | None = data_option(
        None,
        "Most sounds of a prompt; a row with more is an error. Unset sets no limit.",
        at_least=0,
        commands=(*DATA_AND_EVAL, *SFT),
    )
    reward_fn: tuple[str, ...] = reward_option(
        (),
        "Rewards, summed: boxed_math, gsm8k, unit_tests, judge, verdict, reasoning_gym:NAME or "
        "FILE.py:FUNCTION.",
        common=True,
        path="file",
        commands=DATA_AND_EVAL,
    )
    reward_args: Arguments = reward_option(
        None,
        "Keyword-only arguments of own reward functions.",
        commands=DATA_AND_EVAL,
    )
    reward_timeout_seconds: float = reward_option(
        120.0,
        "Deadline of one call of a reward function.",
        above=0,
        at_most=1e7,
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    reward_weights: tuple[float, ...] = reward_option(
        (),
        "Factor of each reward_fn, then remote_rm_url, then reward_pretrain; unset is 1 each.",
        commands=EVAL,
    )
    reward_pretrain: tuple[str, ...] = reward_option(
        (),
        "Reward models of lightrft reward, or sequence classifiers with one label; their scores "
        "are added.",
    )
    reward_recipe: str | None = reward_option(
        None,
        "TOML file: a table per value of reward_recipe_column with weights of rewards.",
    )
    reward_recipe_column: str = reward_option(
        "task",
        "Column that names the recipe of a row.",
        acts_with="reward_recipe",
    )
    reward_failure: str = reward_option(
        "raise",
        "A failed reward ends the run, or excludes (masks) its sample.",
        choices=("raise", "mask"),
    )
    reward_memory_gb: float | None = reward_option(
        16.0,
        "Memory in GB that the process of an own reward function and its children may hold; "
        "none sets no limit.",
        above=0,
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    reward_env: tuple[str, ...] = reward_option(
        (),
        "Environment variables with secrets that own reward functions may read; others, such "
        "as WANDB_API_KEY, are kept from them.",
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    reward_workers: int = reward_option(
        1,
        "Groups of responses that an own reward function (each in a process of its own), "
        "reasoning_gym or a service scores at once, beside the generation.",
        at_least=1,
        at_most=256,
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    sandbox: str = reward_option(
        "bubblewrap",
        "Where unit_tests and agent_command run programs; unsafe has limits of resources only.",
        choices=("bubblewrap", "unsafe"),
        commands=DATA_AND_EVAL,
    )
    test_timeout_seconds: float = reward_option(
        5.0,
        "Processor time of a process of a program of the reward unit_tests; all of them may take "
        "three times as much, and do nothing for as long.",
        above=0,
        at_most=1e7,
        commands=DATA_AND_EVAL,
    )
    judge_url: str | None = reward_option(
        None,
        "OpenAI-compatible server of the reward judge, http://HOST:PORT/v1; the environment "
        "variable LIGHTRFT_JUDGE_KEY is its key.",
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    judge_model: str | None = reward_option(
        None,
        "Name of the judge's model on judge_url; without that the folder of one, which every rank "
        "loads on the CPU in a process of its own, or policy: the one that is trained, asked "
        "through the engine.",
        commands=DATA_AND_EVAL,
    )
    judge_template: str | None = reward_option(
        None,
        "Text file with the question to the judge: {response} between marks with {mark}, "
        "{prompt} and {label}; with a rubric {question}; for pairs {first} and {second}, for "
        "rankings {responses} instead.",
        acts_with="judge_model",
        path="file",
        commands=DATA_AND_EVAL,
    )
    judge_rubric: str | None = reward_option(
        None,
        "TOML file with a table a part, each with question and weight: every response gets a grade "
        "by each of them, and their weighted mean.",
        acts_with="judge_model",
        path="file",
        commands=DATA_AND_EVAL,
    )
    judge_compare: str = reward_option(
        "none",
        "What the judge compares: none grades each response alone; pairs asks about every two "
        "responses to a prompt, in both orders; ranking ranks them all, in two orders; verdicts is "
        "pairs for a judge that was trained on both_orders:FILE, with the questions of that.",
        choices=("none", "pairs", "ranking", "verdicts"),
        acts_with="judge_model",
    )
    judge_prices: Arguments = reward_option(
        None,
        "Prices of a million tokens of the judge, input=0.5 output=1.5, for the metric judge/cost.",
        acts_with="judge_model",
        may_change=True,
    )
    judge_args: Arguments = reward_option(
        None,
        "Fields of the request to the judge, such as max_tokens=2048.",
        acts_with="judge_model",
        commands=DATA_AND_EVAL,
    )
    remote_rm_token: str | None = reward_option(
        None,
        "Token of the reward services, sent as Authorization: Bearer; unset takes "
        "LIGHTRFT_REWARD_TOKEN of the environment.",
        may_change=True,
        secret=True,
        acts_with="remote_rm_url",
        commands=DATA_AND_EVAL,
    )
    rollout_batch_size: int = rollout_option(
        512,
        "Prompts per step, over all ranks.",
        at_least=1,
        common=True,
    )
    generate_max_len: int = rollout_option(
        1024,
        "Longest response, in tokens.",
        at_least=1,
        common=True,
        commands=DATA_AND_EVAL,
    )
    temperature: float = rollout_option(
        1.0,
        "Sampling temperature.",
        at_least=MIN_TEMPERATURE,
        common=True,
        commands=EVAL,
    )
    top_p: float = rollout_option(
        1.0,
        "Sample from the smallest set of tokens with this probability; 1 keeps all.",
        above=0,
        at_most=1,
        commands=EVAL,
    )
    top_k: int = rollout_option(
        -1,
        "Sample from the k most likely tokens; -1 keeps all.",
        at_least=-1,
        commands=EVAL,
    )
    min_p: float = rollout_option(
        0.0,
        "Sample from the tokens with at least this share of the probability of the most likely "
        "one; 0 keeps all.",
        at_least=0,
        at_most=1,
        commands=EVAL,
    )
    stop: tuple[str, ...] = rollout_option(
        (),
        "Texts that end a response, beside the model's own end; they stay in it.",
        commands=EVAL,
    )
    use_fire: bool = rollout_option(
        False,
        "Draw the first token at first_token_temperature (FIRE).",
    )
    first_token_temperature: float = rollout_option(
        10.0,
        "Temperature of the first token with use_fire.",
        at_least=MIN_TEMPERATURE,
        acts_with="use_fire",
    )
    max_num_gen_batches: int = rollout_option(
        10,
        "Rollout batches of one step with dynamic_sampling, at most.",
        at_least=1,
        acts_with="dynamic_sampling",
    )
    rollout_lag: int = rollout_option(
        0,
        "Updates between the weights that sample a step and those that it trains: with 1 the next "
        "step is sampled before this one is trained on.",
        at_least=0,
    )
    rollout_ranks: int = rollout_option(
        0,
        "Processes that only generate, the last ones of the launch: they sample the steps to come "
        "while the others train. 0 lets every process do both.",
        at_least=0,
    )
    stream_chunk: int | None = rollout_option(
        None,
        "Tokens that an open response samples between two updates: steps train on the groups that "
        "are complete, the others go on. Unset waits for all responses of a step.",
        at_least=1,
    )
    stream_prompts: int | None = rollout_option(
        None,
        "Prompts in flight with stream_chunk; unset is 1.5 rollout_batch_size, and with tool_lag "
        "tool_lag * (max_turns - 1) more of them, up to max_staleness + 1.",
        at_least=1,
        acts_with="stream_chunk",
    )
    max_staleness: int = rollout_option(
        4,
        "Updates between the first token of a response and the step that trains on it, at most, "
        "with stream_chunk.",
        at_least=1,
        acts_with="stream_chunk",
    )
    tool_lag: int = rollout_option(
        0,
        "Rounds of stream_chunk that pass between a turn of an episode and the next one, while its "
        "tools, or its reward, take their time; 0 waits for them within the round.",
        at_least=0,
    )
    environment: str | None = rollout_option(
        None,
        "Class FILE.py:NAME whose reset(**row) begins an episode and whose other public "
        "methods are tools of the model; get_reward() is added to the reward. A dict of classes "
        "is chosen from by the column environment. Also skyrl_gym:FILE.py:NAME, skyrl_gym:ID and "
        "openenv:http://HOST:PORT.",
        path="file",
        commands=DATA_AND_EVAL,
    )
    tools: tuple[str, ...] = rollout_option(
        (),
        "Functions FILE.py:NAME that the model may call, beside the environment's methods.",
        path="file",
        commands=DATA_AND_EVAL,
    )
    agent: str | None = rollout_option(
        None,
        "Function FILE.py:NAME, async def run(base_url, api_key, row) -> reward, a dict of named "
        "parts or None, which calls the model through OpenAI's protocol; or verifiers:NAME.",
        path="file",
        commands=EVAL,
    )
    agent_command: str | None = rollout_option(
        None,
        "Command of an agent that is a program, such as 'prog {base_url} {row}' with the row as a "
        "JSON file; it runs in the sandbox, and the last line that it prints is its reward.",
        commands=EVAL,
    )
    agent_timeout_seconds: float = rollout_option(
        600.0,
        "Deadline of one episode of the agent; past it the episode has failed.",
        acts_with="agent or agent_command",
        above=0,
        may_change=True,
        commands=EVAL,
    )
    max_agent_calls: int = rollout_option(
        64,
        "Calls that an episode of the agent may make; further ones are refused.",
        acts_with="agent or agent_command",
        at_least=1,
        at_most=128,
        commands=EVAL,
    )
    agent_denominator: str = algorithm_option(
        "episode",
        "What counts as one sequence where a loss is a mean over sequences: an episode of the "
        "agent with all its branches, or each branch.",
        acts_with="agent or agent_command",
        choices=("episode", "branch"),
    )
    max_turns: int = rollout_option(
        8,
        "Turns of an episode; the calls in the last one are not made. Of an agent, turns of which "
        "a conversation of full length has room.",
        acts_with="environment or tools or agent or agent_command",
        at_least=1,
        commands=DATA_AND_EVAL,
    )
    environment_args: Arguments = rollout_option(
        None,
        "Keyword arguments of the environment's class, for each episode; of SkyRL-Gym's make its "
        "env_config.",
        acts_with="environment",
        commands=DATA_AND_EVAL,
    )
    environment_env: tuple[str, ...] = rollout_option(
        (),
        "Environment variables with secrets that environments, tools and agents that are functions "
        "may read; others are kept from them.",
        acts_with="environment or tools or agent",
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    environment_memory_gb: float | None = rollout_option(
        16.0,
        "Memory in GB that a worker of environments and its children may hold; none sets no limit.",
        acts_with="environment or tools",
        above=0,
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    max_tool_calls: int | None = rollout_option(
        None,
        "Calls that an episode may make; further ones are answered by an error.",
        acts_with="environment or tools",
        at_least=1,
        commands=EVAL,
    )
    tool_timeout_seconds: float = rollout_option(
        60.0,
        "Deadline of one reset, call or reward of an environment; past it its worker is killed.",
        acts_with="environment or tools",
        above=0,
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    tool_parser: str = rollout_option(
        "auto",
        "How calls are written; auto takes the tokenizer's response template or what reads the "
        "calls that its chat template writes. A run begins only if a call is read back.",
        acts_with="environment or tools or agent or agent_command",
        choices=(
            *("auto", "hermes", "xml", "glm", "deepseek", "lfm", "gemma", "harmony", "mistral"),
            *("llama", "pythonic"),
        ),
        commands=EVAL,
    )
    max_observation_tokens: int = rollout_option(
        1024,
        "Longest answer of a call, in tokens; the rest is cut.",
        acts_with="environment or tools or agent or agent_command",
        at_least=16,
        commands=EVAL,
    )
    environment_workers: int | None = rollout_option(
        None,
        "Worker processes that host the environments or agents of one rank; unset is one a core.",
        acts_with="environment or tools or agent or agent_command",
        at_least=1,
        may_change=True,
        commands=DATA_AND_EVAL,
    )
    late_join: bool = rollout_option(
        False,
        "Let an episode whose tool is busy join a later round, once half of the others are "
        "ready or all that took no part in the last one; off, a round waits for all, and timing "
        "changes no bit.",
        acts_with="environment or tools or agent or agent_command",
        commands=EVAL,
    )
    chat_template: str | None = data_option(
        None,
        "File with a Jinja chat template in place of the tokenizer's.",
        path="file",
        acts_with="apply_chat_template",
        commands=(*DATA_AND_EVAL, *SFT),
    )
    chat_template_args: Arguments = data_option(
        None,
        "Variables of the chat template, such as enable_thinking=false.",
        acts_with="apply_chat_template",
        commands=(*DATA_AND_EVAL, *SFT),
    )
    use_rollout_logprobs: bool = rollout_option(
        False,
        "Take the old logprobs from the engine instead of a forward pass of the actor.",
    )
    use_wandb: str | bool | None = monitoring_option(
        False,
        "Log to Weights & Biases; a key given here is neither shown nor saved, without one "
        "WANDB_API_KEY or an earlier login counts.",
        secret=True,
    )
    wandb_org: str | None = monitoring_option(None, "W&B entity, SwanLab workspace.")
    wandb_group: str | None = monitoring_option(None, "Group in W&B, Trackio and SwanLab.")
    wandb_project: str = monitoring_option(
        "lightrft_train_ppo",
        "Project (MLflow: experiment) of the trackers.",
    )
    wandb_run_name: str = monitoring_option(
        "ppo_%m%dT%H:%M",
        "W&B name of the run; %-codes are those of strftime.",
    )
    heartbeat_seconds: float = monitoring_option(
        60.0,
        "Say which phase is under way after so long without a line.",
        above=0,
        at_most=1e7,
    )
    engine_type: str = engine_option(
        "auto",
        "Rollout engine; auto takes vllm or sglang on a GPU, else hf.",
        choices=ENGINE_TYPES,
        common=True,
        commands=EVAL,
    )
    policy_loss: str | None = algorithm_option(
        None,
        "Policy loss; unset is ppo, the clipped surrogate.",
        choices=POLICY_LOSSES,
        common=True,
    )
    policy_loss_args: Arguments = algorithm_option(
        None,
        "Hyper-parameters of the policy loss under their own names.",
    )
    loss_agg_mode: str | None = algorithm_option(
        None,
        "How the losses of tokens become one number; unset is that of the loss's paper.",
        choices=AGGREGATIONS,
    )
    eps_clip: float | None = algorithm_option(
        None,
        "Clip range of the ratio; unset is that of the loss's paper.",
        at_least=0,
    )
    eps_clip_low: float | None = algorithm_option(
        None,
        "Lower clip range; unset is eps_clip.",
        at_least=0,
        at_most=1,
    )
    eps_clip_high: float | None = algorithm_option(
        None,
        "Upper clip range; unset is eps_clip.",
        at_least=0,
    )
    use_gspo: bool = algorithm_option(
        False,
        "The same as policy_loss gspo.",
    )
    use_cpg_loss: bool = algorithm_option(
        False,
        "The same as policy_loss cpgd.",
    )
    dual_clip: float | None = algorithm_option(
        None,
        "Cap of the ratio where the advantage is negative; unset is off.",
        above=1,
    )
    high_entropy_token_ratio: float = algorithm_option(
        0.0,
        "Train on this share of tokens, the least certain ones; 0 takes all.",
        at_least=0,
        at_most=1,
    )
    high_entropy_scope: str = algorithm_option(
        "batch",
        "Take that share of the optimizer batch or of each response.",
        choices=("batch", "sequence"),
        acts_with="high_entropy_token_ratio",
    )
    off_policy_correction: str | tuple[str, ...] | None = algorithm_option(
        None,
        "Corrections for the difference between engine and trainer: presets (tis, icepop, "
        "mis, geometric ...) or terms such as reject:k3:sequence:high=0.01; several at once. dppo, "
        "off-policy-mask and pairs new/engine, new/old bound the policy that each update moves. "
        "Unset is none, and tis with rollout_lag and stream_chunk, where none must be given.",
    )
    advantage_args: Arguments = algorithm_option(
        None,
        "Hyper-parameters of the advantage estimator under their own names.",
    )
    correction_args: Arguments = algorithm_option(
        None,
        "Bounds and further arguments of off_policy_correction.",
    )
    correction_low: float | None = algorithm_option(
        None,
        "Lower bound of off_policy_correction; unset is its own.",
        at_least=0,
        acts_with="off_policy_correction or rollout_lag or stream_chunk",
    )
    correction_high: float | None = algorithm_option(
        None,
        "Upper bound of off_policy_correction; unset is its own.",
        above=0,
        acts_with="off_policy_correction or rollout_lag or stream_chunk",
    )
    value_clip: float = algorithm_option(
        0.2,
        "Clip range of the change of a value; 0 is off.",
        at_least=0,
        acts_with=CRITIC,
    )
    gamma: float = algorithm_option(1.0, "Discount per token.", at_least=0, at_most=1)
    lambd: float = algorithm_option(
        0.95,
        "Lambda of generalised advantage estimation; `policy_lambd` or `length_alpha` in "
        "advantage_args give the policy one of its own, and this is that of the returns.",
        at_least=0,
        at_most=1,
        acts_with=CRITIC,
    )
    init_kl_coef: float = algorithm_option(
        0.0,
        "Weight of the KL divergence to the initial policy; 0 loads no reference model.",
        at_least=0,
        common=True,
    )
    kl_target: float | None = algorithm_option(
        None,
        "Adapt the weight towards this KL divergence per response.",
        above=0,
        acts_with="init_kl_coef",
    )
    kl_horizon: int = algorithm_option(
        10_000,
        "Samples over which the weight adapts to kl_target.",
        at_least=1,
        acts_with="kl_target",
    )
    teacher: str | None = algorithm_option(
        None,
        "Frozen model with the same tokens whose log-probabilities of the sampled tokens are an "
        "advantage: teacher_coef * (log p - log q). A folder; or http://HOST:PORT/v1[#MODEL], an "
        "OpenAI-compatible server with prompt_logprobs, whose key is the environment variable "
        "LIGHTRFT_TEACHER_KEY.",
        common=True,
        path="folder",
        commands=DISTILL,
    )
    teachers: tuple[str, ...] = algorithm_option(
        (),
        "Several teachers, NAME=TEACHER each; teacher_column says which one a row has.",
        commands=DISTILL,
    )
    teacher_column: str = algorithm_option(
        "teacher",
        "Column of the data with the name of the row's teacher.",
        acts_with="teachers",
        commands=DISTILL,
    )
    teacher_weights: tuple[float, ...] = algorithm_option(
        (),
        "Factor of each of the teachers, in their order; unset is 1 each.",
        acts_with="teachers",
        commands=DISTILL,
    )
    teacher_prompt_column: str | None = algorithm_option(
        None,
        "Column of the data that the teacher reads after the prompt, and the student does not: a "
        "solution, or feedback.",
        acts_with="teacher or teachers",
    )
    teacher_top_k: int | None = algorithm_option(
        None,
        "Tokens of which a served teacher gives probabilities, for divergences on rows; all others "
        "are one further outcome.",
        at_least=1,
        acts_with="teacher_form reverse or teacher_form forward or teacher_form jsd",
        commands=DISTILL,
    )
    teacher_tolerance: float = algorithm_option(
        0.01,
        "Mean difference in nats a token up to which a server's answers to one question are alike.",
        above=0,
        may_change=True,
        commands=DISTILL,
    )
    teacher_timeout_seconds: float = algorithm_option(
        600.0,
        "Deadline of a server's answers to the rows of one step, repetitions included.",
        above=0,
        may_change=True,
        commands=DISTILL,
    )
    offpolicy_fraction: float = algorithm_option(
        1.0,
        "Share of the rows of a step whose completions are those of the data; the student samples "
        "the others. Of the divergences on rows.",
        at_least=0,
        at_most=1,
        acts_with="teacher_form reverse or teacher_form forward or teacher_form jsd",
        commands=DISTILL,
    )
    teacher_coef: float = algorithm_option(
        1.0,
        "Weight of the teacher's advantage beside that of the rewards.",
        above=0,
        acts_with="teacher or teachers",
    )
    teacher_form: str = algorithm_option(
        "sampled",
        "Divergence from the teacher: sampled is that of sampled tokens; reverse, forward and jsd "
        "are those of the whole vocabulary, of the rows of lightrft distill.",
        acts_with="teacher or teachers",
        commands=DISTILL,
    )
    teacher_beta: float = algorithm_option(
        0.5,
        "Weight of the teacher in the mixture of jsd.",
        above=0,
        at_most=0.99,
        acts_with="teacher_form jsd",
        commands=DISTILL,
    )
    entropy_coef: float = algorithm_option(0.0, "Weight of the entropy bonus.", at_least=0)
    aux_loss_coef: float = algorithm_option(
        0.0,
        "Weight of the loss that balances the experts of a mixture-of-experts model.",
        at_least=0,
    )
    ptx_coef: float = algorithm_option(
        0.05,
        "Weight of the language-modelling loss on pretrain_data.",
        at_least=0,
        acts_with="pretrain_data",
    )
    ptx_batch_size: int | None = algorithm_option(
        None,
        "Rows of pretrain_data per optimizer step over all ranks; unset is train_batch_size.",
        at_least=1,
        acts_with="pretrain_data",
    )
    pretrain_column: str = data_option(
        "text",
        "Column of the texts in pretrain_data, where it has texts.",
        acts_with="pretrain_data",
    )
    max_epochs: int = algorithm_option(
        1,
        "Passes over the samples of one step; of sft, prefer and reward, over their rows.",
        at_least=1,
        commands=SFT,
    )
    freezing_actor_steps: int = algorithm_option(
        -1,
        "Train only the critic in the first N steps; -1 is off.",
        at_least=-1,
    )
    enable_ema: bool = algorithm_option(
        False,
        "Keep a moving average of the actor and save it in OUTPUT_DIR/model_ema.",
    )
    ema_beta: float = algorithm_option(
        0.992,
        "Weight of the past in the moving average.",
        at_least=0,
        at_most=1,
        acts_with="enable_ema",
    )
    turn_credit: str = algorithm_option(
        "last",
        "What gamma counts from the reward at the end of an episode backwards: last, its "
        "tokens; discounted, its turns.",
        acts_with="environment or tools or agent or agent_command",
        choices=("last", "discounted"),
    )
    train_on: str | None = supervised_option(
        None,
        "Tokens whose loss counts: all, the completion, every assistant turn or the last one; "
        "unset is all of a text, the completion after a prompt, the assistant turns of a chat.",
        choices=TRAIN_ON,
        common=True,
        commands=SFT_ALONE,
    )
    preference_loss: tuple[str, ...] = preference_option(
        ("dpo",),
        "Preference losses, whose weighted sum is minimised; names of TRL are known, too.",
        choices=PREFERENCE_LOSSES,
        common=True,
    )
    preference_weights: tuple[float, ...] = preference_option(
        (),
        "Weight of each preference loss; unset is 1 each.",
        at_least=0,
    )
    preference_args: Arguments = preference_option(
        None,
        "Hyper-parameters of the preference losses under their own names, such as beta=0.1; one "
        "reaches every loss that has it.",
        common=True,
    )
    ref_logprobs: str | None = preference_option(
        None,
        "File of the reference's log-probabilities of all answers: computed before the first step "
        "where it does not exist, and read instead of a reference model where it does and is of "
        "the same data, template and model. Unset computes them on the way.",
        may_change=True,
    )
    train_on_regex: str | None = supervised_option(
        None,
        "Of these tokens, only those with a character of a match of this regular expression (of "
        "its first group) in the text of the row; rows without one are left out and counted.",
        commands=SFT_ALONE,
    )
    sft_loss: str = supervised_option(
        "token-mean",
        "Mean of -log p over all trained tokens, mean of the rows' means, or dft, where each "
        "token also weighs its own probability.",
        choices=SFT_LOSSES,
        common=True,
        commands=SFT_ALONE,
    )
    max_row_tokens: int = supervised_option(
        2048,
        "Longest row, in tokens; longer ones, and those beyond the model's context, are left out "
        "and counted.",
        at_least=2,
        common=True,
    )
    reward_loss: str | None = supervised_option(
        None,
        "Loss of a reward model; unset is bradley_terry for pairs and bce for labelled answers.",
        choices=REWARD_LOSSES,
        common=True,
        commands=("reward",),
    )
    reward_loss_args: Arguments = supervised_option(
        None,
        "Hyper-parameters of the reward loss under their own names.",
        commands=("reward",),
    )
    reward_pooling: str | None = supervised_option(
        None,
        "Hidden states that a score is made of: the last token's, or all, by learned attention; "
        "unset is that of a reward model which is trained on, else last.",
        choices=SCORE_POOLINGS,
        commands=("reward",),
    )
    reward_heads: tuple[str, ...] = supervised_option(
        (),
        "Names of scores, each with a head and rankings of its own (ranks by name in the rows); "
        "unset is one score, or those of a reward model which is trained on.",
        commands=("reward",),
    )
    reward_head_weights: tuple[float, ...] = supervised_option(
        (),
        "Weight of each score in the reward and of its loss; unset is 1 each.",
        commands=("reward",),
        acts_with="reward_heads",
    )
    reward_head_losses: tuple[str, ...] = supervised_option(
        (),
        "Loss of each score; unset is reward_loss for all.",
        choices=REWARD_LOSSES,
        commands=("reward",),
        acts_with="reward_heads",
    )
    centering_coef: float = supervised_option(
        0.0,
        "Weight of (chosen score + rejected score)^2, which keeps scores around 0; 0.01 is usual.",
        at_least=0,
        commands=("reward",),
    )
    lora_rank: int = training_option(
        0,
        "Train adapters of this rank on the actor instead of its weights; 0 trains the weights.",
        at_least=0,
        common=True,
    )
    lora_alpha: float = training_option(
        16.0,
        "Adapters count lora_alpha / lora_rank.",
        above=0,
        acts_with="lora_rank",
    )
    lora_path: str | None = training_option(
        None,
        "Adapters to start from, a folder in PEFT's format such as model/adapter of a run; of the "
        "same lora_rank, lora_alpha and layers. A reference is the model without them.",
    )
    lora_dropout: float = training_option(
        0.0,
        "Probability of leaving an input of an adapter out; without effect in reinforcement, where "
        "the ratios to earlier logprobs would be random.",
        at_least=0,
        at_most=0.99,
        acts_with="lora_rank",
    )
    target_modules: tuple[str, ...] = training_option(
        ("all-linear",),
        "Layers that get adapters: last names of linear layers, regular expressions for whole "
        "names (language_model.* is the text of a vision-language model), or all-linear.",
        acts_with="lora_rank",
    )
    freeze_prefix: tuple[str, ...] = training_option(
        (),
        "Parts of actor and critic that are not trained, by regular expressions for the "
        "beginnings of their names: visual is the vision tower of Qwen-VL with its projector, "
        "visual(?!\\.merger) without.",
    )
    micro_batch_tokens: int | None = training_option(
        None,
        "Cut micro-batches by this many tokens, padding included, instead of by rows. Unset, it is "
        "decided at the start on GPUs unless a micro_* size was given: the largest power of two up "
        "to 32,768 whose memory plan fits, and at most what the batch has.",
        at_least=1,
        by_machine=True,
    )
    peak_tflops: float | None = monitoring_option(
        None,
        "Peak of a device for the metric mfu, in 1e12 operations per second; unset knows "
        "common GPUs.",
        above=0,
        may_change=False,
    )
    alarm_kl: float | None = monitoring_option(
        None,
        "Warn when the KL to the reference or of an update exceeds this.",
        above=0,
        commands=NOT_SFT,
    )
    alarm_entropy: float | None = monitoring_option(
        None,
        "Warn when the entropy falls below this.",
        above=0,
        commands=NOT_SFT,
    )
    alarm_length: float | None = monitoring_option(
        None,
        "Warn when the mean response length exceeds this.",
        above=0,
        commands=NOT_SFT,
    )
    alarm_reward_std: float | None = monitoring_option(
        None,
        "Warn when the standard deviation of rewards falls below this.",
        above=0,
        commands=NOT_SFT,
    )
    stop_on_alarm: bool = monitoring_option(
        False,
        "End the run after the step of an alarm, with a checkpoint and exit code 9; also "
        "without any alarm_* bound numbers that are not finite, skipped steps and steps that "
        "change nothing are alarms.",
    )
    parity_check_steps: int = monitoring_option(
        0,
        "Compare engine and trainer logprobs in the first step and every N; 0: first only (with "
        "stream_chunk every one), -1: never.",
        at_least=-1,
        may_change=False,
        commands=NOT_SFT,
    )
    parity_limit: float | None = monitoring_option(
        None,
        "Mean distance of a logprob which that allows; unset depends on the dtype.",
        above=0,
        may_change=False,
        commands=NOT_SFT,
    )
    ledger_gate: bool = monitoring_option(
        True,
        "Compare each row to train on with what was written down as it was sampled and scored.",
        may_change=False,
        commands=NOT_SFT,
    )
    output_dir: str = run_option(
        "lightrft_run",
        "Folder for everything that the run writes.",
        common=True,
        path="folder",
    )
    num_episodes: int = run_option(
        1,
        "Passes over the training prompts; they set the number of steps. With dynamic_sampling a "
        "step may draw more prompts, and the same steps then make more passes.",
        at_least=1,
        common=True,
        commands=NOT_SFT,
    )
    max_steps: int | None = run_option(
        None,
        "Stop after this many steps (rollout batches).",
        at_least=1,
        common=True,
    )
    save_steps: int = run_option(
        -1,
        "Steps between checkpoints; -1 writes one at the end.",
        at_least=-1,
        common=True,
    )
    eval_steps: int = run_option(
        -1,
        "Steps between evaluations; -1 evaluates at both ends.",
        at_least=-1,
        acts_with="eval_data",
    )
    logging_steps: int = run_option(
        1,
        "Steps between lines on the console.",
        at_least=1,
    )
    sample_steps: int = run_option(
        10,
        "Steps between samples on the console, the best and the worst of a prompt; 0 shows none.",
        at_least=0,
        commands=NOT_SFT,
    )
    ckpt_path: str | None = run_option(
        None,
        "Folder of checkpoints; unset is OUTPUT_DIR/checkpoints.",
        path="folder",
    )
    save_trajectories: bool = run_option(
        False,
        "Write tokens with logprobs, advantages and rewards to trajectories.jsonl.",
        commands=NOT_SFT,
    )
    num_trajectories_to_save: int = run_option(
        10,
        "Samples of one step in trajectories.jsonl.",
        at_least=1,
        acts_with="save_trajectories",
        commands=NOT_SFT,
    )
    trajectory_steps: int | None = run_option(
        None,
        "Write the first step and every N-th to trajectories.jsonl; unset is save_steps, or "
        "every step without. A step that is written costs a forward pass that others save.",
        at_least=1,
        acts_with="save_trajectories",
        commands=NOT_SFT,
    )
    save_rollouts: bool = run_option(
        False,
        "Write every sample with its token ids to rollouts.jsonl, which lightrft rows reads: some "
        "six bytes a token.",
        commands=EVAL,
    )
    save_path: str | None = run_option(
        None,
        "Folder of the trained model; unset is OUTPUT_DIR/model.",
        path="folder",
    )
    best_metric: str | None = run_option(
        None,
        "Keep the model of the best evaluation by this metric, such as eval/reward, in the "
        "folder best beside the checkpoints: the smallest eval/loss, perplexity, "
        "calibration_error, truncated_share or masked_share, of others the largest.",
        acts_with="eval_data",
        may_change=False,
    )
    load_checkpoint: bool = run_option(
        False,
        "Continue also a complete run; an unfinished one continues without it.",
    )
    allow_changes: bool = run_option(
        False,
        "Continue a run although a changed option makes it inexact.",
    )
    max_ckpt_num: int = run_option(3, "Checkpoints to keep.", at_least=1)
    max_ckpt_mem: float = run_option(
        1e8,
        "MB of checkpoints to keep; the newest always stays.",
        above=0,
        finite=False,
    )
    loggers: tuple[str, ...] = monitoring_option(
        (),
        "Further receivers of metrics: trackio, mlflow, swanlab (offline, in OUTPUT_DIR), or "
        "FILE.py:CLASS, made from the options.",
        choices=LOGGERS,
    )
    allow_new_weights: tuple[str, ...] = models_option(
        (),
        "Names of tensors (patterns like 'score.*') that may be missing from a checkpoint, of "
        "another shape or unused; those the model needs are initialised anew, alike in actor and "
        "reference.",
        commands=SFT,
    )
    audit_every: int = monitoring_option(
        0,
        "Record every K-th step, with the states before and after, for lightrft audit; 0 is never.",
        at_least=0,
    )
    check_memory: bool = run_option(
        True,
        "Compare the memory that a run will need with that of its machine before it starts; "
        "on GPUs refuse what cannot fit.",
    )
    num_threads: int | None = run_option(
        None,
        "CPU threads of a process; unset on a CPU is what the size of the model's operations "
        "is worth, or OMP_NUM_THREADS.",
        at_least=1,
        by_machine=True,
        may_change=False,
    )
    verbose: bool = monitoring_option(
        False,
        "Show on the console what else is in OUTPUT_DIR/logs: engine, memory, weight sync "
        "and more metrics of each step.",
        common=True,
    )
