"""What every metric of a run means: one table for the report and the documentation."""

from __future__ import annotations

from dataclasses import dataclass

STAGES = ("rollout", "reward", "exchange", "forward", "train", "weight_sync")
"""The stages of a step; each has a metric `<stage>_seconds`, the slowest rank's."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric.

    Args:
        name: As in metrics.jsonl; a name that ends in "/*" stands for all of its group.
        unit: Of its values; "" for pure numbers.
        meaning: What it says, in one sentence.
        low, high: Bounds of the healthy range; None is unbounded.
    """

    name: str
    unit: str
    meaning: str
    low: float | None = None
    high: float | None = None

    @property
    def healthy_range(self) -> str:
        """The bounds in words; "" where none is known."""
        match self.low, self.high:
            case None, None:
                return ""
            case None, high:
                return f"at most {high:g}"
            case low, None:
                return f"at least {low:g}"
            case low, high:
                return f"{low:g} to {high:g}"


_ROWS = (
    MetricRow("global_step", "step", "Number of the step, from 1."),
    MetricRow("num_samples", "samples", "Responses sampled in the step."),
    MetricRow("masked_share", "share", "Responses left out of the loss.", high=0.5),
    MetricRow("reward", "", "Mean reward of the sampled responses."),
    MetricRow("reward_std", "", "Standard deviation of the rewards of all responses."),
    MetricRow("reward_min", "", "Lowest reward of the step."),
    MetricRow("reward_max", "", "Highest reward of the step."),
    MetricRow("reward/*", "", "Mean of one component of the reward."),
    MetricRow("reward_clipped_share", "share", "Rewards cut off by reward_clip.", high=0.1),
    MetricRow(
        "constant_group_share",
        "share",
        "Prompts whose responses all got the same reward: zero variance.",
        high=0.95,
    ),
    MetricRow(
        "group_reward_std", "", "Standard deviation of a prompt's rewards, mean over the prompts."
    ),
    MetricRow("response_length", "tokens", "Mean length of the responses."),
    MetricRow("response_length_std", "tokens", "Standard deviation of the response lengths."),
    MetricRow("response_length_max", "tokens", "Longest response."),
    MetricRow("prompt_length", "tokens", "Mean length of the prompts."),
    MetricRow(
        "truncated_share", "share", "Responses cut off at generate_max_len tokens.", high=0.2
    ),
    MetricRow(
        "repeated_share", "share", "Runs of 4 tokens that occurred before in their response."
    ),
    MetricRow("dynamic/num_gen_batches", "", "Rounds of sampling that the step took."),
    MetricRow("dynamic/num_groups", "prompts", "Prompts sampled in all rounds."),
    MetricRow("dynamic/constant_share", "share", "Sampled prompts whose rewards were all equal."),
    MetricRow("dynamic/solved_share", "share", "Sampled prompts that were always solved."),
    MetricRow("dynamic/surplus_share", "share", "Sampled prompts that were not needed."),
    MetricRow("dynamic/filler_share", "share", "Samples that only fill up the batch."),
    MetricRow(
        "dynamic/skipped_steps", "", "1 if no prompt taught anything and nothing was trained."
    ),
    MetricRow("partial/num_chunks", "", "Calls of the engine until enough prompts were finished."),
    MetricRow("partial/sampled_tokens", "tokens", "Tokens sampled in the step, carried ones too."),
    MetricRow("partial/carried_groups", "prompts", "Prompts begun that go on in the next step."),
    MetricRow("partial/carried_tokens", "tokens", "Tokens sampled for those so far."),
    MetricRow("partial/stale_token_share", "share", "Trained tokens that older weights sampled."),
    MetricRow("partial/staleness_mean", "updates", "Mean age of the trained tokens' weights."),
    MetricRow("partial/staleness_max", "updates", "Largest age; at most max_staleness."),
    MetricRow("advantage_mean", "", "Mean advantage over response tokens."),
    MetricRow("advantage_abs", "", "Mean size of the advantages over response tokens."),
    MetricRow("entropy", "nats", "Mean entropy of the policy's next-token distribution."),
    MetricRow("kl", "nats", "Estimated KL to the reference model, mean per response token."),
    MetricRow("kl_per_response", "nats", "Estimated KL to the reference model, per response."),
    MetricRow("kl_coef", "", "Weight of the KL to the reference model."),
    MetricRow(
        "logprob_diff_mean",
        "nats",
        "Mean distance between the engine's and the trainer's logprobs of the same tokens.",
        high=0.05,
    ),
    MetricRow(
        "logprob_diff_max",
        "nats",
        "Largest distance between the engine's and the trainer's logprobs of a token.",
    ),
    MetricRow(
        "logprob_diff_exp", "", "Mean of exp(distance) of those logprobs; 1 is equality.", high=1.05
    ),
    MetricRow(
        "mismatch_kl_k1",
        "nats",
        "KL of the engine's distribution from the trainer's, estimator k1.",
    ),
    MetricRow("mismatch_kl_k3", "nats", "The same, estimator k3.", high=0.01),
    MetricRow(
        "logprob_pearson",
        "",
        "Correlation of the engine's and the trainer's logprobs.",
        low=0.99,
    ),
    MetricRow(
        "sequence_log_ratio_min",
        "nats",
        "Smallest log probability ratio of a response, trainer to engine.",
    ),
    MetricRow("sequence_log_ratio_max", "nats", "Largest such ratio."),
    MetricRow(
        "sequence_diff_max", "nats", "Largest mean distance of the logprobs of one response."
    ),
    MetricRow("policy_loss", "", "Loss of the policy, mean over the optimizer steps."),
    MetricRow("ptx_loss", "nats", "Language-modelling loss on pretrain_data, per token."),
    MetricRow(
        "aux_loss", "", "Imbalance of the experts' load; the number of experts per token is even."
    ),
    MetricRow("ratio_mean", "", "Mean probability ratio of new to old policy.", 0.5, 2.0),
    MetricRow("ratio_max", "", "Largest probability ratio of new to old policy."),
    MetricRow("clip_fraction_low", "share", "Tokens clipped at the lower bound.", high=0.3),
    MetricRow("clip_fraction_high", "share", "Tokens clipped at the upper bound.", high=0.3),
    MetricRow("clamped_share", "share", "Tokens whose log ratio was clamped.", high=0.01),
    MetricRow(
        "approx_kl", "nats", "Estimated KL from the sampling policy to the updated one.", high=0.1
    ),
    MetricRow("grad_norm", "", "Gradient norm of the policy before clipping."),
    MetricRow("actor_lr", "", "Learning rate of the policy."),
    MetricRow(
        "skipped_steps", "share", "Optimizer steps skipped for non-finite gradients.", high=0.0
    ),
    MetricRow("critic_loss", "", "Loss of the critic, mean over the optimizer steps."),
    MetricRow("critic_grad_norm", "", "Gradient norm of the critic before clipping."),
    MetricRow("critic_lr", "", "Learning rate of the critic."),
    MetricRow(
        "critic_skipped_steps",
        "share",
        "Optimizer steps of the critic skipped for non-finite gradients.",
        high=0.0,
    ),
    MetricRow("value_mean", "", "Mean value that the critic predicts over response tokens."),
    MetricRow("return_mean", "", "Mean return over response tokens."),
    MetricRow(
        "explained_variance", "share", "Part of the returns' variance that the critic explains."
    ),
    MetricRow("high_entropy_share", "share", "Tokens of high entropy, which alone are trained on."),
    MetricRow("correction_weight", "", "Mean weight that corrects for the engine's logprobs."),
    MetricRow("correction_raw_weight", "", "The same before it is capped or rejected."),
    MetricRow("correction_raw_weight_max", "", "Largest weight before it is capped or rejected."),
    MetricRow("correction_capped_share", "share", "Tokens whose weight was capped.", high=0.2),
    MetricRow("correction_rejected_share", "share", "Tokens whose weight was set to 0.", high=0.2),
    MetricRow(
        "correction_invalid_share", "share", "Tokens whose logprobs are NaN or infinite.", high=0.0
    ),
    MetricRow(
        "correction_effective_share", "share", "Effective sample size of the weights.", low=0.5
    ),
    MetricRow("rollout_seconds", "s", "Sampling the responses, slowest rank."),
    MetricRow("reward_seconds", "s", "Scoring the responses, slowest rank."),
    MetricRow("exchange_seconds", "s", "Exchanging samples between ranks, slowest rank."),
    MetricRow("forward_seconds", "s", "Logprobs, values and reference logprobs, slowest rank."),
    MetricRow("train_seconds", "s", "Forward, backward and optimizer steps, slowest rank."),
    MetricRow("weight_sync_seconds", "s", "Bringing the weights to the engine, slowest rank."),
    MetricRow("step_seconds", "s", "Sum of the stages of the step."),
    MetricRow(
        "tokens_per_second", "tokens/s", "Prompt and response tokens of the step per second."
    ),
    MetricRow("rollout_tokens_per_second", "tokens/s", "Sampled tokens per second of rollout."),
    MetricRow("forward_tokens_per_second", "tokens/s", "Tokens per second of the forward stage."),
    MetricRow("train_tokens_per_second", "tokens/s", "Tokens per second of the update."),
    MetricRow(
        "train_tflops_per_second", "1e12/s", "Operations per second of a device in the update."
    ),
    MetricRow("mfu", "share", "Share of the device's peak that these are."),
    MetricRow("memory/*", "GiB", "Largest memory during a stage, fullest rank."),
    MetricRow("weights_version", "", "Version of the weights that the engine holds."),
    MetricRow(
        "engine_hash", "", "Hash of the weights that the engine holds, a signed 64-bit number."
    ),
    MetricRow("eval/num_prompts", "prompts", "Prompts of the evaluation."),
    MetricRow("eval/reward", "", "Mean reward of the evaluation's responses."),
    MetricRow("eval/response_length", "tokens", "Mean length of the evaluation's responses."),
    MetricRow("eval/truncated_share", "share", "Responses of the evaluation cut off.", high=0.2),
    MetricRow("eval/masked_share", "share", "Responses whose reward failed.", high=0.05),
    MetricRow("eval/seconds", "s", "Duration of the evaluation."),
    MetricRow("eval/*", "", "Mean of one component of the evaluation's reward."),
)
METRICS: dict[str, MetricRow] = {row.name: row for row in _ROWS}


def metric_row(name: str) -> MetricRow | None:
    """The row of a metric: its own, else that of its group; None if it is not known."""
    group = f"{name.split('/')[0]}/*" if "/" in name else name
    return METRICS.get(name, METRICS.get(group))
