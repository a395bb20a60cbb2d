"""Seconds of CPU that a data set of pictures takes until its prompts are ready, or its sft rows.

Run: python benchmarks/media_load.py [--stage sft]
With another tree first in PYTHONPATH it measures that tree.
"""

import argparse
import json
import tempfile
import time
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
from lightrft.tools.tiny_vision_models import build_tiny

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


def load(reader: VisionPrompts, file: Path, stage: str, num_rows: int) -> int:
    """Reads rows for a stage; how many."""
    config = TrainConfig(apply_chat_template=True, label_key=None)
    if stage == "policy":
        return len(load_prompts(file, reader, config, max_samples=num_rows))
    from lightrft.datasets.row_media import RowMediaReader
    from lightrft.datasets.supervised_rows import load_supervised

    tokenizer = reader.processor.tokenizer
    marks = tokenizer.convert_tokens_to_ids(sorted(reader.encoder.marks.values()))
    rows = RowMediaReader(reader, marks)
    given = {"max_samples": num_rows, "split": "train", "reader": rows}
    return len(load_supervised(str(file), tokenizer, config, **given))


def measure(reader: VisionPrompts, num_rows: int, kind: str, stage: str) -> str:
    """One line of numbers."""
    with tempfile.TemporaryDirectory() as folder:
        file = write_rows(Path(folder), num_rows, kind)
        load(reader, file, stage, 2)
        start, cpu = time.perf_counter(), time.process_time()
        found = load(reader, file, stage, num_rows)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return (
        f"{found} rows of 1280 x 960 {kind}: {cpu:.2f} s of CPU, {seconds:.2f} s "
        f"({lightrft.datasets.__file__})"
    )


def main() -> None:
    """Prints one line for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--stage", choices=("policy", "sft"), default="policy")
    options = parser.parse_args()
    hf.logging.set_verbosity_error()
    _, processor = build_tiny()
    reader = VisionPrompts(PromptEncoder(processor, FAMILIES["qwen2_5_vl"]))
    for kind in ("JPEG", "PNG"):
        print(measure(reader, options.rows, kind, options.stage), flush=True)


if __name__ == "__main__":
    main()
