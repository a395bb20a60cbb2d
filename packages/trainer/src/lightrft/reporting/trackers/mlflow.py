"""MLflow: a database file in the run's folder; `MLFLOW_TRACKING_URI` chooses a server."""

import logging
import os
import re
import time
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.config import OutputOptions
from lightrft.config.toml import without_secrets
from lightrft.reporting.trackers.best_effort import BestEffortLogger, finite, kept_id

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

DATABASE, ARTIFACTS, ID_FILE = "mlflow.db", "mlflow_artifacts", "mlflow_id"
ID_TAG = "lightrft_run"
# Limits of one request, and of what a name may hold.
_MAX_PARAMS, _MAX_METRICS, _MAX_CHARACTERS = 100, 1000, 500
_ODD = re.compile(r"[^\w\-. :/]")


def open_mlflow(config: OutputOptions) -> BestEffortLogger:
    """Open a run of MLflow, the same one for all parts of a run."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    # It would report the tables that it makes on the console of the run.
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    folder = Path(config.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    address = os.environ.get("MLFLOW_TRACKING_URI")
    client = MlflowClient(tracking_uri=address or f"sqlite:///{folder / DATABASE}")
    run_id = _find_or_create(client, config, None if address else (folder / ARTIFACTS).as_uri())

    def send(step: int, metrics: Mapping[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        pairs = finite(metrics).items()
        entries = iter([Metric(_ODD.sub("_", name), value, now, step) for name, value in pairs])
        while batch := list(islice(entries, _MAX_METRICS)):
            client.log_batch(run_id, metrics=batch)

    return BestEffortLogger("--loggers mlflow", send, lambda: client.set_terminated(run_id))


def _find_or_create(client: "MlflowClient", config: OutputOptions, artifacts: str | None) -> str:
    """Return the id of the run that has this folder's tag."""
    from mlflow.entities import Param

    name, folder_id = config.wandb_project, kept_id(Path(config.output_dir), ID_FILE)
    experiment = client.get_experiment_by_name(name)
    experiment_id: str = (
        experiment.experiment_id
        if experiment is not None
        else client.create_experiment(name, artifact_location=artifacts)
    )
    runs: Iterable[object] = client.search_runs([experiment_id], f"tags.{ID_TAG} = '{folder_id}'")
    for run in runs:
        run_id: str = run.info.run_id  # type: ignore[attr-defined]
        client.update_run(run_id, status="RUNNING")
        return run_id
    shown = Path(config.output_dir).resolve().name
    run_id = client.create_run(experiment_id, tags={ID_TAG: folder_id}, run_name=shown).info.run_id
    params = iter(without_secrets(config).items())
    while batch := [
        Param(key, str(value)[:_MAX_CHARACTERS]) for key, value in islice(params, _MAX_PARAMS)
    ]:
        client.log_batch(run_id, params=batch)
    return run_id
