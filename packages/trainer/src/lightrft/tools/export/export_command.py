"""`lightrft export`: export of a run's final model, with checks."""

import re
from collections.abc import Sequence
from pathlib import Path

import httpx
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from lightrft.cli.errors import ExitCode, PreflightError, UsageError
from lightrft.cli.launch import hide_progress_bars
from lightrft.cli.options import Parser
from lightrft.tools.commands import parser_of
from lightrft.tools.init_model_command import require_empty
from lightrft.utils.hub import is_hub_reachable


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft export --help`.

    Raises:
        UsageError: The folder does not exist, or the target is not empty.
        NotARunError: The run has no final model.
        PreflightError: The repository on the hub cannot be written.
    """
    options = build_parser().parse_args(argv)
    folder, directory = Path(options.run), Path(options.directory)
    require_empty(directory)
    if not folder.is_dir():
        raise UsageError(f"no run at {folder}: expected the --output_dir of lightrft train")
    name = options.push_to_hub
    if options.is_public and name is None:
        raise UsageError("--public is of a repository: add --push_to_hub OWNER/NAME")
    if name is not None:
        open_repository(name, is_public=options.is_public)

    from lightrft.tools.export.exported_model import export_model

    hide_progress_bars()
    print(export_model(folder, directory))
    if name is not None:
        print(f"uploaded: {push(directory, name)}")
    return ExitCode.OK


def build_parser() -> Parser:
    """Return the parser of `lightrft export`."""
    return parser_of("export")


def open_repository(name: str, *, is_public: bool) -> None:
    """Create the repository unless it exists, so that failures come before the export.

    Args:
        name: Name of the repository, owner/name.
        is_public: Whether a new repository is public; an existing one keeps its setting.

    Raises:
        UsageError: The name is not valid for a repository.
        PreflightError: The hub does not answer, or does not let the user write.
    """
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) is None:
        raise UsageError(f"push_to_hub: got {name!r}, expected owner/name")
    if not is_hub_reachable():
        raise PreflightError(
            "push_to_hub: the hub does not answer, or HF_HUB_OFFLINE forbids to ask it: export "
            "without it, and upload the folder later"
        )
    try:
        HfApi().create_repo(name, private=not is_public, exist_ok=True)
    except HFValidationError as err:
        raise UsageError(f"push_to_hub: got {name!r}: {err}") from err
    except (HfHubHTTPError, LocalTokenNotFoundError, httpx.HTTPError) as err:
        raise _refusal(name, err) from err


def push(directory: Path, name: str) -> str:
    """Upload a folder in one commit and return the commit's address.

    Raises:
        PreflightError: The hub refuses the upload; the folder stays.
    """
    try:
        return HfApi().upload_folder(repo_id=name, folder_path=directory).commit_url
    except (HfHubHTTPError, httpx.HTTPError) as err:
        raise _refusal(name, err) from err


def _refusal(name: str, err: Exception) -> PreflightError:
    reason = str(err).strip().partition("\n")[0] or type(err).__name__
    return PreflightError(
        f"push_to_hub: {name} cannot be written: {reason}; give HF_TOKEN, or log in with hf auth "
        "login, as someone who may write there"
    )
