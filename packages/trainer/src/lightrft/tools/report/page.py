"""One self-contained HTML page about a run, which opens from disk without a network."""

import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from lightrft.config.files import typed
from lightrft.config.printable import printable
from lightrft.config.toml import read_toml, write_whole
from lightrft.reporting.alarms import run_verdict
from lightrft.reporting.files import CONFIG_FILE, DRAWS_FILE, REPORT_FILE
from lightrft.reporting.metric_table import METRICS, STAGES, MetricRow, memory_peaks, metric_row
from lightrft.tools.report.charts import Chart, format_number, library_address, packed_library
from lightrft.tools.report.drawn import charts_of_draws, draw_facts, read_draws
from lightrft.tools.report.run_data import RunData, read_run
from lightrft.tools.report.sample_page import (
    QUANTITIES,
    SampleChoice,
    by_prompt,
    choose_samples,
    choose_tokens,
)

TEMPLATE = "report.html.jinja"
SCRIPT = "report.js"
MAX_ALARMS = 12
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
# Share of the way from the lowest to the highest reward of a run.
SOLVED_SHARE = 0.95
_CURVES_FILE = Path(__file__).with_name("curves.toml")
# Title and metrics of each chart.
CURVES = typed(dict[str, tuple[str, ...]], read_toml(_CURVES_FILE), _CURVES_FILE)
STATUS_WORDS = {
    "finished": "finished",
    "running": "running",
    "paused": "stopped with a checkpoint: the same command continues",
    "interrupted": "interrupted by Ctrl-C: the same command continues",
    "stopped": "crashed or killed: no summary.json",
}


def write_report(folder: Path, library: Path | None = None) -> Path:
    """Write report.html into the folder of a run that has ended, runs, or crashed.

    Args:
        folder: Folder of the run.
        library: Path of the chart library, for a page that does not hold it.

    Returns:
        The path of the page, which appears whole or not at all.

    Raises:
        NotARunError: The folder holds no run.
    """
    path = folder / REPORT_FILE
    write_whole(path, render_report(folder, library=library))
    return path


def render_report(folder: Path, *, library: Path | None = None) -> str:
    """Return the HTML text of the report on the run in `folder`; see `write_report`."""
    run, tokens = read_run(folder), choose_tokens(folder)
    stages = {name: run.points(f"{name}_seconds") for name in STAGES}
    totals = {name: sum(value or 0.0 for _, value in points) for name, points in stages.items()}
    draws = read_draws(folder / DRAWS_FILE)
    curves = [chart for chart in (*_curves(run), *charts_of_draws(draws)) if not chart.is_zero]
    charts = [*curves, Chart("Seconds of a step, by stage", "stack", stages, "s")]
    names = {name for row in run.metrics.values() for name in row}
    return fill_template(
        TEMPLATE,
        charts,
        library_address=None if library is None else library_address(library, folder),
        run=run,
        status=STATUS_WORDS[run.status],
        facts=[*run_facts(run), *draw_facts(draws)],
        alarms=find_alarms(run),
        curves=curves,
        totals=totals,
        metric_names=sorted(names - {"engine_hash", "global_step"}),
        samples=choose_samples(folder),
        by_prompt=by_prompt,
        tokens=tokens,
        quantities={
            name: meaning
            for name, meaning in QUANTITIES.items()
            if any(name in sample for samples in tokens.steps.values() for sample in samples)
        },
        config_path=folder / CONFIG_FILE,
    )


def fill_template(
    name: str,
    charts: Sequence[Chart],
    *,
    library_address: str | None = None,
    **values: object,
) -> str:
    """Return a page with charts.

    Args:
        name: Name of the template.
        charts: Charts in the order of the numbers in it.
        library_address: Address of the chart library, seen from the page; None packs it into the
            page.
        **values: Values of the template; the steps of `tokens` go to the script.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        # Texts that models, data and people have written into the files of a run.
        finalize=lambda value: value if isinstance(value, Markup) else _shown(value),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": format_seconds, "number": format_number}
    tokens = values.get("tokens")
    has_points = any(points for chart in charts for points in chart.series.values())
    return environment.get_template(name).render(
        **values,
        metric_row=metric_row,
        # Scripts run only with this number, so that no text of a model can become one.
        nonce=secrets.token_urlsafe(16),
        library=packed_library() if has_points and not library_address else None,
        library_address=library_address if has_points else None,
        script=Path(__file__).with_name(SCRIPT).read_text("utf-8"),
        page_data={
            "charts": [chart.as_json() for chart in charts],
            "tokens": tokens.steps if isinstance(tokens, SampleChoice) else {},
        },
    )


def _shown(value: object) -> str:
    """Return a value as text without controls; the browser handles text direction."""
    return _CONTROLS.sub(lambda match: printable(match[0]), str(value))


def find_alarms(run: RunData) -> list[str]:
    """Return sentences about the steps in which a metric left its healthy range."""
    options = {option.name: option.value for option in run.options}
    sentences = []
    solved = solved_steps(run)
    for row in METRICS.values():
        if row.name == "constant_group_share" and options.get("n_samples_per_prompt") == "1":
            continue  # a single response always equals itself
        points = run.points(row.name)
        bad = [step for step, value in points if value is None or not _is_healthy(row, value)]
        if row.name == "constant_group_share":
            bad = [step for step in bad if step not in solved]
        if bad:
            worst = [value for step, value in points if value is not None and step in set(bad)]
            sentences.append(_alarm(row, bad, worst))
    return sentences[:MAX_ALARMS]


def _alarm(row: MetricRow, bad: Sequence[int], worst: Sequence[float]) -> str:
    """Return the sentence about the steps in which a metric was bad, with these finite values."""
    extreme = f", up to {format_number(max(worst))}" if worst and row.low is None else ""
    where = f"step {bad[0]}" if len(bad) == 1 else f"{len(bad)} steps from {bad[0]} on"
    healthy = f"healthy: {row.healthy_range}" if worst else "not a finite number"
    return f"{where}: {row.name}{extreme} ({healthy})"


def solved_steps(run: RunData) -> set[int]:
    """Return steps in which nearly all responses got the best reward that any response ever got."""
    best, worst = run.values("reward_max"), run.values("reward_min")
    if not best or not worst or max(best) <= min(worst):
        return set()
    enough = max(best) - (1 - SOLVED_SHARE) * (max(best) - min(worst))
    return {step for step, value in run.points("reward") if value is not None and value >= enough}


def _is_healthy(row: MetricRow, value: float) -> bool:
    return (row.low is None or value >= row.low) and (row.high is None or value <= row.high)


def run_facts(run: RunData) -> list[tuple[str, str]]:
    """Return name and text of the lines at the head of the page."""
    facts = [("steps", str(run.last_step)), ("time in steps", format_seconds(run.seconds))]
    if run.status != "finished":
        facts.append(("last written", f"{format_seconds(run.quiet_seconds)} before this report"))
    if run.world_size is not None:
        facts.append(("processes", str(run.world_size)))
    for name in ("eval/reward", "reward"):
        values = run.values(name)
        if values:
            facts.append((name, f"{values[0]:.3f} → {values[-1]:.3f}"))
    facts.append(("verdict", run_verdict(row for step, row in run.metrics.items() if step > 0)))
    facts.append(("weight sync", _sync_line(run)))
    facts.append(("memory at the peak", _memory_line(run)))
    facts += [("trained on", f"{path}: samples of {text}") for path, text in run.origins.items()]
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


def _memory_line(run: RunData) -> str:
    """Return planned and measured GB of each phase."""
    parts = []
    for phase, peak in memory_peaks(run.planned_bytes, run.metrics.values()).items():
        numbers = (f"{n.split('_')[0]} {value / 1e9:.3g}" for n, value in peak.items())
        parts.append(f"{phase}: {', '.join(numbers)} GB")
    return "; ".join(parts) or "none recorded"


def _curves(run: RunData) -> list[Chart]:
    """Return the charts of `CURVES` that have a finite value."""
    charts = []
    for title, names in CURVES.items():
        series = {name: points for name in names if (points := run.points(name))}
        if any(value is not None for points in series.values() for _, value in points):
            charts.append(Chart(title, "lines", series))
    return charts


def format_seconds(seconds: float) -> str:
    """Format a duration in the two largest of days, hours, minutes and seconds."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"
