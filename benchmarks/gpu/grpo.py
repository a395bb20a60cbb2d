"""Steps of GRPO by `lightrft train`, watched from inside its process.

    python3 benchmarks/gpu/grpo.py 0.5b|0.5b_stream [--stream] [OPTION OF lightrft train ...]

The model is the folder `0.5b` in that of the environment (`LIGHTRFT_SCRATCH`), of random weights
whose sampled lengths are geometric. A line is written for every step when it ends; once, after the
first rollout, for bare `LLM.generate` on the same prompts, and for the memory that sleeping
frees.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import threading
import time
from pathlib import Path

import lines
import torch

KEYS = (
    "step_seconds",
    "rollout_seconds",
    "forward_seconds",
    "train_seconds",
    "rollout_tokens_per_second",
    "train_tokens_per_second",
    "mfu",
    "idle_seconds_share",
    "thin_seconds_share",
    "logprob_diff_mean",
    "response_length",
)
SIZES = {"prompt": 128, "response": 2048, "prompts": 32, "samples": 8, "chunk": 768}
TINY_SIZES = {"prompt": 48, "response": 48, "prompts": 4, "samples": 4, "chunk": 16}
GB = 1e9


class Watch:
    """Measures beside the run, where the engine and its weights are at hand anyway.

    Args:
        name: Row of the table.
    """

    def __init__(self, name: str) -> None:
        self.name, self.jobs, self.natives = name, [], []
        self.is_bare_known = self.is_sleep_known = False
        self.syncs = 0

    def install(self) -> None:
        """Look on when the engine generates, sleeps, and gets weights."""
        from lightrft.engines.types import EngineStatus
        from lightrft.strategy.engine.session import EngineSession

        sleep, update = EngineSession.sleep, EngineSession.update_weights

        def watched_sleep(session: EngineSession, level: int) -> None:
            is_awake = session.status is EngineStatus.WAKEUP
            if is_awake:
                self.measure_bare(session)
            before = free_bytes()
            sleep(session, level)
            if is_awake and self.is_bare_known and not self.is_sleep_known and before is not None:
                self.is_sleep_known = True
                lines.add("grpo", self.name, freed_gb=(free_bytes() - before) / GB)

        def watched_update(session: EngineSession, *arguments: object) -> object:
            report = update(session, *arguments)
            self.syncs += 1
            seconds = {"sync_seconds": report.seconds, "verify_seconds": report.verify_seconds}
            values = {"sync_gb": report.num_bytes / GB, **seconds}
            lines.add("grpo", self.name, step=self.syncs, **values)
            return report

        EngineSession.sleep, EngineSession.update_weights = watched_sleep, watched_update
        if importlib.util.find_spec("vllm") is None:
            return
        from lightrft.engines.vllm.engine import VLLMEngine

        run = VLLMEngine._run

        def watched_run(engine: VLLMEngine, jobs: list, natives: list) -> object:
            self.jobs, self.natives = list(jobs), list(natives)
            return run(engine, jobs, natives)

        VLLMEngine._run = watched_run

    def measure_bare(self, session: object) -> None:
        """Time `LLM.generate` on the prompts of the first rollout, without logprobs and seeds."""
        if self.is_bare_known or len(self.natives) < 2:
            return
        from lightrft.engines.vllm.engine import native_prompt

        self.is_bare_known = True
        prompts = [native_prompt(job) for job in self.jobs]
        params = [native.clone() for native in self.natives]
        for each in params:
            each.logprobs = each.seed = None
        llm = session.running.native
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        answers = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        count = sum(len(each.token_ids) for answer in answers for each in answer.outputs)
        lines.add("grpo", self.name, bare_tokens_per_second=count / seconds, bare_seconds=seconds)

    def follow(self, path: Path, ended: threading.Event) -> None:
        """Write a line for each step once the run has recorded it."""
        count = 0
        while True:
            is_last = ended.is_set()
            recorded = lines.read(path)
            if recorded and not count:
                add_start(self.name, path.with_name("run.json"))
            for row in recorded[count:]:
                values = {key: row[key] for key in KEYS if key in row}
                # Of torch alone: the engine sleeps meanwhile.
                values["train_gib"] = row.get("memory/train_gb")
                lines.add("grpo", self.name, step=row["global_step"], **values)
            count = len(recorded)
            if is_last:
                return
            ended.wait(0.5)


def free_bytes() -> int | None:
    """Free memory of the device by the driver; None without one."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


def copy_rate() -> float:
    """GB/s of a copy on the device, of bytes that arrive."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.ones(2**30 if device == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def seconds(rounds: int) -> float:
        begin = time.perf_counter()
        for _ in range(rounds):
            target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    seconds(2)
    return 10 * source.nbytes / seconds(10) / GB


def write_inputs(folder: Path, sizes: dict[str, int]) -> None:
    """Write prompts, of a token for each character, and a reward that differs within each group."""
    folder.mkdir(parents=True, exist_ok=True)
    length = sizes["prompt"] * 3 // 4
    texts = (
        f"{n}: " + "what comes next? " * length for n in range(sizes["steps"] * sizes["prompts"])
    )
    rows = ({"input": text[:length], "label": "1"} for text in texts)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "def reward(responses, labels):\n"
        "    return [i * 37 % 11 / 11 for i in range(len(responses))]\n"
    )


def arguments_of(name: str, folder: Path, sizes: dict[str, int], *, streams: bool) -> list[str]:
    """Return the command line of the run: what is default stays default."""
    engine = "vllm" if importlib.util.find_spec("vllm") else "hf"
    samples = sizes["prompts"] * sizes["samples"]
    options = {
        "pretrain": folder.parent / name.partition("_")[0],
        "prompt_data": folder / "rows.jsonl",
        "reward_fn": f"{folder / 'reward.py'}:reward",
        "output_dir": folder / "run",
        "engine_type": engine,
        "prompt_max_len": sizes["prompt"],
        "generate_max_len": sizes["response"],
        "rollout_batch_size": sizes["prompts"],
        "n_samples_per_prompt": sizes["samples"],
        "train_batch_size": samples,
        "max_steps": sizes["steps"],
    }
    if engine == "hf":
        lines.add("grpo", name, engine="hf: vLLM is not installed")
    if streams:
        options["stream_chunk"] = sizes["chunk"]
    return [
        "--fsdp",
        *(text for key, value in options.items() for text in (f"--{key}", str(value))),
    ]


def add_start(name: str, path: Path) -> None:
    """Write what the start of the run has decided: attention, and the planned memory."""
    start = json.loads(path.read_text()) if path.is_file() else {}
    if start.get("attention"):
        lines.add("path", name, text=f"attention: {start['attention']}")
    planned = start.get("planned_bytes") or {}
    if "train" in planned:
        lines.add("grpo", name, planned_gib=planned["train"] / 2**30)


def main() -> int:
    """Measure as the options say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    options, more = parser.parse_known_args()
    name = options.name
    sizes = {**(TINY_SIZES if lines.is_rehearsal() else SIZES), "steps": options.steps}
    scratch = Path(os.environ["LIGHTRFT_SCRATCH"])
    folder = scratch / f"{name}.{os.getpid()}"
    write_inputs(folder, sizes)
    from lightrft.cli.main import main as lightrft

    lines.add("grpo", name, copy_gb_per_second=copy_rate())
    watch, ended = Watch(name), threading.Event()
    # In flight there are other rows; the plain run has it.
    watch.is_bare_known = options.stream
    watch.install()
    follower = threading.Thread(
        target=watch.follow, args=(folder / "run" / "metrics.jsonl", ended), daemon=True
    )
    follower.start()
    try:
        code = lightrft(
            ["train", *arguments_of(name, folder, sizes, streams=options.stream), *more]
        )
    finally:
        ended.set()
        follower.join(10)
        for file in ("run.json", "summary.json", "metrics.jsonl"):
            path = folder / "run" / file
            if path.is_file():
                (scratch / "raw" / f"{name}.{file}").write_bytes(path.read_bytes())
    return code


if __name__ == "__main__":
    sys.exit(main())
