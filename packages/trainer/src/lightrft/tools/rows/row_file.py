"""Files of rows made from a run's recorded samples, with their origin beside them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from lightrft.config import ModelOptions, TrainConfig
from lightrft.config.files import MAX_BYTES, FileError, file_sha256, lines_of, regular_file
from lightrft.datasets.row_origin import tokens_of, write_origin
from lightrft.datasets.types import DataError
from lightrft.reporting.files import CONFIG_FILE, EVAL_FILE, ROLLOUTS_FILE, START_FILE, read_json
from lightrft.reporting.rollouts import RecordedMedium, RecordedRollout, read_rollout
from lightrft.run.provenance import run_of_model
from lightrft.tools.rows.row_choice import (
    CHOICES,
    Choice,
    ChosenSamples,
    Sample,
    choose,
    count_fates,
)

# Medium of a sample that an older version recorded.
_UNKNOWN = RecordedMedium("image", "")


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A file of rows to write.

    Args:
        run: Folder of `lightrft train --save_rollouts` or of `lightrft eval --save_rollouts`.
        use: Purpose of the rows, a key of `USES`.
        choice: Key of `CHOICES`.
        threshold: Least accuracy of a right sample.
        max_per_prompt: Number of rows per prompt; None is no bound.
    """

    run: Path
    use: str
    choice: str
    threshold: float = 1.0
    max_per_prompt: int | None = None


@dataclass(frozen=True, slots=True)
class RowReport:
    """Numbers of a file of rows.

    Args:
        num_rows: Number of rows.
        num_prompts: Number of prompts with rows.
        num_sampled: Number of samples of the run.
        fates: Number of samples by the keys of `FATES`; their sum is `num_sampled`.
        has_held_out: Whether the run has evaluation prompts, which were left out.
    """

    num_rows: int
    num_prompts: int
    num_sampled: int
    fates: Mapping[str, int]
    has_held_out: bool


def write_rows(request: RowRequest, path: Path) -> RowReport:
    """Write the rows and their origin; nothing if there are no rows.

    Args:
        request: Rows to write.
        path: Path of a JSONL file.

    Raises:
        DataError: A line of the samples is damaged, or no sample fits the choice.
        ConfigError: The options of the run cannot be read.
        ModelLoadError: The tokenizer of the run cannot be read.
    """
    # Imported here because it imports torch.
    from lightrft.models.loading import load_tokenizer

    config, choice = TrainConfig.load(request.run / CONFIG_FILE), CHOICES[request.choice]
    rollouts = request.run / ROLLOUTS_FILE
    samples, digest = read_samples(rollouts, holds_answers=request.use in ("sft", "best_of_n"))
    rows = choose(
        samples, choice, threshold=request.threshold, max_per_prompt=request.max_per_prompt
    )
    fates, prompts = count_fates(samples, rows), {row.chosen.prompt for row in rows}
    evaluation = read_json(request.run / EVAL_FILE)
    has_held_out = bool(evaluation.get("num_held_out") if evaluation else config.eval_data)
    report = RowReport(len(rows), len(prompts), len(samples), fates, has_held_out=has_held_out)
    if not rows:
        raise DataError(_no_rows(request, choice, samples, fates))
    # The folder of a finished run holds its tokenizer.
    model_dir = config.replaced({"output_dir": str(request.run)}).model_dir
    tokenizer = load_tokenizer(str(model_dir if model_dir.is_dir() else config.pretrain))
    used = set[int]()
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as stream:
        for columns in _columns(rollouts, rows, request):
            stream.write(json.dumps(columns) + "\n")
            for name, ids in columns.items():
                used.update(cast("Sequence[int]", ids) if name.endswith("_ids") else ())
    start = _sampled_by(request.run, config)
    origin = {
        "run": request.run.resolve().name,
        "run_path": start.get("path"),
        "run_sha256": start.get("run_sha256"),
        "stage": start.get("stage"),
        "model": config.pretrain,
        "config_sha256": file_sha256(request.run / CONFIG_FILE),
        "rollouts_sha256": digest,
        "rows_sha256": file_sha256(partial),
        "for": request.use,
        "choose": request.choice,
        **({"threshold": request.threshold} if choice.uses_threshold else {}),
        "max_per_prompt": request.max_per_prompt,
        "rows": len(rows),
        "sampled": len(samples),
        **fates,
        "tokens": tokens_of(tokenizer, used),
    }
    write_origin(path, origin)
    partial.replace(path)
    return report


def _sampled_by(folder: Path, config: ModelOptions) -> Mapping[str, object]:
    """Return the path, hash and stage of a run; for an evaluation, of its model's run."""
    if (folder / EVAL_FILE).is_file():
        return run_of_model(Path(str(config.pretrain)))
    return {"path": str(folder.resolve()), **read_json(folder / START_FILE)}


def read_samples(path: Path, *, holds_answers: bool) -> tuple[list[Sample], str]:
    """Return the samples of a run without their tokens, and a hash of their lines.

    An unfinished last line of a running run is left out.

    Args:
        path: File of `save_rollouts`.
        holds_answers: Whether rows can mark tokens of a response that the model did not sample.

    Raises:
        DataError: A line is damaged, or the run measured no rewards.
    """
    samples: list[Sample] = []
    digest, seen = hashlib.sha256(), set[tuple[bytes, bytes]]()
    place = 0
    try:
        for number, line in enumerate(lines_of(path), start=1):
            if not line.endswith(b"\n"):
                break
            digest.update(line)
            read = read_rollout(line, f"{path}:{number}")
            if read.reward is None or read.accuracy is None:
                raise DataError(
                    f"{path}: the run measured no rewards, and rows are chosen by rewards: give "
                    "the run some, such as --reward_fn"
                )
            response_ids = np.array(read.response_ids, dtype=np.int64).tobytes()
            prompt, response = read.prompt_hash, hashlib.sha256(response_ids).digest()
            excluded = _excluded(read, holds_answers=holds_answers)
            if not excluded and (prompt, response) in seen:
                excluded = "duplicate"
            seen.add((prompt, response))
            samples.append(
                Sample(
                    place,
                    prompt,
                    response,
                    read.reward,
                    read.accuracy,
                    is_truncated=read.truncated,
                    excluded=excluded,
                )
            )
            place += len(line)
    except FileError as error:
        raise DataError(str(error)) from error
    return samples, digest.hexdigest()


def _excluded(read: RecordedRollout, *, holds_answers: bool) -> str:
    """Return the first reason why no row may hold a sample; "" without one."""
    is_whole = read.sampled_spans == ((0, len(read.response_ids)),)
    reasons = {
        "held_out": read.held_out,
        "undecided": read.masked or not read.sampled_spans,
        "with_media": read.has_media and not all(each.path for each in read.media or [_UNKNOWN]),
        "answered": not (is_whole or holds_answers),
    }
    return next((name for name, holds in reasons.items() if holds), "")


def _columns(
    path: Path, rows: list[ChosenSamples], request: RowRequest
) -> Iterator[dict[str, object]]:
    """Yield the columns of each row, with the sampled ids."""
    is_labelled = CHOICES[request.choice].is_labelled
    with regular_file(path).open("rb") as stream:

        def read(sample: Sample) -> RecordedRollout:
            stream.seek(sample.place)
            return read_rollout(stream.readline(MAX_BYTES), path)

        for row in rows:
            chosen = read(row.chosen)
            origin = {
                "step": chosen.step,
                "sample_id": chosen.sample_id,
                **_media_columns(chosen, path.parent),
            }
            if row.rejected is not None:
                rejected = read(row.rejected)
                yield {
                    "prompt_ids": chosen.prompt_ids,
                    "chosen_ids": chosen.response_ids,
                    "rejected_ids": rejected.response_ids,
                    "score_chosen": chosen.reward,
                    "score_rejected": rejected.reward,
                    **origin,
                }
            elif request.use == "reward" or is_labelled:
                label = {"label": row.chosen.accuracy >= request.threshold} if is_labelled else {}
                yield {
                    "prompt_ids": chosen.prompt_ids,
                    "response_ids": chosen.response_ids,
                    **label,
                    "score": chosen.reward,
                    **origin,
                }
            else:
                flags = [*([False] * len(chosen.prompt_ids)), *chosen.is_sampled]
                yield {
                    "token_ids": (*chosen.prompt_ids, *chosen.response_ids),
                    "is_trained": [int(flag) for flag in flags],
                    "score": chosen.reward,
                    **origin,
                }


def _media_columns(sample: RecordedRollout, run: Path) -> dict[str, object]:
    """Return the files and hashes of images, and the text with their places; {} without images."""
    if not sample.media:
        return {}
    files = [(run / each.path).resolve() for each in sample.media]
    return {
        "prompt_text": sample.prompt_text,
        "images": list(map(str, files)),
        "images_sha256": [each.sha256 for each in sample.media],
    }


def _no_rows(
    request: RowRequest, choice: Choice, samples: list[Sample], fates: Mapping[str, int]
) -> str:
    """Return the message for the case that no sample fits."""
    counted = ", ".join(f"{count} {name}" for name, count in fates.items() if count)
    said = f"{request.run}: none of {len(samples)} samples fits: {counted or 'there are none'}"
    usable = [each.accuracy for each in samples if not (each.excluded or each.is_truncated)]
    if choice.by_threshold and usable:
        return (
            f"{said}; accuracies of whole answers go from {min(usable):g} to {max(usable):g}, "
            f"--threshold is {request.threshold:g}"
        )
    needs = ", with a lower reward beside it" if choice.makes_pairs else ""
    return f"{said}; expected answers not held out that end before generate_max_len{needs}"
