"""Checkpoint folders: complete or absent, verified when read, rotated only among ours.

A checkpoint is written into a temporary folder. When every rank has finished, the files are
flushed and hashed, the manifest is written as the last file, and the folder is renamed to its tag.
A folder without a manifest is therefore not a checkpoint: it is neither loaded nor deleted. If a
checkpoint lost its manifest, its remains are replaced when its tag is saved again.

    save_dir/latest                    the newest tag, for people; a load goes by the manifests
    save_dir/<tag>/manifest.json       format, tag, order, world size, files with size and SHA-256,
                                       and its SHA-256
    save_dir/<tag>/client_state.*      the caller's values
    save_dir/<tag>/rng/rank_00000.*    generators of each rank
    save_dir/<tag>/...                 what the strategy's writer put there
"""

import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from lightrft.config.files import FileEntry, make_folder, named_errors
from lightrft.strategy.checkpoints.files import FileWriter, capture_rng_state, save_state
from lightrft.strategy.checkpoints.manifest import (
    CLIENT_STATE_NAME,
    MANIFEST_NAME,
    REPLACED_PREFIX,
    Checkpoint,
    Manifest,
    is_plain_name,
    list_checkpoints,
    looks_like_checkpoint,
    rng_file,
    scan_checkpoints,
)
from lightrft.strategy.distributed.collectives import (
    ALONE,
    Group,
    gather_objects,
    group_rank,
    group_size,
)
from lightrft.strategy.distributed.process_end import CheckpointError, NonFiniteError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Write = Callable[[Path, FileWriter], None]

LATEST_NAME = "latest"
_TEMPORARY_PREFIX = ".lightrft-tmp-"
_TRASH_PREFIX = ".lightrft-del-"
_MEGABYTE = 10**6


def together(action: Callable[[], Result], group: Group) -> list[Result]:
    """Run `action` on every rank; every rank returns all results or raises.

    Raises:
        CheckpointError: It failed on some rank; the message names rank and error.
        NonFiniteError: Some rank has values that are not finite.
    """
    outcome: tuple[Result | None, str | NonFiniteError | None]
    try:
        outcome = action(), None
    except NonFiniteError as error:
        outcome = None, error
    except Exception as error:  # raised on all ranks below, so that none waits for another
        rank = group_rank(group)
        logger.debug("rank %d failed", rank, exc_info=True)
        outcome = None, f"rank {rank}: {type(error).__name__}: {error}"
    outcomes = gather_objects(outcome, group)
    problems = [problem for _, problem in outcomes if problem is not None]
    for problem in problems:
        if isinstance(problem, NonFiniteError):
            raise problem
    if problems:
        raise CheckpointError("; ".join(map(str, problems)))
    return [cast("Result", result) for result, _ in outcomes]


def on_first(action: Callable[[], Result], group: Group) -> Result:
    """Run `action` on the first rank and return its result on every rank."""
    results = together(lambda: action() if group_rank(group) == 0 else None, group)
    return cast("Result", results[0])


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """One call of `save_ckpt`, without the model.

    Args:
        save_dir: Folder that holds the checkpoints of one model.
        strategy: Name of the strategy class.
        tag: Name of the checkpoint; None takes `global_step<N>` from the client state's
            "global_step", or `step<N>` with the next free number.
        max_num: Checkpoints to keep, the new one included.
        max_mem: MB (10^6 bytes) that the kept checkpoints may take.
        client_state: See `lightrft.strategy.checkpoints.files.save_state`.
        save_latest: Whether a load without a tag may take this one.
        details: See `Manifest.details`.

    Raises:
        ValueError: `max_num` or `max_mem` is not positive, or the tag is not a plain folder name.
    """

    save_dir: Path
    strategy: str = ""
    tag: str | None = None
    max_num: int = 3
    max_mem: float = 1000
    client_state: Mapping[str, object] = field(default_factory=dict)
    save_latest: bool = True
    details: Mapping[str, int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_num <= 0:
            raise ValueError(
                f"max_num must be at least 1, the new checkpoint itself: got {self.max_num}"
            )
        if self.max_mem <= 0:
            raise ValueError(f"max_mem must be a positive number of MB: got {self.max_mem}")
        if self.tag is not None and (not is_plain_name(self.tag) or self.tag == LATEST_NAME):
            raise ValueError(
                f"tag must be a plain folder name other than {LATEST_NAME!r}: got {self.tag!r}"
            )


def write_checkpoint(request: SaveRequest, write: Write, *, group: Group = ALONE) -> Checkpoint:
    """Write one checkpoint, then rotate older ones. Collective.

    Args:
        request: Folder, name and limits of the checkpoint.
        write: Function that writes this rank's files with the writer it receives, into the folder
            that all ranks share. It must reach the same collectives on every rank.
        group: Participating ranks; by default this process alone.

    Raises:
        CheckpointError: Writing failed on some rank (named in the message), a folder with this tag
            is not a checkpoint, or `save_dir` is not shared by all ranks; nothing was changed.
    """
    files = FileWriter()
    draft = begin_checkpoint(request, write, files, group=group)
    return complete_checkpoint(request, draft, files.flush, group=group)


def begin_checkpoint(
    request: SaveRequest, write: Write, files: FileWriter, *, group: Group
) -> Checkpoint:
    """Run the first half of `write_checkpoint`: everything that reads the state of the run.

    Returns:
        Checkpoint in a temporary folder that nobody takes as complete, without its list of files.
    """
    # The generators are read first: writing may draw random numbers.
    rng_state = capture_rng_state()
    draft = on_first(lambda: _begin(request, group_size(group)), group)

    def write_files() -> None:
        write(draft.path, files)
        generators = rng_file(draft.path, group_rank(group))
        generators.parent.mkdir(exist_ok=True)
        save_state(generators, rng_state, files)
        if group_rank(group) == 0:
            save_state(draft.path / CLIENT_STATE_NAME, request.client_state, files)

    with _removed_on_failure(draft, group):
        together(lambda: _require_shared(draft.path), group)
        together(write_files, group)
    return draft


def complete_checkpoint(
    request: SaveRequest, draft: Checkpoint, flush: Callable[[], None], *, group: Group
) -> Checkpoint:
    """Run the second half: flush and hash the files, publish the folder, rotate older ones.

    Args:
        request: Request of the checkpoint.
        draft: Result of `begin_checkpoint`.
        flush: Function that writes the files of this rank that `begin_checkpoint` only copied.
        group: Ranks of `begin_checkpoint`, possibly another group that a background thread may use.

    Raises:
        CheckpointError: It failed on some rank (named in the message); nothing was changed.
    """
    with _removed_on_failure(draft, group):
        together(flush, group)
        names = on_first(lambda: _list_files(draft.path), group)
        share = names[group_rank(group) :: group_size(group)]
        hashed = together(lambda: [flush_and_hash(draft.path, name) for name in share], group)
        entries = sorted((entry for part in hashed for entry in part), key=lambda e: e.path)
        manifest = replace(draft.manifest, files=tuple(entries))
        on_first(lambda: _publish(draft.path, manifest), group)
    on_first(
        lambda: rotate(request.save_dir, max_num=request.max_num, max_mem=request.max_mem), group
    )
    return Checkpoint(request.save_dir / manifest.tag, manifest)


@contextmanager
def _removed_on_failure(draft: Checkpoint, group: Group) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if group_rank(group) == 0:
            shutil.rmtree(draft.path, ignore_errors=True)
        raise


def _begin(request: SaveRequest, world_size: int) -> Checkpoint:
    """Choose the tag and its order, and create the temporary folder."""
    save_dir = request.save_dir
    make_folder(save_dir)
    _remove_abandoned(save_dir)
    order = 1 + max((earlier.manifest.order for earlier in list_checkpoints(save_dir)), default=0)
    tag = request.tag if request.tag is not None else _default_tag(request.client_state, order)
    target = save_dir / tag
    if target.exists() and not looks_like_checkpoint(target):
        raise CheckpointError(
            f"cannot save checkpoint {tag!r}: {target} exists and is not a checkpoint; "
            "choose another tag or move it away"
        )
    folder = save_dir / f"{_TEMPORARY_PREFIX}{tag}-{socket.gethostname()}-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    details = dict(request.details)
    manifest = Manifest(tag, order, request.strategy, world_size, request.save_latest, details)
    return Checkpoint(folder, manifest)


def _require_shared(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not visible: all ranks must see the same save_dir")


def _publish(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and rename the temporary folder to its tag."""
    save_dir = folder.parent
    target = save_dir / manifest.tag
    write_text_atomically(folder / MANIFEST_NAME, manifest.to_json())
    if manifest.is_latest:
        # The pointer goes first: if the rename never happens it names a missing folder, and
        # a load takes the newest complete checkpoint instead.
        pointer = save_dir / LATEST_NAME
        if pointer.is_dir() and not pointer.is_symlink():
            shutil.rmtree(pointer)  # no file of ours is a folder
        write_text_atomically(pointer, manifest.tag + "\n")
    replaced = save_dir / f"{REPLACED_PREFIX}{manifest.tag}"
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    folder.rename(target)
    _flush_folder(save_dir)
    shutil.rmtree(replaced, ignore_errors=True)


def find_checkpoint(load_dir: Path, tag: str | None = None, *, group: Group = ALONE) -> Checkpoint:
    """Return the checkpoint to load, with all its files verified; see `find_checkpoints`."""
    return find_checkpoints([load_dir], tag, group=group)[0]


def find_checkpoints(
    load_dirs: Sequence[Path],
    tag: str | None = None,
    *,
    group: Group = ALONE,
    accepts: Callable[[Mapping[str, object]], None] | None = None,
) -> list[Checkpoint]:
    """Return one whole checkpoint of each folder, all of one tag; collective.

    Without a tag, take the newest. Those that are damaged in any folder are skipped with a warning;
    those saved with `save_latest=False` come last.

    Args:
        load_dirs: Folders of checkpoints; the first one's order decides which is newest.
        tag: Wanted tag, or None.
        group: Ranks that divide the verification of the files.
        accepts: Function that raises if the client state of a first-folder checkpoint is unusable.

    Raises:
        FileNotFoundError: There is no checkpoint (with this tag), nor remains of one.
        CheckpointError: None is whole; the message says what is wrong with each.
    """
    candidates, failures = on_first(lambda: _candidates(load_dirs, tag), group)
    for checkpoints in candidates:
        verify = partial(_damage, checkpoints, group, accepts)
        problems = [problem for part in together(verify, group) for problem in part]
        if not problems:
            return checkpoints
        failures.append("; ".join(problems))
        if group_rank(group) == 0:
            logger.warning("skipping damaged checkpoint %s", failures[-1])
    if failures:
        listed = " | ".join(failures)
        raise CheckpointError(f"no whole checkpoint: {listed}; move all of them away to start over")
    what = "checkpoint" if tag is None else f"checkpoint with tag {tag!r}"
    tags = [item.manifest.tag for item in list_checkpoints(load_dirs[0])]
    raise FileNotFoundError(f"no {what} in {load_dirs[0]}: found {tags}")


def _candidates(
    load_dirs: Sequence[Path], tag: str | None
) -> tuple[list[list[Checkpoint]], list[str]]:
    """Return checkpoints that may be loaded, the best first, and problems of the rest."""
    scans = [scan_checkpoints(folder) for folder in load_dirs]
    problems = [problem for _, damages in scans for problem in damages]
    for problem in problems:
        logger.warning("skipping %s", problem)
    by_tag = [{item.manifest.tag: item for item in whole} for whole, _ in scans]
    newest_first = scans[0][0][::-1]
    ordered = sorted(newest_first, key=lambda item: not item.manifest.is_latest)
    names = [item.manifest.tag for item in ordered]
    # A tag that only other folders have is half a checkpoint: the first folder lost its part.
    names += sorted(set().union(*by_tag[1:]) - by_tag[0].keys())
    candidates = []
    for name in names if tag is None else set(names) & {tag}:
        lacking = _lacking(load_dirs, by_tag, name)
        problems += lacking
        if not lacking:
            candidates.append([tagged[name] for tagged in by_tag])
    if tag is not None:
        problems = [text for text in problems if any(str(f / tag) in text for f in load_dirs)]
    return candidates, problems


def _lacking(
    load_dirs: Sequence[Path], by_tag: Sequence[Mapping[str, Checkpoint]], name: str
) -> list[str]:
    """Return a line for each folder without a readable checkpoint of this tag."""
    folders = [f for f, tagged in zip(load_dirs, by_tag, strict=True) if name not in tagged]
    return [f"{folder / name} is missing or damaged" for folder in folders]


def _damage(
    checkpoints: Sequence[Checkpoint],
    group: Group,
    accepts: Callable[[Mapping[str, object]], None] | None,
) -> list[str]:
    """Return problems of this rank's part of the files of checkpoints with one tag."""
    problems, rank = [], group_rank(group)
    for checkpoint in checkpoints:
        entries = checkpoint.manifest.files[rank :: group_size(group)]
        damages = [problem for entry in entries if (problem := entry.damage(checkpoint.path))]
        if rank == 0:
            damages += _unlisted(checkpoint)
        problems += [f"{checkpoint.path}: {problem}" for problem in damages]
    if accepts is not None and not problems and rank == 0:
        try:
            accepts(checkpoints[0].client_state())
        # A file with the right hash may hold anything.
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            problems.append(f"{checkpoints[0].path}: {CLIENT_STATE_NAME} is not usable: {error}")
    return problems


def _unlisted(checkpoint: Checkpoint) -> list[str]:
    """Return files that a load might take for parts of the checkpoint, but that are not."""
    listed = {MANIFEST_NAME, *(entry.path for entry in checkpoint.manifest.files)}
    return [
        f"{name} does not belong to it"
        for name in _list_files(checkpoint.path)
        if name not in listed and name.endswith((".safetensors", ".json", ".pt"))
    ]


def rotate(save_dir: Path, *, max_num: int, max_mem: float) -> list[Path]:
    """Delete the oldest checkpoints until the limits hold; the newest is never deleted.

    Args:
        save_dir: Folder of checkpoints; folders without a manifest are left alone.
        max_num: Checkpoints to keep.
        max_mem: MB that the kept ones may take.

    Returns:
        Deleted folders.
    """
    kept = list_checkpoints(save_dir)
    deleted = []
    while len(kept) > 1 and (
        len(kept) > max_num or sum(c.manifest.num_bytes for c in kept) > max_mem * _MEGABYTE
    ):
        oldest = kept.pop(0)
        # Renamed first: a kill in the middle leaves no folder that still looks complete.
        trash = save_dir / f"{_TRASH_PREFIX}{oldest.path.name}-{os.getpid()}"
        oldest.path.rename(trash)
        shutil.rmtree(trash)
        deleted.append(oldest.path)
    if kept and kept[-1].manifest.num_bytes > max_mem * _MEGABYTE:
        logger.warning(
            "the newest checkpoint %s takes %.1f MB, more than max_mem = %.1f MB; it is kept",
            kept[-1].path,
            kept[-1].manifest.num_bytes / _MEGABYTE,
            max_mem,
        )
    return deleted


def write_text_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader sees the old or the new text, never a part."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}.tmp")
    with named_errors(path), temporary.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    _flush_folder(path.parent)


def _default_tag(client_state: Mapping[str, object], order: int) -> str:
    step = client_state.get("global_step")
    return f"global_step{step}" if isinstance(step, int) else f"step{order}"


def _list_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def flush_and_hash(folder: Path, name: str) -> FileEntry:
    """Flush a file to the disk and return its entry."""
    path = folder / name
    with named_errors(path), path.open("rb") as stream:
        os.fsync(stream.fileno())
    return FileEntry.of(folder, name)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with named_errors(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(save_dir: Path) -> None:
    """Remove the remains of processes that no longer exist."""
    host = socket.gethostname()
    for path in save_dir.glob(f"{_TEMPORARY_PREFIX}*-{host}-*"):
        pid = path.name.rsplit("-", 1)[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)
    for path in save_dir.glob(f"{_TRASH_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)
