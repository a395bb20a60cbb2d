"""One self-contained HTML page about a run, which opens from disk without a network."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.trainer.reporting.charts import Chart, draw_lines, draw_stack, format_number
from lightrft.trainer.reporting.inputs import RunData, read_run
from lightrft.trainer.reporting.metric_table import METRICS, STAGES, MetricRow, metric_row
from lightrft.trainer.reporting.plots import Plot, packed_library, plot_lines, plot_stack
from lightrft.trainer.reporting.sample_page import choose_samples
from lightrft.trainer.reporting.tokens import choose_tokens
from lightrft.trainer.runs.files import CONFIG_FILE, REPORT_FILE

if TYPE_CHECKING:
    from collections.abc import Sequence

TEMPLATE = "report.html.jinja"
SCRIPT = "report.js"
MAX_ALARMS = 12
CURVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward", "eval/reward")),
    ("Spread of the rewards", ("reward_std",)),
    ("Groups of equal rewards", ("constant_group_share",)),
    ("Response length", ("response_length", "eval/response_length")),
    ("Truncated responses", ("truncated_share", "eval/truncated_share")),
    ("KL to the reference model", ("kl",)),
    ("KL of the update", ("approx_kl",)),
    ("Entropy", ("entropy",)),
    ("Gradient norm", ("grad_norm", "critic_grad_norm")),
    ("Clipped tokens", ("clip_fraction_low", "clip_fraction_high")),
    ("Engine against trainer, mean", ("logprob_diff_mean",)),
    ("Engine against trainer, largest", ("logprob_diff_max",)),
    ("Tokens per second", ("tokens_per_second",)),
)
STATUS_WORDS = {
    "finished": "finished",
    "running": "running",
    "paused": "stopped with a checkpoint: the same command continues",
    "stopped": "crashed or killed: no summary.json",
}


@dataclass(frozen=True, slots=True)
class Curve:
    """A chart, drawn and to be drawn by the script, with the meanings of its metrics."""

    chart: Chart
    plot: Plot
    rows: dict[str, MetricRow]


@dataclass(frozen=True, slots=True)
class Phase:
    """What one stage of all steps took."""

    name: str
    total: str
    share: str
    meaning: str


@dataclass(frozen=True, slots=True)
class MetricValue:
    """First and last value of a metric."""

    name: str
    first: str
    last: str
    row: MetricRow | None


def write_report(folder: Path, *, now: float | None = None) -> Path:
    """Writes report.html into the folder of a run that has ended, runs, or crashed.

    Args:
        folder: Of the run.
        now: Seconds since the epoch, to tell a running from a crashed run; None is the present.

    Returns:
        The path of the page, which appears whole or not at all.

    Raises:
        NotARunError: The folder holds no run.
    """
    path = folder / REPORT_FILE
    partial = path.with_name(path.name + ".partial")
    partial.write_text(render_report(folder, now=now), encoding="utf-8")
    partial.replace(path)
    return path


def render_report(folder: Path, *, now: float | None = None) -> str:
    """The HTML text of the report on the run in `folder`; see `write_report`."""
    import jinja2

    run = read_run(folder, now=now)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_read(TEMPLATE))
    curves, stages = _curves(run), {name: run.points(f"{name}_seconds") for name in STAGES}
    stack, tokens = draw_stack(stages, unit="s"), choose_tokens(folder)
    plots = [curve.plot for curve in curves] + ([plot_stack(stages, unit="s")] if stack else [])
    return template.render(
        run=run,
        status=STATUS_WORDS[run.status],
        facts=_facts(run),
        alarms=find_alarms(run),
        curves=curves,
        stack=stack,
        phases=_phases(run),
        values=_values(run),
        samples=choose_samples(folder),
        tokens=tokens,
        config_path=folder / CONFIG_FILE,
        # Scripts run only with this number, so that no text of a model can become one.
        nonce=secrets.token_urlsafe(16),
        library=packed_library() if plots else None,
        script=_read(SCRIPT),
        page_data={"plots": [plot.as_json() for plot in plots], "tokens": tokens.as_json()},
    )


def _read(name: str) -> str:
    """The text of a file of this package."""
    return Path(__file__).with_name(name).read_text("utf-8")


def find_alarms(run: RunData) -> list[str]:
    """Sentences about the steps in which a metric left its healthy range."""
    options = {option.name: option.value for option in run.options}
    sentences = []
    for row in METRICS.values():
        if row.low is None and row.high is None:
            continue
        if row.name == "constant_group_share" and options.get("n_samples_per_prompt") == "1":
            continue  # a single response always equals itself
        points = run.points(row.name)
        bad = [step for step, value in points if value is None or not _is_healthy(row, value)]
        if bad:
            worst = [value for step, value in points if value is not None and step in set(bad)]
            extreme = f", up to {format_number(max(worst))}" if worst and row.low is None else ""
            where = f"step {bad[0]}" if len(bad) == 1 else f"{len(bad)} steps from {bad[0]} on"
            sentences.append(f"{where}: {row.name}{extreme} (healthy: {row.healthy_range})")
    return sentences[:MAX_ALARMS]


def _is_healthy(row: MetricRow, value: float) -> bool:
    return (row.low is None or value >= row.low) and (row.high is None or value <= row.high)


def _facts(run: RunData) -> list[tuple[str, str]]:
    """Name and text of the lines at the head of the page."""
    facts = [("steps", str(run.last_step)), ("time in steps", format_seconds(run.seconds))]
    if run.status != "finished":
        facts.append(("last written", f"{format_seconds(run.quiet_seconds)} before this report"))
    if run.world_size is not None:
        facts.append(("processes", str(run.world_size)))
    for name in ("reward", "eval/reward"):
        values = [value for _, value in run.points(name) if value is not None]
        if values:
            facts.append((name, f"{values[0]:.3f} → {values[-1]:.3f}"))
    facts.append(("weight sync", _sync_line(run)))
    versions = ", ".join(f"{name} {text}" for name, text in run.versions.items())
    facts.append(("versions", versions or "not recorded"))
    return facts


def _sync_line(run: RunData) -> str:
    if not run.hashes:
        return "none recorded"
    step, engine_hash = list(run.hashes.items())[-1]
    version = run.metrics[step].get("weights_version")
    options = {option.name: option.value for option in run.options}
    checked = {"true": "hash compared at each", "false": "hash not compared"}
    return (
        f"weights version {'unknown' if version is None else int(version)} after step {step}, "
        f"engine hash {engine_hash % 2**64:016x}; {len(run.hashes)} syncs, "
        f"{checked.get(options.get('verify_weight_sync', ''), 'comparison not recorded')}"
    )


def _curves(run: RunData) -> list[Curve]:
    curves = []
    for title, names in CURVES:
        series = {name: points for name in names if (points := run.points(name))}
        chart = draw_lines(title, series)
        if chart is not None:
            rows = {name: row for name in series if (row := metric_row(name)) is not None}
            curves.append(Curve(chart, plot_lines(series, rows), rows))
    return curves


def _phases(run: RunData) -> list[Phase]:
    totals = {
        name: sum(value or 0.0 for _, value in run.points(f"{name}_seconds")) for name in STAGES
    }
    whole = sum(totals.values())
    if not whole:
        return []
    return [
        Phase(
            name,
            format_seconds(total),
            f"{total / whole:.1%}",
            METRICS[f"{name}_seconds"].meaning,
        )
        for name, total in totals.items()
    ]


def _values(run: RunData) -> list[MetricValue]:
    names = sorted({name for row in run.metrics.values() for name in row})
    return [
        MetricValue(name, _shown(points[0]), _shown(points[-1]), metric_row(name))
        for name in names
        if name not in ("engine_hash", "global_step") and (points := run.points(name))
    ]


def _shown(point: tuple[int, float | None]) -> str:
    return "not finite" if point[1] is None else format_number(point[1])


def format_seconds(seconds: float) -> str:
    """A duration in the two largest of days, hours, minutes and seconds."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    parts: Sequence[tuple[int, str]] = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    left = round(seconds)
    words: list[str] = []
    for size, name in parts:
        count, left = divmod(left, size)
        if count or words:
            words.append(f"{count} {name}")
    return " ".join(words[:2])
