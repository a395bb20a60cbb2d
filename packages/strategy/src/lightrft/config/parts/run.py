"""Options of one part of a run: length, folders and checkpoints of a run."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    EVAL,
    NOT_SFT,
    run_option,
)


@dataclass(kw_only=True)
class RunControlOptions:
    """Length, folders and checkpoints of a run."""

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
