"""Seconds of CPU until the prompts of a data set of pictures, or its sft rows, are read and hashed.

Run: python benchmarks/media_load.py [--stage sft]
The second start finds what the first one has left. With another tree first in PYTHONPATH it
measures that tree.
"""

import argparse
import json
import os
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import transformers as hf
from PIL import Image, ImageFilter

import lightrft.datasets
from lightrft.config import TrainConfig
from lightrft.datasets.media import VisionPrompts
from lightrft.datasets.prompts import load_prompts
from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.families import FAMILIES
from lightrft.tools.tiny_media_models import build_tiny

NUM_PICTURES = 20


def write_rows(folder: Path, num_rows: int, kind: str) -> Path:
    """A file of rows with pictures of 1280 x 960, a few of them linked many times."""
    for i in range(num_rows):
        path = folder / f"{i}.{kind.lower()}"
        if i < NUM_PICTURES:
            noise = np.random.default_rng(i).integers(0, 255, (960, 1280, 3), dtype=np.uint8)
            Image.fromarray(noise).filter(ImageFilter.GaussianBlur(3)).save(path, kind)
        else:
            path.symlink_to(folder / f"{i % NUM_PICTURES}.{kind.lower()}")
    file = folder / "rows.jsonl"
    rows = (
        {
            "input": f"<image>What is {i}?",
            "images": f"{i}.{kind.lower()}",
            "messages": [
                {"role": "user", "content": f"<image>What is {i}?"},
                {"role": "assistant", "content": "noise"},
            ],
        }
        for i in range(num_rows)
    )
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def remembering(config: TrainConfig) -> AbstractContextManager[None]:
    """What a run reads its rows within; nothing in a tree that has none."""
    try:
        from lightrft.run.resume import remembered_media
    except ImportError:
        return nullcontext()
    return remembered_media(config, writes=True)


def start(reader: VisionPrompts, file: Path, stage: str, num_rows: int) -> int:
    """Reads rows for a stage and hashes their media, as a run does at its start; how many."""
    config = TrainConfig(apply_chat_template=True, label_key=None, prompt_data=str(file))
    with remembering(config):
        if stage == "policy":
            prompts = load_prompts(file, reader, config, max_samples=num_rows)
            return len([medium.digest for prompt in prompts for medium in prompt.media])
        from lightrft.datasets.row_data import RowMediaReader
        from lightrft.datasets.supervised_rows import load_supervised

        tokenizer = reader.processor.tokenizer
        marks = tokenizer.convert_tokens_to_ids(sorted(reader.encoder.marks.values()))
        rows = RowMediaReader(reader, marks)
        given = {"max_samples": num_rows, "split": "train", "reader": rows}
        loaded = load_supervised(str(file), tokenizer, config, **given)
        return len([digest for row in loaded.rows for digest in row.media_digests])


def measure(reader: VisionPrompts, num_rows: int, kind: str, stage: str) -> None:
    """Prints a line of numbers for each of two starts."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        file = write_rows(Path(folder), num_rows, kind)
        start(reader, file, stage, 2)
        time.sleep(3)  # younger files are not remembered
        for which in ("first", "second"):
            begin, cpu = time.perf_counter(), time.process_time()
            found = start(reader, file, stage, num_rows)
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
            print(
                f"{which} start, {found} rows of 1280 x 960 {kind}: {cpu:.2f} s of CPU, "
                f"{seconds:.2f} s ({lightrft.datasets.__file__})",
                flush=True,
            )


def main() -> None:
    """Prints two lines for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--stage", choices=("policy", "sft"), default="policy")
    options = parser.parse_args()
    hf.logging.set_verbosity_error()
    _, processor = build_tiny("tiny-qwen2.5-vl")
    reader = VisionPrompts(PromptEncoder(processor, FAMILIES["qwen2_5_vl"]))
    for kind in ("JPEG", "PNG"):
        measure(reader, options.rows, kind, options.stage)


if __name__ == "__main__":
    main()
