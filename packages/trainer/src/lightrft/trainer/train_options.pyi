"""Keywords of `lightrft.trainer.train` and its like. Written by docs/generate.py."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypedDict

class TrainOptions(TypedDict, total=False):
    """Options of `TrainConfig`; what is not given keeps its default."""

    seed: int
    """Seed of all random number generators."""
    bf16: bool | None
    """Compute in bfloat16; unset means yes on a GPU and float32 on a CPU."""
    timeout_minutes: float
    """Deadline of every collective and of every phase."""
    max_norm: float
    """Global gradient norm above which gradients are scaled down; 0 never clips."""
    micro_train_batch_size: int
    """Samples per rank in one forward and backward pass."""
    train_batch_size: int
    """Samples per optimizer step over all ranks. With the defaults that is 512 * 8 / 128 = 32
    optimizer steps per rollout (rollout_batch_size * n_samples_per_prompt / train_batch_size,
    times max_epochs); the later ones are off-policy."""
    actor_learning_rate: float | None
    """Peak learning rate of the model that is trained; unset means train 1e-06, sft 1e-05
    (0.0001 for adapters), prefer 1e-06 (1e-05 for adapters), reward 1e-05 (0.0001 for
    adapters), distill on rows 1e-05 (0.0001 for adapters). At most 1: Adam moves each weight by
    about as much a step, and weights are smaller."""
    adam_betas: tuple[float, float]
    """Adam's decay rates of the two moments."""
    learning_rate_factors: Mapping[str, str | int | float | bool] | None
    """Learning rates of parts, as factors of the model's: visual=0.1 is the vision tower with
    its projector, lora_B=16 is LoRA+. Regular expressions for parts of names; the first that
    matches counts."""
    l2: float
    """Decoupled weight decay of matrices."""
    lr_warmup_ratio: float
    """Share of all optimizer steps in which the learning rate rises; the first of them has a
    part of it already."""
    lr_scheduler: Literal["cosine_with_min_lr", "linear", "constant"]
    """How the learning rate changes after the rise."""
    min_lr_ratio: float
    """Final over peak learning rate of cosine_with_min_lr."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass."""
    packing_samples: bool | None
    """Pack several samples into one row without padding; unset means yes on GPUs with
    FlashAttention in bfloat16, where the models can and no micro_* size was changed."""
    shared_prefix: Literal["auto", "off"]
    """Compute what packed samples begin with alike once, such as the prompt of a group: auto
    does so in micro-batches where it saves enough; off computes it for each sample."""
    use_mp_opt: bool
    """FSDP2: bfloat16 parameters with float32 master copies in the optimizer."""
    fused_linear_logprob: bool | None
    """Compute logprobs, where it allows it the policy loss, and the output projection together,
    in chunks; unset means yes on GPUs and no on CPUs."""
    chunk_size: int | None
    """Vocabulary columns per chunk of the fused output projection; unset is what suits the
    device."""
    meta_init: bool | None
    """FSDP2: build models without memory: ranks read their own rows of the files; unset means
    yes on GPUs, above 2 GB of weights and without allow_new_weights."""
    fsdp: bool
    """Use FSDP2 instead of DeepSpeed ZeRO; without that package it is used anyway, unless an
    option of DeepSpeed's is set."""
    zero_stage: int
    """DeepSpeed ZeRO stage."""
    fsdp_cpu_offload: bool
    """FSDP2: keep parameters, gradients and optimizer states on the CPU."""
    adam_offload: bool
    """Keep Adam's states on the CPU (FSDP2: between training phases)."""
    adam_8bit: bool
    """FSDP2 in one process: keep Adam's moments in 8 bits a number (bitsandbytes)."""
    zpg: int
    """ZeRO++ secondary partition size; 1 is off."""
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] | None
    """DeepSpeed: dtype in which gradients accumulate; unset is fp32."""
    overlap_comm: bool
    """DeepSpeed: reduce gradients while the backward pass runs."""
    sp_size: int
    """Ranks that share one sequence (sequence parallelism)."""
    local_rank: int
    """Index of this process' device on its node; -1 reads LOCAL_RANK."""
    async_save: bool
    """Write checkpoints in the background, from copies in host memory."""
    compile_backend: Literal["inductor", "aot_eager", "eager"] | None
    """FSDP2: compile every block by torch.compile with this backend; unset does not."""
    devices_shared: bool
    """Lets ranks that only generate use the GPUs of ranks that train, for trials: slower, and
    the memory of both lies on one device."""
    fsdp_shard_size: int
    """FSDP2: ranks over which a model is divided, mostly those of a node; groups of so many
    ranks are replicas (HSDP). -1 divides over all."""
    engine_type: Literal["vllm", "sglang", "hf", "auto"]
    """Rollout engine; auto takes vllm or sglang on a GPU, else hf."""
    engine_tp_size: int
    """Ranks that share one engine (tensor parallelism)."""
    engine_mem_util: float
    """Share of device memory the engine may take."""
    engine_args: Mapping[str, str | int | float | bool] | None
    """Further options under the engine's own names."""
    enable_engine_sleep: bool
    """Release the engine's memory while the trainer runs."""
    max_len: int | None
    """Longest prompt plus completion, in tokens."""
    weight_bucket_mb: int
    """Size of one weight transfer bucket."""
    lora_sync: Literal["merged", "adapter"] | None
    """What goes to the engine with lora_rank: merged weights, or the adapters alone to an
    engine that holds them beside its weights (hf, vllm). Unset, it is adapter where quantize is
    set and the engine takes layers of 4 bits (hf), else merged."""
    verify_weight_sync: bool
    """Compare hashes of the trainer's and the engine's weights."""
    rm_use_engine: bool
    """Serve reward models by an engine."""
    rm_engine_cudagraph: bool
    """CUDA graphs in the reward engine."""
    critic_pretrain: str | bool | None
    """Checkpoint directory of the critic; unset trains no critic."""
    pretrain_data: str | None
    """Rows as those of lightrft sft, whose loss is mixed in: texts, conversations, answers."""
    critic_learning_rate: float
    """Peak learning rate of the critic. At most 1: Adam moves each weight by about as much a
    step, and weights are smaller."""
    mixed_mm_data: bool
    """Ranks may differ in having images; the vision tower stays in FSDP2's root unit."""
    remote_rm_url: str | Sequence[str] | None
    """Address of a reward service, in which ${NAME} is an environment variable; local reward
    models are then left alone."""
    micro_rollout_batch_size: int
    """Samples per rank in one forward pass before training."""
    n_samples_per_prompt: int
    """Completions per prompt."""
    advantage_estimator: Literal["gae", "reinforce", "reinforce++", "reinforce_baseline", "rloo", "group_norm", "grpo", "group_mean_batch_std", "dr_grpo", "cpgd", "opo", "batch_mean_group_std", "maxrl", "gpg", "gdpo", "pass_at_k", "raft", "remax", "zero"] | str | Callable[..., object]
    """Advantage estimator; gae is PPO with a critic."""
    use_kl_loss: bool
    """Put the KL divergence into the loss instead of the reward."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k3_unclamped", "k1+", "k3+", "k1_is", "k2_is", "k3_is"] | None
    """Estimator of the KL divergence; unset is k1 in the reward, where no other is right, and
    k3+ in the loss."""
    advantages_norm: bool
    """Normalise advantages over all ranks."""
    advantage_clip: float
    """Clip advantages to this magnitude; 0 is off."""
    reward_clip: float
    """Clip rewards to this magnitude; 0 is off."""
    reward_running_norm: bool
    """Divide rewards by their running standard deviation."""
    reward_running_norm_minus_mean: bool
    """Subtract the running mean as well."""
    overlong_buffer: bool
    """Punish overlong responses softly."""
    overlong_buffer_len: int
    """Tokens before the limit in which the punishment rises."""
    overlong_buffer_penalty_factor: float
    """Punishment at the limit."""
    mask_truncated: bool
    """Train on no token of a response that was cut at its limit; its reward still counts in the
    baseline of its group."""
    dynamic_sampling: bool
    """Draw again for groups whose rewards are all equal."""
    use_tensorboard: str | bool | None
    """Write TensorBoard logs, into this folder or OUTPUT_DIR/tensorboard."""
    strict: bool
    """Options without effect are errors instead of warnings."""
    log_dir: str | None
    """Folder of logs and of length distributions."""
    plot_every: int
    """Write the generation length distribution every N steps; 0 or less never."""
    eval_split: str
    """Part of a folder or data set of eval_data."""
    max_eval_samples: int
    """Use at most this many evaluation prompts."""
    prompt_split: str
    """Part of a folder or data set to train on."""
    prompt_sampler: Literal["shuffle", "in_order", "weighted", "pools"] | str | Callable[..., object] | None
    """What decides which rows are drawn: shuffle (a new order in each pass), in_order,
    weighted, pools (by the pass rates of the run) or a class FILE.py:NAME; unset is weighted
    with prompt_weight, in_order with --no_shuffle, else shuffle."""
    prompt_sampler_args: Mapping[str, str | int | float | bool] | None
    """Hyper-parameters of the sampler under their own names."""
    shuffle: bool
    """Draw the rows in a new order in each pass; --no_shuffle keeps that of the files."""
    prompt_weight: str | None
    """Column of numbers: how often a row is drawn, relative to the others; 0 is never."""
    prompt_data_probs: Sequence[float]
    """Shares of several sources of prompt_data; unset follows their sizes."""
    max_samples: int
    """Use at most this many training prompts."""
    prompt_max_len: int
    """Longest prompt, in tokens; longer ones, and those that leave no room for generate_max_len
    in the model's context, are left out and counted."""
    generate_max_len: int
    """Longest response, in tokens."""
    temperature: float
    """Sampling temperature."""
    stop: Sequence[str]
    """Texts that end a response, beside the model's own end; they stay in it."""
    top_p: float
    """Sample from the smallest set of tokens with this probability; 1 keeps all."""
    top_k: int
    """Sample from the k most likely tokens; -1 keeps all."""
    min_p: float
    """Sample from the tokens with at least this share of the probability of the most likely
    one; 0 keeps all."""
    apply_chat_template: bool
    """Render prompts by the model's chat template."""
    chat_template: str | None
    """File with a Jinja chat template in place of the tokenizer's."""
    chat_template_args: Mapping[str, str | int | float | bool] | None
    """Variables of the chat template, such as enable_thinking=false."""
    lora_rank: int
    """Train adapters of this rank on the actor instead of its weights; 0 trains the weights."""
    lora_alpha: float
    """Adapters count lora_alpha / lora_rank."""
    lora_path: str | None
    """Adapters to start from, a folder in PEFT's format such as model/adapter of a run; of the
    same lora_rank, lora_alpha and layers. A reference is the model without them."""
    lora_dropout: float
    """Probability of leaving an input of an adapter out; without effect in reinforcement, where
    the ratios to earlier logprobs would be random."""
    target_modules: Sequence[str]
    """Layers that get adapters: last names of linear layers, regular expressions for whole
    names (language_model.* is the text of a vision-language model), or all-linear."""
    quantize: Literal["nf4"] | None
    """QLoRA: store the linear layers of the frozen model in 4 bits (bitsandbytes' NF4, its
    scales in 8); each is dequantised where it is used. The embedded engine takes the same codes
    (lora_sync), others the dequantised weights."""
    freeze_prefix: Sequence[str]
    """Parts of actor and critic that are not trained, by regular expressions for the beginnings
    of their names: visual is the vision tower of Qwen-VL with its projector, visual(?!\.merger)
    without."""
    micro_batch_tokens: int | None
    """Cut micro-batches by this many tokens, padding included, instead of by rows. Unset, it is
    decided at the start on GPUs unless a micro_* size was given: the largest power of two up to
    32,768 whose memory plan fits, and at most what the batch has."""
    allow_new_weights: Sequence[str]
    """Names of tensors (patterns like 'score.*') that may be missing from a checkpoint, of
    another shape or unused; those the model needs are initialised anew, alike in actor and
    reference."""
    input_key: str
    """Column that holds the prompt."""
    label_key: str | None
    """Column that holds the reference answer."""
    system_prompt: str | None
    """System message put before every prompt."""
    input_template: str | None
    """Text around the prompt, which replaces {}."""
    images_key: str
    """Column with the images of a prompt: paths relative to the file, bytes or base64, one or a
    list. The default also finds a column called image."""
    videos_key: str
    """Column with the videos of a prompt: films, animated images, or objects with frames and
    fps. The default also finds a column called video."""
    audios_key: str
    """Column with the sounds of a prompt: paths relative to the file, bytes, base64 or arrays
    with a sampling_rate. The default also finds a column called audio."""
    media_root: str | None
    """Folder in which media of rows may lie, beside that of the data file; / allows every
    file."""
    text_only: bool
    """Leave images, videos and sounds of the data out, with their places."""
    max_pixels: int | None
    """Most pixels of an image or frame; larger ones are scaled down. Unset is the processor's
    own."""
    min_pixels: int | None
    """Fewest pixels of an image or frame; smaller ones are scaled up. Unset is the processor's
    own."""
    video_fps: float | None
    """Frames a second that are taken of a video. Unset takes 2 of a film, and all of what is
    given as frames."""
    video_max_frames: int | None
    """Most frames of a video, spread evenly. Unset takes 768 of a film."""
    limit_mm_image_per_prompt: int | None
    """Most images of a prompt; a row with more is an error. Unset sets no limit."""
    limit_mm_video_per_prompt: int | None
    """Most videos of a prompt; a row with more is an error. Unset sets no limit."""
    limit_mm_audio_per_prompt: int | None
    """Most sounds of a prompt; a row with more is an error. Unset sets no limit."""
    rollout_batch_size: int
    """Prompts per step, over all ranks."""
    routing_replay: Literal["auto", "off"]
    """Experts of a mixture-of-experts model in training: auto takes those that the engine
    recorded, where it can; off lets the trainer choose again."""
    use_fire: bool
    """Draw the first token at first_token_temperature (FIRE)."""
    first_token_temperature: float
    """Temperature of the first token with use_fire."""
    max_num_gen_batches: int
    """Rollout batches of one step with dynamic_sampling, at most."""
    overlap: Literal["off", "stream", "split"]
    """What is sampled while a step is trained. stream: answers that are not complete go on in
    the next steps, max_staleness of them at most; split: half of the processes sample the next
    step. It chooses stream_chunk, or rollout_lag and rollout_ranks, where these are not
    given."""
    rollout_lag: int
    """How many updates old the weights that sample a step are: with 1 the next step is sampled
    before this one is trained on."""
    rollout_ranks: int
    """Processes that only generate, the last ones of the launch: they sample the steps to come
    while the others train. 0 lets every process do both."""
    stream_chunk: int | None
    """Tokens that an open response samples between two updates: steps train on the groups that
    are complete, the others go on. Unset waits for all responses of a step."""
    stream_prompts: int | None
    """Prompts in flight with stream_chunk; unset is 1.5 rollout_batch_size, and with tool_lag
    tool_lag * (max_turns - 1) more of them, up to max_staleness + 1."""
    max_staleness: int
    """Updates between the first token of a response and the step that trains on it, at most,
    with stream_chunk."""
    tool_lag: int
    """Rounds of stream_chunk that pass between a turn of an episode and the next one, while its
    tools, or its reward, take their time; 0 waits for them within the round."""
    use_rollout_logprobs: bool
    """Take the old logprobs from the engine instead of a forward pass of the actor."""
    environment: str | None
    """Class FILE.py:NAME whose reset(**row) begins an episode and whose other public methods
    are tools of the model; get_reward() is added to the reward. A dict of classes is chosen
    from by the column environment. Also skyrl_gym:FILE.py:NAME, skyrl_gym:ID and
    openenv:http://HOST:PORT."""
    tools: Sequence[str]
    """Functions FILE.py:NAME that the model may call, beside the environment's methods."""
    max_turns: int
    """Maximum turns of an episode; tool calls in the last turn are not executed. For an agent,
    the turns that a conversation of full length has room for."""
    environment_args: Mapping[str, str | int | float | bool] | None
    """Keyword arguments of the environment's class, for each episode; of SkyRL-Gym's make its
    env_config."""
    environment_env: Sequence[str]
    """Environment variables with secrets that environments, tools and agents that are functions
    may read; others are kept from them."""
    environment_memory_gb: float | None
    """Memory in GB that a worker of environments and its children may hold; none sets no
    limit."""
    tool_timeout_seconds: float
    """Deadline of one reset, call or reward of an environment; past it its worker is killed."""
    environment_workers: int | None
    """Worker processes that host the environments or agents of one rank; unset is one a
    core."""
    late_join: bool
    """Do not wait for slow tools: start a round when half of the episodes are ready, or all
    that took no part in the last one; off, a round waits for all, and timing changes no bit."""
    agent: str | None
    """Function FILE.py:NAME, async def run(base_url, api_key, row) -> reward, a dict of named
    parts or None, which calls the model through OpenAI's protocol; or verifiers:NAME."""
    agent_command: str | None
    """Command of an agent that is a program, such as 'prog {base_url} {row}' with the row as a
    JSON file; it runs in the sandbox, and the last line that it prints is its reward."""
    agent_timeout_seconds: float
    """Deadline of one episode of the agent; past it the episode has failed."""
    max_agent_calls: int
    """Calls that an episode of the agent may make; further ones are refused."""
    max_tool_calls: int | None
    """Calls that an episode may make; further ones are answered by an error."""
    tool_parser: Literal["auto", "hermes", "xml", "glm", "deepseek", "lfm", "gemma", "harmony", "mistral", "llama", "pythonic", "kimi", "invoke"]
    """How calls are written; auto takes the tokenizer's response template or what reads the
    calls that its chat template writes. A run begins only if a call is read back."""
    max_observation_tokens: int
    """Longest answer of a call, in tokens; the rest is cut."""
    agent_denominator: Literal["episode", "branch"]
    """What counts as one sequence where a loss is a mean over sequences: an episode of the
    agent with all its branches, or each branch."""
    policy_loss: Literal["ppo", "clipped", "dapo", "dr_grpo", "gspo", "gspo-token", "gmpo", "cpgd", "cispo", "sapo", "clip_cov", "kl_cov", "reinforce", "dro", "ppo-sequence", "sapo-sequence"] | str | Callable[..., object] | None
    """Policy loss; unset is ppo, the clipped surrogate."""
    policy_loss_args: Mapping[str, str | int | float | bool] | None
    """Hyper-parameters of the policy loss under their own names."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    """How the losses of tokens become one number; unset is that of the loss's paper."""
    eps_clip: float | None
    """Clip range of the ratio; unset is that of the loss's paper."""
    eps_clip_low: float | None
    """Lower clip range; unset is eps_clip."""
    eps_clip_high: float | None
    """Upper clip range; unset is eps_clip."""
    dual_clip: float | None
    """Cap of the ratio where the advantage is negative; unset is off."""
    high_entropy_token_ratio: float
    """Train on this share of tokens, the least certain ones; 0 takes all."""
    high_entropy_scope: Literal["batch", "sequence"]
    """Take that share of the optimizer batch or of each response."""
    off_policy_correction: str | Sequence[str] | None
    """Corrections for the difference between engine and trainer: presets (tis, icepop, mis,
    geometric ...) or terms such as reject:k3:sequence:high=0.01; several at once. dppo, off-
    policy-mask and pairs new/engine, new/old bound the policy that each update moves. Unset is
    none, and tis with rollout_lag and stream_chunk, where none must be given."""
    truncated_logprobs: Literal["kept", "all"]
    """Logprobs of policy and reference where top_p, top_k or min_p act: kept renormalises them
    over the tokens that could be drawn, as recorded, which is the gradient of what was sampled
    from; all takes the whole vocabulary, as for tokens without a record."""
    advantage_args: Mapping[str, str | int | float | bool] | None
    """Hyper-parameters of the advantage estimator under their own names."""
    correction_args: Mapping[str, str | int | float | bool] | None
    """Bounds and further arguments of off_policy_correction."""
    correction_low: float | None
    """Lower bound of off_policy_correction; unset is its own."""
    correction_high: float | None
    """Upper bound of off_policy_correction; unset is its own."""
    value_clip: float
    """Clip range of the change of a value; 0 is off."""
    gamma: float
    """Discount per token."""
    lambd: float
    """Lambda of generalised advantage estimation. With `policy_lambd` or `length_alpha` in
    advantage_args it is that of the critic's targets alone."""
    init_kl_coef: float
    """Weight of the KL divergence to the initial policy; 0 loads no reference model."""
    kl_target: float | None
    """Adapt the weight towards this KL divergence per response."""
    kl_horizon: int
    """Samples over which the weight adapts to kl_target."""
    entropy_coef: float
    """Weight of the entropy bonus."""
    aux_loss_coef: float
    """Weight of the loss that balances the experts of a mixture-of-experts model."""
    ptx_coef: float
    """Weight of the language-modelling loss on pretrain_data."""
    pretrain_column: str
    """Column of the texts in pretrain_data, where it has texts."""
    ptx_batch_size: int | None
    """Rows of pretrain_data per optimizer step over all ranks; unset is train_batch_size."""
    freezing_actor_steps: int
    """Train only the critic in the first N steps; -1 is off."""
    enable_ema: bool
    """Keep a moving average of the actor and save it in OUTPUT_DIR/model_ema."""
    ema_beta: float
    """Weight of the past in the moving average."""
    turn_credit: Literal["last", "discounted"]
    """What gamma counts from the reward at the end of an episode backwards: last, its tokens;
    discounted, its turns."""
    teacher: str | None
    """Frozen model with the same tokens whose log-probabilities of the sampled tokens are an
    advantage: teacher_coef * (log p - log q). A folder; or http://HOST:PORT/v1[#MODEL], an
    OpenAI-compatible server with prompt_logprobs, whose key is the environment variable
    LIGHTRFT_TEACHER_KEY."""
    teachers: Sequence[str]
    """Several teachers, NAME=TEACHER each; teacher_column says which one a row has."""
    teacher_column: str
    """Column of the data with the name of the row's teacher."""
    teacher_weights: Sequence[float]
    """Factor of each of the teachers, in their order; unset is 1 each."""
    teacher_top_k: int | None
    """Number of likely tokens whose probabilities a served teacher returns, for divergences on
    rows; all other tokens count as one outcome."""
    teacher_tolerance: float
    """Mean difference in nats a token up to which a server's answers to one question are
    alike."""
    teacher_timeout_seconds: float
    """Deadline of a server's answers to the rows of one step, repetitions included."""
    offpolicy_fraction: float
    """Share of the rows of a step whose completions are those of the data; the student samples
    the others. Of the divergences on rows."""
    teacher_form: str
    """Divergence from the teacher: sampled is that of sampled tokens; reverse, forward and jsd
    are those of the whole vocabulary, of the rows of lightrft distill."""
    teacher_beta: float
    """Weight of the teacher in the mixture of jsd."""
    teacher_prompt_column: str | None
    """Column of the data that the teacher reads after the prompt, and the student does not: a
    solution, or feedback."""
    teacher_coef: float
    """Weight of the teacher's advantage beside that of the rewards."""
    prompt_rates: str | None
    """File of pass rates, as lightrft eval --rates writes it: for prompt_pass_rate, pools, and
    prompt_sampler weighted, which draws by the spread of the samples, rate x (1 - rate)."""
    prompt_pass_rate: str | None
    """Keep only the prompts whose pass rate is from LOW to HIGH, such as 0.1:0.9."""
    prompt_importance: bool
    """Weigh each drawn prompt by 1 / (number of prompts x its probability), so that the mean
    gradient is that of drawing all alike."""
    reward_args: Mapping[str, str | int | float | bool] | None
    """Keyword-only arguments of own reward functions."""
    reward_timeout_seconds: float
    """Deadline of one call of a reward function."""
    reward_memory_gb: float | None
    """Memory in GB that the process of an own reward function and its children may hold; none
    sets no limit."""
    reward_env: Sequence[str]
    """Environment variables with secrets that own reward functions may read; others, such as
    WANDB_API_KEY, are kept from them."""
    reward_workers: int
    """Groups of responses that an own reward function (each in a process of its own),
    reasoning_gym or a service scores at once, beside the generation."""
    sandbox: Literal["bubblewrap", "unsafe"]
    """Where unit_tests and agent_command run programs; unsafe has limits of resources only."""
    test_timeout_seconds: float
    """Processor time of a process of a program of the reward unit_tests; all of them may take
    three times as much, and do nothing for as long."""
    judge_url: str | None
    """OpenAI-compatible server of the reward judge, http://HOST:PORT/v1; the environment
    variable LIGHTRFT_JUDGE_KEY is its key."""
    judge_model: str | None
    """Name of the judge's model on judge_url; without that, policy: the one that is trained,
    asked through the engine."""
    judge_template: str | None
    """Text file with the question to the judge: {response} between marks with {mark}, {prompt}
    and {label}; with a rubric {question}; for rankings {responses} instead."""
    judge_rubric: str | None
    """TOML file with a table a part, each with question and weight: every response gets a grade
    by each of them, and their weighted mean."""
    judge_args: Mapping[str, str | int | float | bool] | None
    """Fields of the request to the judge, such as max_tokens=2048."""
    remote_rm_token: str | None
    """Token of the reward services, sent as Authorization: Bearer; unset takes
    LIGHTRFT_REWARD_TOKEN of the environment."""
    reward_weights: Sequence[float]
    """Factor of each reward_fn, then remote_rm_url, then reward_pretrain; unset is 1 each."""
    reward_pretrain: Sequence[str]
    """Reward models of lightrft reward, or sequence classifiers with one label; their scores
    are added."""
    reward_recipe: str | None
    """TOML file: a table per value of reward_recipe_column with weights of rewards."""
    reward_recipe_column: str
    """Column that names the recipe of a row."""
    reward_failure: Literal["raise", "mask"]
    """A failed reward ends the run, or excludes (masks) its sample."""
    judge_compare: Literal["none", "ranking", "verdicts"]
    """What the judge compares: none grades each response alone; ranking ranks all responses to
    a prompt, in two orders; verdicts asks about every two in both orders, for a judge that was
    trained on both_orders:FILE, with the questions of that."""
    output_dir: str
    """Folder for everything that the run writes."""
    max_epochs: int
    """Passes over the samples of one step; on rows, over the rows."""
    max_steps: int | None
    """Stop after this many steps (rollout batches)."""
    save_steps: int
    """Steps between checkpoints; -1 writes one at the end."""
    eval_steps: int
    """Steps between evaluations; -1 evaluates at both ends."""
    logging_steps: int
    """Steps between lines on the console."""
    ckpt_path: str | None
    """Folder of checkpoints; unset is OUTPUT_DIR/checkpoints."""
    save_path: str | None
    """Folder of the trained model; unset is OUTPUT_DIR/model."""
    best_metric: str | None
    """Keep the model of the best evaluation by this metric, such as eval/reward, in the folder
    best beside the checkpoints: the smallest eval/loss, perplexity, calibration_error,
    truncated_share or masked_share, of others the largest."""
    load_checkpoint: bool
    """Continue also a complete run; an unfinished one continues without it."""
    allow_changes: bool
    """Continue a run although a changed option makes it inexact."""
    max_ckpt_num: int
    """Checkpoints to keep."""
    max_ckpt_mem: float
    """MB of checkpoints to keep; the newest always stays."""
    check_memory: bool
    """Compare the memory that a run will need with that of its machine before it starts; on
    GPUs refuse what cannot fit."""
    num_threads: int | None
    """CPU threads of a process; unset on a CPU is what the size of the model's operations is
    worth, or OMP_NUM_THREADS."""
    save_rollouts: bool
    """Write every sample with its token ids to rollouts.jsonl, which lightrft rows reads: some
    six bytes a token."""
    save_rollout_texts: bool
    """Write also text, label and columns of the row on each line of rollouts.jsonl."""
    num_episodes: int
    """Passes over the training prompts; they set the number of steps. With dynamic_sampling a
    step may draw more prompts, and the same steps then make more passes."""
    sample_steps: int
    """Steps between samples on the console, the best and the worst of a prompt; 0 shows
    none."""
    save_trajectories: bool
    """Write tokens with logprobs, advantages and rewards to trajectories.jsonl."""
    num_trajectories_to_save: int
    """Samples of one step in trajectories.jsonl."""
    trajectory_steps: int | None
    """Write the first step and every N-th to trajectories.jsonl; unset is save_steps, or every
    step without. A step that is written costs a forward pass that others save."""
    use_wandb: str | bool | None
    """Log to Weights & Biases; a key given here is neither shown nor saved, without one
    WANDB_API_KEY or an earlier login counts."""
    wandb_org: str | None
    """W&B entity, SwanLab workspace."""
    wandb_group: str | None
    """Group in W&B, Trackio and SwanLab."""
    wandb_project: str
    """Project (MLflow: experiment) of the trackers."""
    wandb_run_name: str
    """W&B name of the run; %-codes are those of strftime."""
    heartbeat_seconds: float
    """Say which phase is under way after so long without a line."""
    peak_tflops: float | None
    """Peak of a device for the metric mfu, in 1e12 operations per second; unset knows common
    GPUs."""
    stop_on_alarm: bool
    """End the run after the step of an alarm, with a checkpoint and exit code 9; also without
    any alarm_* bound numbers that are not finite, skipped steps and steps that change nothing
    are alarms."""
    audit_every: int
    """Record every K-th step, with the states before and after, for lightrft audit; 0 is
    never."""
    verbose: bool
    """Show on the console what else is in OUTPUT_DIR/logs: engine, memory, weight sync and more
    metrics of each step."""
    alarm_kl: float | None
    """Warn when the KL to the reference or of an update exceeds this."""
    alarm_entropy: float | None
    """Warn when the entropy falls below this."""
    alarm_length: float | None
    """Warn when the mean response length exceeds this."""
    alarm_reward_std: float | None
    """Warn when the standard deviation of rewards falls below this."""
    parity_check_steps: int
    """Compare engine and trainer logprobs in the first step and every N; 0: first only (with
    stream_chunk every one), -1: never."""
    parity_limit: float | None
    """Mean distance of a logprob which that allows; unset depends on the dtype."""
    ledger_gate: bool
    """Compare each row to train on with what was written down as it was sampled and scored."""
    peft_config: object

class RowOptions(TrainOptions, total=False):
    """Options of stages that train on rows, too."""

    max_row_tokens: int
    """Longest row, in tokens; longer ones, and those beyond the model's context, are left out
    and counted."""
    train_on: Literal["all", "completion", "assistant", "last_assistant"] | None
    """Tokens whose loss counts: all, the completion, every assistant turn or the last one;
    unset is all of a text, the completion after a prompt, the assistant turns of a chat."""
    train_on_regex: str | None
    """Of these tokens, only those with a character of a match of this regular expression (of
    its first group) in the text of the row; rows without one are left out and counted."""
    sft_loss: Literal["token-mean", "seq-mean-token-mean", "dft"]
    """Mean of -log p over all trained tokens, mean of the rows' means, or dft, where each token
    also weighs its own probability."""
    preference_loss: Sequence[Literal["dpo", "sigmoid", "cdpo", "robust", "hinge", "ipo", "dpo_norm", "sigmoid_norm", "exo", "exo_pair", "nca", "nca_pair", "sppo", "sppo_hard", "apo_zero", "apo_zero_unpaired", "apo_down", "bco", "bco_pair", "discopop", "aot", "aot_unpaired", "kto", "simpo", "cpo", "orpo", "sft"] | str | Callable[..., object]]
    """Preference losses, whose weighted sum is minimised; names of TRL are known, too."""
    preference_weights: Sequence[float]
    """Weight of each preference loss; unset is 1 each."""
    preference_args: Mapping[str, str | int | float | bool] | None
    """Hyper-parameters of the preference losses under their own names, such as beta=0.1; one
    reaches every loss that has it."""
    ref_logprobs: str | None
    """File of the reference's log-probabilities of all answers: computed before the first step
    where it does not exist, and read instead of a reference model where it does and is of the
    same data, template and model. Unset computes them on the way."""
    reward_loss: Literal["bradley_terry", "sigmoid", "logexp", "hps", "rao_kupper", "mse", "bce"] | str | Callable[..., object] | None
    """Loss of a reward model; unset is bradley_terry for pairs and bce for labelled answers."""
    reward_loss_args: Mapping[str, str | int | float | bool] | None
    """Hyper-parameters of the reward loss under their own names."""
    reward_pooling: Literal["last", "attention"] | None
    """Hidden states that a score is made of: the last token's, or all, by learned attention;
    unset is that of a reward model which is trained on, else last."""
    reward_heads: Sequence[str]
    """Names of scores, each with a head and rankings of its own (ranks by name in the rows);
    unset is one score, or those of a reward model which is trained on."""
    reward_head_weights: Sequence[float]
    """Weight of each score in the reward and of its loss; unset is 1 each."""
    reward_head_losses: Sequence[Literal["bradley_terry", "sigmoid", "logexp", "hps", "rao_kupper", "mse", "bce"]]
    """Loss of each score; unset is reward_loss for all."""
    centering_coef: float
    """Weight of (chosen score + rejected score)^2, which keeps scores around 0; 0.01 is
    usual."""
