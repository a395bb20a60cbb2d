"""How many mutants of `lightrft.algorithms` the audit finds.

    uv run --group mutation python scripts/audit_mutants.py                  every mutant
    uv run --group mutation python scripts/audit_mutants.py kl.py policy     of some files
    uv run --group mutation python scripts/audit_mutants.py --sample 10      every tenth

The mutants are those of mutmut's operators. mutmut leaves decorated functions, decorators and
constants of a module alone; here every policy loss and estimator is decorated, so its walk is
extended to them. Each mutant runs in a fork, with a deadline.

Each runs in some steps of a very small model that between them use every loss and estimator. A
mutant is "dead" if no step reaches it, "raises" if a step ends with an exception, "hangs" if it
does not end, "equivalent" if it changes no loss, gradient norm or weight of any step by more than
the tolerances of the audit; of the others it is "found" if the audit of a step names a difference,
else "missed".
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import gc
import importlib
import importlib.util
import io
import json
import os
import pickle
import select
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

Place = tuple[Path, int]  # a line of a file
ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "packages" / "trainer" / "src"
ALGORITHMS = SOURCE / "lightrft" / "algorithms"
MUTANT_SECONDS = 120.0
CANNOT_LOOK = "cannot look into"
STEPS = (
    {"policy_loss": "ppo", "dual_clip": 1.3, "eps_clip": 0.1, "max_epochs": 2},
    {"policy_loss": "gspo", "advantage_estimator": "rloo", "eps_clip": 0.05},
    {
        "policy_loss": "gspo-token",
        "advantage_estimator": "reinforce",
        "gamma": 0.9,
        "init_kl_coef": 0.3,
        "eps_clip": 0.05,
    },
    {
        "policy_loss": "gmpo",
        "advantage_estimator": "dr_grpo",
        "policy_loss_args": {"max_log_ratio": 0.1},
    },
    {
        "policy_loss": "cpgd",
        "advantage_estimator": "cpgd",
        "advantage_args": {"weighting": "clip_filter"},
        "policy_loss_args": {"drift_coef": 0.3, "drift_cap": 0.2},
    },
    {
        "policy_loss": "cispo",
        "advantage_estimator": "opo",
        "eps_clip_low": 0.1,
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "init_kl_coef": 0.2,
        "use_kl_loss": True,
        "kl_estimator": "k3_is",
    },
    {
        "policy_loss": "sapo",
        "advantage_estimator": "group_mean_batch_std",
        "init_kl_coef": 0.2,
        "use_kl_loss": True,
        "kl_estimator": "k2",
        "high_entropy_token_ratio": 0.4,
    },
    {
        "policy_loss": "clip_cov",
        "advantage_estimator": "reinforce++",
        "policy_loss_args": {"cov_ratio": 0.2, "cov_low": 0.01},
        "high_entropy_token_ratio": 0.4,
        "high_entropy_scope": "sequence",
    },
    {
        "policy_loss": "kl_cov",
        "advantage_estimator": "reinforce_baseline",
        "policy_loss_args": {"cov_ratio": 0.2},
        "init_kl_coef": 0.2,
        "use_kl_loss": True,
        "kl_estimator": "abs",
    },
    {
        "policy_loss": "reinforce",
        "advantage_estimator": "remax",
        "reward_running_norm": True,
        "reward_running_norm_minus_mean": True,
        "reward_clip": 0.8,
        "off_policy_correction": (
            "weight:ratio:geometric:high=1.1:mean-one reject:k2:worst:high=0.2"
        ),
    },
    {
        "policy_loss": "dapo",
        "advantage_estimator": "gae",
        "lambd": 0.8,
        "value_clip": 0.05,
        "init_kl_coef": 0.2,
        "kl_estimator": "k1",
        "off_policy_correction": "tis:high=1.1 reject:k3:sequence:high=0.1:negative",
    },
    {
        "policy_loss": "dr_grpo",
        "advantage_estimator": "cpgd",
        "advantage_args": {"weighting": "std"},
        "init_kl_coef": 0.2,
        "use_kl_loss": True,
        "kl_estimator": "k3",
        "off_policy_correction": "mis:low=0.3 reject:difference:token:low=-0.01:positive",
    },
    {
        "policy_loss": "dro",
        "advantage_estimator": "maxrl",
        "init_kl_coef": 0.2,
        "use_kl_loss": True,
        "kl_estimator": "k3+",
    },
    {
        "policy_loss": "ppo-sequence",
        "advantage_estimator": "pass_at_k",
        "eps_clip": 0.05,
        "init_kl_coef": 0.2,
        "use_kl_loss": True,
        "kl_estimator": "k1_is",
    },
    {
        "policy_loss": "sapo-sequence",
        "advantage_estimator": "batch_mean_group_std",
        "init_kl_coef": 0.2,
        "use_kl_loss": True,
        "kl_estimator": "k2_is",
    },
    {
        "policy_loss": "ppo",
        "advantage_estimator": "gdpo",
        "off_policy_correction": "tis reject:distance:geometric:high=0.2:towards",
    },
    {"policy_loss": "reinforce", "advantage_estimator": "raft"},
    {"policy_loss": "ppo", "advantage_estimator": "zero", "teacher": "", "teacher_coef": 0.7},
    {
        "policy_loss": "ppo",
        "advantage_estimator": "gpg",
        "init_kl_coef": 0.2,
        "use_kl_loss": True,
        "kl_estimator": "k1+",
        "off_policy_correction": (
            "weight:ratio:largest:high=1.3 reject:binary_kl:geometric:high=0.0005"
        ),
    },
    {
        "policy_loss": "ppo",
        "advantage_estimator": "gae",
        "advantage_args": {"length_alpha": 0.4},
        "init_kl_coef": 0.2,
        "use_kl_loss": True,
        "kl_estimator": "k3_unclamped",
        "off_policy_correction": "tis:new/engine reject:reverse_k3:token:high=0.05",
    },
)
DEFAULTS = {"max_epochs": 1, "advantage_estimator": "group_norm"}


@dataclass(frozen=True)
class Mutant:
    """A changed module; `lines` show that it runs, none if it does while the module is imported."""

    path: Path
    line: int
    what: str
    code: str
    lines: frozenset[int]

    def compiled(self) -> CodeType | None:
        """What runs in place of the module; None if it is no Python."""
        try:
            return compile(self.code, str(self.path), "exec")
        except SyntaxError:
            return None


def mutants_of(
    path: Path, choose: Callable[[list[Any]], list[Any]] = lambda mutations: mutations
) -> Iterator[Mutant]:
    """All mutants of a file: functions, also decorated ones, decorators, defaults, constants.

    Args:
        path: The file.
        choose: Takes some of mutmut's mutations; the code of the others is not written.
    """
    import libcst
    from libcst.metadata import MetadataWrapper, PositionProvider
    from mutmut.mutation.file_mutation import MutationVisitor, deep_replace
    from mutmut.mutation.mutators import mutation_operators
    from mutmut.mutation.pragma_handling import IgnoredCode

    class EveryFunction(MutationVisitor):
        left: set[libcst.CSTNode] = set()

        def _skip_node_and_children(self, node: libcst.CSTNode) -> bool:
            if isinstance(node, libcst.ClassDef):
                # How a dataclass is made is no matter of an audit either.
                self.left |= set(node.decorators)
            if isinstance(node, libcst.FunctionDef | libcst.Decorator | libcst.Param):
                return node in self.left
            # What is refused, and how the refusal reads, is no matter of an audit.
            return isinstance(node, libcst.Raise) or super()._skip_node_and_children(node)

    source = path.read_text()
    wrapper = MetadataWrapper(libcst.parse_module(source))
    visitor = EveryFunction(mutation_operators, IgnoredCode(set(), set(), set()))
    wrapper.visit(visitor)
    places = wrapper.resolve(PositionProvider)
    shown = statement_lines(ast.parse(source))
    for mutation in choose(visitor.mutations):
        before, after = mutation.original_node, mutation.mutated_node
        line = places[before].start.line
        code = deep_replace(wrapper.module, before, after).code
        what = changed_text(source, code)
        yield Mutant(path, line, what, code, shown.get(line, frozenset()))


def changed_text(before: str, after: str) -> str:
    """The first line that a mutation made, or that it took away."""
    for old, new in zip(before.split("\n"), after.split("\n"), strict=False):
        if old != new:
            return new.strip()
    return "nothing"


def statement_lines(tree: ast.Module) -> dict[int, frozenset[int]]:
    """For each line in the body of a function, the lines of the innermost statement around it."""
    found: dict[int, frozenset[int]] = {}
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        for statement in (n for part in function.body for n in ast.walk(part)):
            if isinstance(statement, ast.stmt):
                is_block = hasattr(statement, "body")
                last = statement.body[0].lineno - 1 if is_block else statement.end_lineno
                lines = range(statement.lineno, max(statement.lineno, last or 0) + 1)
                found |= dict.fromkeys(lines, frozenset(lines))
    return found


@dataclass(frozen=True)
class Call:
    """One call from outside into the algorithms, with what it ran and what came of it."""

    module: str
    name: str
    arguments: bytes
    lines: frozenset[Place]
    result: list[bytes]

    def replayed(self) -> list[bytes]:
        """Bits of the outputs, and of the gradients of a weighted sum of them, of today's code."""
        positional, keywords = torch.load(io.BytesIO(self.arguments), weights_only=False)
        output = getattr(sys.modules[self.module], self.name)(*positional, **keywords)
        outputs = tensors_of(output)
        total = sum(
            (o.double() * torch.arange(1, o.numel() + 1).reshape(o.shape).cos()).sum()
            for o in outputs
            if o.requires_grad
        )
        given = tensors_of([positional, keywords], is_whole=False)
        inputs = [t for t in given if t.requires_grad]
        if isinstance(total, torch.Tensor):
            total.backward()
        found = [*outputs, *(t.grad for t in inputs if t.grad is not None)]
        return [t.detach().numpy().tobytes() + str(t.shape).encode() for t in found]


def tensors_of(value: object, *, is_whole: bool = True) -> list[torch.Tensor]:
    """All numbers of a value, as tensors.

    Args:
        is_whole: What it cannot look into is a TypeError; otherwise it has no numbers.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return [torch.tensor(list(repr(value).encode()))]
    if isinstance(value, dict):
        value = [part for item in value.items() for part in item]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors_of(item, is_whole=is_whole)]
    if is_whole:
        raise TypeError(f"{CANNOT_LOOK} {type(value).__name__}")
    return []


class Recorder:
    """While it is entered, every call into the algorithms is kept, and which lines ran.

    `outside` are lines of calls that cannot be repeated: of methods, of closures.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.outside: set[Place] = set()
        self.lines: set[Place] = set()
        self._inside: set[Place] | None = None

    def __enter__(self) -> Recorder:
        names = [n for n in sys.modules if n.startswith("lightrft.algorithms")]
        self._taken = [r for name in names for r in references(sys.modules[name])]
        wrapped = {id(f): self._wrap(f) for _, _, f in self._taken if isinstance(f, FunctionType)}
        for module, key, value in self._taken:
            setattr(module, key, wrapped.get(id(value), value))
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        for module, key, value in self._taken:
            setattr(module, key, value)
        self.calls = [call for call in self.calls if self._is_repeatable(call)]
        self.calls = [dataclasses.replace(call, result=call.replayed()) for call in self.calls]
        self.lines = self.outside.union(*(call.lines for call in self.calls))

    def _is_repeatable(self, call: Call) -> bool:
        try:
            if call.replayed() == call.replayed():
                return True
        except TypeError as error:
            if not str(error).startswith(CANNOT_LOOK):
                raise
        self.outside |= call.lines
        return False

    def _trace(self, frame: FrameType, event: str, _: object) -> object:
        name = frame.f_code.co_filename
        if "lightrft/algorithms" not in name:
            return None
        lines = self.outside if self._inside is None else self._inside
        lines.add((Path(name), frame.f_lineno))
        return self._trace

    def _wrap(self, function: FunctionType) -> Callable[..., object]:
        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            if self._inside is not None:
                return function(*args, **kwargs)
            kept = io.BytesIO()
            try:
                torch.save((args, kwargs), kept)
            except (pickle.PicklingError, AttributeError):  # closures cannot be kept
                return function(*args, **kwargs)
            self._inside = set()
            try:
                return function(*args, **kwargs)
            finally:
                place = (function.__module__, function.__name__)
                lines, self._inside = frozenset(self._inside), None
                self.calls.append(Call(*place, kept.getvalue(), lines, []))

        return call


class Bench:
    """Runs steps with a mutant in place."""

    def __init__(self, folder: Path) -> None:
        helper = ROOT / "tests" / "tools" / "audit" / "world.py"
        spec = importlib.util.spec_from_file_location("audit_world", helper)
        self.world = importlib.util.module_from_spec(spec)
        sys.modules["audit_world"] = self.world
        spec.loader.exec_module(self.world)
        self.folder = folder
        self.model = self.world.write_model(folder / "model")
        # Here, and each once below, so that no fork has to import or to build anything.
        from lightrft.tools.audit.report import audit_step

        self.audit_step = audit_step
        self.recorders: list[Recorder] = []
        self.whole = [self.facts_of(index) for index in range(len(STEPS))]
        gc.freeze()  # what is here is no garbage of a fork

    def record(self, index: int) -> Path:
        """Records a step; the folder of its run."""
        run = self.folder / f"run{index}"
        with contextlib.redirect_stdout(io.StringIO()):
            settings = {**DEFAULTS, **STEPS[index]}
            if "teacher" in settings:
                settings["teacher"] = self.world.write_model(self.folder / "teacher", seed=2)
            shape = self.world.shape_of(settings["advantage_estimator"])
            self.world.record_step(self.model, run, settings, sgd=True, shape=shape)
        return run

    def facts_of(self, index: int) -> dict[str, object]:
        """What the step did; what it called and which lines it ran is kept, too."""
        self.record(index)  # what is imported and cached while it runs is no part of it
        with Recorder() as recorder:
            run = self.record(index)
        self.recorders.append(recorder)
        if self.audit_step(run).first_difference is not None:
            raise AssertionError(f"the audit of step {index} finds a difference without a mutant")
        return self.result(run)

    def result(self, run: Path) -> dict[str, object]:
        """Losses, norms and the weights after."""
        from lightrft.tools.audit.record import read_record

        record = read_record(run)
        updates = [(update.grad_norm, *update.losses.values()) for update in record.facts.updates]
        after = record.state("after", "actor")
        return {
            "updates": np.array([x for update in updates for x in update]),
            "after": {name: value.double().numpy() for name, value in after.items()},
            "before": {n: v.double().numpy() for n, v in record.state("before", "actor").items()},
        }

    def try_mutant(self, mutant: Mutant) -> str:
        """What came of a mutant; steps that it may change run in a process of their own."""
        code = mutant.compiled()
        if code is None or not any(self.reaches(mutant, r) for r in self.recorders):
            return "dead"
        try:
            with planted(mutant.path, code), time_limit(MUTANT_SECONDS):
                steps = self.steps_for(mutant)
                if not steps:
                    return "equivalent"
                return forked(lambda: self.outcome(steps), MUTANT_SECONDS) or "hangs"
        except TimeoutError:
            return "hangs"
        except Exception:  # noqa: BLE001 - of the module or of a call that a step makes
            return "raises"

    @staticmethod
    def reaches(mutant: Mutant, recorder: Recorder) -> bool:
        """Return whether the step runs the mutated line, or the module if it runs at import."""
        return any(p == mutant.path and n in (mutant.lines or {n}) for p, n in recorder.lines)

    def steps_for(self, mutant: Mutant) -> list[int]:
        """Steps that a planted mutant may change: not those of which each call gives the same bits.

        What runs at import may also be read without a call: a declaration, a default.
        """
        steps = []
        for index, recorder in enumerate(self.recorders):
            places = {(mutant.path, line) for line in mutant.lines}
            is_outside = not places or bool(places & recorder.outside)
            places = places or {place for place in recorder.lines if place[0] == mutant.path}
            calls = [call for call in recorder.calls if places & call.lines]
            differs = [call for call in calls if call.replayed() != call.result]
            if differs or (is_outside and places & recorder.lines):
                steps.append(index)
        return steps

    def outcome(self, steps: list[int]) -> str:
        """Return what became of the steps: an error, a change, and whether the audit finds it."""
        gc.disable()
        found = "equivalent"
        for index in steps:
            try:
                run = self.record(index)
            except Exception:  # noqa: BLE001 - any crash shows the mutant
                return "raises"
            if not self.is_changed(index, run):
                continue
            if self.audit_step(run).first_difference is not None:
                return "found"
            found = "missed"
        return found

    def is_changed(self, index: int, run: Path) -> bool:
        """Return whether a loss, a gradient or the update differs by more than the tolerances."""
        from lightrft.tools.audit.tolerances import TOLERANCES

        limits, whole, now = TOLERANCES["float32"], self.whole[index], self.result(run)
        if whole["updates"].shape != now["updates"].shape:
            return True
        # The same scales as in the audit would need its terms: the size of the loss stands in.
        scale = np.maximum(np.abs(whole["updates"]), 1.0)
        if not (np.abs(whole["updates"] - now["updates"]) <= limits["norm"] * scale).all():
            return True
        names = [name for name in whole["after"] if name.startswith("weight/")]
        difference = sum(((whole["after"][n] - now["after"][n]) ** 2).sum() for n in names)
        size = sum(((whole["after"][n] - whole["before"][n]) ** 2).sum() for n in names)
        return not difference <= (2 * limits["sgd"]) ** 2 * size


def forked(function: Callable[[], str], seconds: float) -> str:
    """What a function returns in a fork of this process; nothing if it dies or takes longer."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            os.write(writing, function().encode())
        except Exception:  # noqa: BLE001 - the module cannot be imported
            os.write(writing, b"raises")
        finally:
            os._exit(0)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], seconds)
        return os.read(reading, 100).decode() if ready else ""
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """A TimeoutError in Python code that takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def references(module: ModuleType) -> list[tuple[ModuleType, str, object]]:
    """Where lightrft, but for the audit, holds functions, classes and constants of a module."""
    return [
        (other, key, value)
        for other in list(sys.modules.values())
        if getattr(other, "__name__", "").startswith("lightrft")
        and not other.__name__.startswith("lightrft.tools.audit")
        for key, value in list(vars(other).items())
        if getattr(value, "__module__", None) == module.__name__
        or (key.isupper() and key in vars(module) and vars(module)[key] is value)
    ]


@contextlib.contextmanager
def planted(path: Path, code: CodeType) -> Iterator[None]:
    """A mutated module in place of its own: every reference to its functions leads to it."""
    name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    module = importlib.import_module(name.removesuffix(".__init__"))
    users, own = references(module), dict(vars(module))
    try:
        exec(code, vars(module))
        for other, key, value in users:
            found = vars(module).get(getattr(value, "__name__", key), value)
            if other is not module and not isinstance(value, type):
                setattr(other, key, found)
        yield
    finally:
        vars(module).clear()
        vars(module).update(own)
        for other, key, value in users:
            setattr(other, key, value)


def files_of(names: list[str]) -> list[Path]:
    """Files of the algorithms, or those below some names."""
    wanted = [ALGORITHMS / name for name in names] or [ALGORITHMS]
    found = [p for item in wanted for p in (item.rglob("*.py") if item.is_dir() else [item])]
    return sorted(found)


def main(argv: list[str] | None = None) -> int:
    """Counts outcomes; 1 if a mutant that changes a step was missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--sample", type=int, default=1, help="Every N-th mutant.")
    parser.add_argument("--show", help="Also print the mutants of this outcome.")
    given = parser.parse_args(argv)
    counts: Counter[str] = Counter()
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for path in files_of(given.names):
            own: Counter[str] = Counter()
            for mutant in list(mutants_of(path))[:: given.sample]:
                outcome = bench.try_mutant(mutant)
                own[outcome] += 1
                if outcome in ("missed", given.show):
                    found = f"{mutant.path.relative_to(ALGORITHMS)}:{mutant.line} {mutant.what}"
                    print(f"{outcome}: {found}", flush=True)
                    missed += [found] if outcome == "missed" else []
            print(path.relative_to(ALGORITHMS), json.dumps(own), flush=True)
            counts += own
    print(json.dumps({"mutants": counts.total(), **counts}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
