"""How many mutants of `lightrft.algorithms` the audit finds.

    python scripts/audit_mutants.py                  all files, every mutant
    python scripts/audit_mutants.py kl.py policy     some files or folders
    python scripts/audit_mutants.py --sample 10      every tenth mutant

mutmut 3 leaves decorated functions alone, and here every policy loss and estimator is decorated; so
the mutants are made here, by the same operators: numbers, comparisons, arithmetic, boolean and
unary operators, `min`/`max` and the like, keyword arguments left out, arguments replaced by None,
return values.

Each runs in twelve steps of a very small model that between them use every loss and estimator. A
mutant is "dead" if no step reaches it, "raises" if a step ends with an exception, "equivalent" if
it changes no loss, gradient norm or weight of any step by more than the tolerances of the audit;
of the others it is "found" if the audit of a step names a difference, else "missed".
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import importlib.util
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "packages" / "trainer" / "src"
ALGORITHMS = SOURCE / "lightrft" / "algorithms"
BINARY = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Div, ast.Mod: ast.Div, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
               ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
               ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip
NAMES = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "sum": "mean",
         "mean": "sum", "exp": "expm1", "expm1": "exp", "amin": "amax", "amax": "amin"}  # fmt: skip
STEPS = (
    {"policy_loss": "ppo", "dual_clip": 1.3, "eps_clip": 0.1, "max_epochs": 2},
    {"policy_loss": "gspo", "advantage_estimator": "rloo", "eps_clip": 0.05},
    {"policy_loss": "gspo-token", "advantage_estimator": "reinforce", "gamma": 0.9,
     "init_kl_coef": 0.3, "eps_clip": 0.05},
    {"policy_loss": "gmpo", "advantage_estimator": "dr_grpo", "policy_loss_args":
     {"max_log_ratio": 0.1}},
    {"policy_loss": "cpgd", "advantage_estimator": "cpgd", "advantage_args":
     {"weighting": "clip_filter"}, "policy_loss_args": {"drift_coef": 0.3, "drift_cap": 0.2}},
    {"policy_loss": "cispo", "advantage_estimator": "opo", "eps_clip_low": 0.1,
     "loss_agg_mode": "seq-mean-token-sum-norm", "init_kl_coef": 0.2, "use_kl_loss": True,
     "kl_estimator": "k3_is"},
    {"policy_loss": "sapo", "advantage_estimator": "group_mean_batch_std", "init_kl_coef": 0.2,
     "use_kl_loss": True, "kl_estimator": "k2", "high_entropy_token_ratio": 0.4},
    {"policy_loss": "clip_cov", "advantage_estimator": "reinforce++", "policy_loss_args":
     {"cov_ratio": 0.2, "cov_low": 0.01}, "high_entropy_token_ratio": 0.4,
     "high_entropy_scope": "sequence"},
    {"policy_loss": "kl_cov", "advantage_estimator": "reinforce_baseline", "policy_loss_args":
     {"cov_ratio": 0.2}, "init_kl_coef": 0.2, "use_kl_loss": True, "kl_estimator": "abs"},
    {"policy_loss": "reinforce", "advantage_estimator": "remax", "reward_running_norm": True,
     "reward_running_norm_minus_mean": True, "reward_clip": 0.8,
     "off_policy_correction": "weight:ratio:geometric:high=1.1:mean-one reject:k2:worst:high=0.2"},
    {"policy_loss": "dapo", "advantage_estimator": "gae", "lambd": 0.8, "value_clip": 0.05,
     "init_kl_coef": 0.2, "kl_estimator": "k1",
     "off_policy_correction": "tis:high=1.1 reject:k3:sequence:high=0.1:negative"},
    {"policy_loss": "dr_grpo", "advantage_estimator": "cpgd", "advantage_args":
     {"weighting": "std"}, "init_kl_coef": 0.2, "use_kl_loss": True, "kl_estimator": "k3",
     "off_policy_correction": "mis:low=0.3 reject:difference:token:low=-0.01:positive"},
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A changed module; `lines` show that it runs, none if it does while the module is imported."""

    path: Path
    line: int
    what: str
    tree: ast.Module
    lines: frozenset[int]


def changed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Every other form of one node."""
    if isinstance(node, ast.Call):
        yield from changed_calls(node)
    elif isinstance(node, ast.Constant):
        yield from changed_constants(node)
    elif isinstance(node, ast.AugAssign):
        yield "assignment", ast.Assign([node.target], node.value)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "return", ast.Return(ast.Constant(None))
    elif isinstance(node, ast.expr):
        yield from changed_operators(node)


def changed_constants(node: ast.Constant) -> Iterator[tuple[str, ast.AST]]:
    """Numbers, truth values and None."""
    if isinstance(node.value, bool):
        yield f"{node.value}", ast.Constant(not node.value)
    elif isinstance(node.value, int | float):
        yield f"{node.value} + 1", ast.Constant(node.value + 1)
    elif node.value is None:
        yield "None", ast.Constant("")


def changed_calls(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    """Without each keyword, and with None for each argument."""
    for index in range(len(node.keywords)):
        kept = node.keywords[:index] + node.keywords[index + 1 :]
        yield f"without {node.keywords[index].arg}", ast.Call(node.func, node.args, kept)
    for index in range(len(node.args)):
        args = [*node.args]
        args[index] = ast.Constant(None)
        yield f"argument {index} None", ast.Call(node.func, args, node.keywords)


def changed_operators(node: ast.expr) -> Iterator[tuple[str, ast.AST]]:
    """Operators, and functions that have a counterpart."""
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        yield type(node.op).__name__, ast.BinOp(node.left, BINARY[type(node.op)](), node.right)
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        ops = [COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
        yield type(node.ops[0]).__name__, ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield type(node.op).__name__, ast.BoolOp(other, node.values)
    elif isinstance(node, ast.UnaryOp):
        yield type(node.op).__name__, node.operand
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield node.attr, ast.Attribute(node.value, NAMES[node.attr], node.ctx)


class Replace(ast.NodeTransformer):
    """Replaces the node with a number, counted in the order of a walk."""

    def __init__(self, wanted: int, other: ast.AST) -> None:
        self._wanted, self._other, self._count = wanted, other, -1

    def visit(self, node: ast.AST) -> ast.AST:
        """Counts depth first."""
        self._count += 1
        if self._count == self._wanted:
            return ast.copy_location(copy.deepcopy(self._other), node)
        return self.generic_visit(node)


def depth_first(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes in the order of `Replace`."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from depth_first(child)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All mutants of a file: bodies of functions, defaults and decorators; not annotations."""
    tree = ast.parse(path.read_text())
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            skipped |= set(ast.walk(node.annotation))
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            skipped |= set(ast.walk(node.returns))
        elif isinstance(node, ast.Raise | ast.If) and "raise" in ast.unparse(node).split("\n")[-1]:
            skipped |= set(ast.walk(node))  # what is refused is no matter of an audit
    statements = statement_lines(tree)
    for number, node in enumerate(depth_first(tree)):
        for what, other in () if node in skipped else changed(node):
            copied = Replace(number, other).visit(copy.deepcopy(tree))
            line = getattr(node, "lineno", 0)
            shown = statements.get(node, frozenset())
            yield Mutant(path, line, what, ast.fix_missing_locations(copied), shown)


def statement_lines(tree: ast.Module) -> dict[ast.AST, frozenset[int]]:
    """Lines of the statement around each node inside the bodies of functions."""
    found: dict[ast.AST, frozenset[int]] = {}
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        for statement in (n for part in function.body for n in ast.walk(part)):
            if isinstance(statement, ast.stmt):
                is_block = hasattr(statement, "body")
                last = statement.body[0].lineno - 1 if is_block else statement.end_lineno
                lines = frozenset(range(statement.lineno, (last or 0) + 1))
                for node in ast.walk(statement):
                    found[node] = lines
    return found


class Bench:
    """Runs steps with a mutant in place."""

    def __init__(self, folder: Path) -> None:
        helper = ROOT / "tests" / "audit" / "world.py"
        spec = importlib.util.spec_from_file_location("audit_world", helper)
        self.world = importlib.util.module_from_spec(spec)
        sys.modules["audit_world"] = self.world
        spec.loader.exec_module(self.world)
        self.folder = folder
        self.model = self.world.write_model(folder / "model")
        self.executed: dict[tuple[Path, int], set[int]] = {}
        self.whole = [self.facts_of(index) for index in range(len(STEPS))]

    def record(self, index: int) -> Path:
        """Records a step; the folder of its run."""
        run = self.folder / f"run{index}"
        with contextlib.redirect_stdout(io.StringIO()):
            settings = {"max_epochs": 1, "advantage_estimator": "group_norm", **STEPS[index]}
            self.world.record_step(self.model, run, settings, sgd=True)
        return run

    def facts_of(self, index: int) -> dict[str, object]:
        """What the step did, and which lines of the algorithms it ran."""
        lines: set[tuple[str, int]] = set()

        def trace(frame, event, _):  # noqa: ANN001, ANN202
            name = frame.f_code.co_filename
            if "lightrft/algorithms" not in name:
                return None
            lines.add((name, frame.f_lineno))
            return trace

        sys.settrace(trace)
        try:
            run = self.record(index)
        finally:
            sys.settrace(None)
        for name, line in lines:
            self.executed.setdefault((Path(name), line), set()).add(index)
        return self.result(run)

    def result(self, run: Path) -> dict[str, object]:
        """Losses, norms and the weights after."""
        from lightrft.audit.record import read_record

        record = read_record(run)
        updates = [(update.grad_norm, *update.losses.values()) for update in record.facts.updates]
        after = record.state("after", "actor")
        return {
            "updates": np.array([x for update in updates for x in update]),
            "after": {name: value.double().numpy() for name, value in after.items()},
            "before": {n: v.double().numpy() for n, v in record.state("before", "actor").items()},
        }

    def steps_for(self, mutant: Mutant) -> list[int]:
        """Steps that run the mutated line, or all for lines that run at import."""
        lines = {line: steps for line, steps in self.executed.items() if line[0] == mutant.path}
        shown = mutant.lines or {line for _, line in lines}
        return sorted({i for (_, line), steps in lines.items() if line in shown for i in steps})

    def try_mutant(self, mutant: Mutant) -> str:
        """The outcome: dead (no step reaches it), raises, equivalent, found or missed."""
        steps = self.steps_for(mutant)
        if not steps:
            return "dead"
        outcome = "equivalent"
        with planted(mutant):
            for index in steps:
                try:
                    run = self.record(index)
                except Exception:  # noqa: BLE001 - any crash shows the mutant
                    return "raises"
                if not self.is_changed(index, run):
                    continue
                from lightrft.audit.report import audit_step

                if audit_step(run).first_difference is not None:
                    return "found"
                outcome = "missed"
        return outcome

    def is_changed(self, index: int, run: Path) -> bool:
        """Whether a loss, a gradient or the update differs by more than the tolerances."""
        from lightrft.audit.tolerances import TOLERANCES

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


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The mutated module in place of its own: every reference to its functions leads to it."""
    name = ".".join(mutant.path.relative_to(SOURCE).with_suffix("").parts)
    module = importlib.import_module(name.removesuffix(".__init__"))
    users = [
        (other, key, value)
        for other in list(sys.modules.values())
        if getattr(other, "__name__", "").startswith("lightrft")
        and not other.__name__.startswith("lightrft.audit")
        for key, value in list(vars(other).items())
        if getattr(value, "__module__", None) == module.__name__
        or (key.isupper() and key in vars(module) and vars(module)[key] is value)
    ]
    own = dict(vars(module))
    try:
        with contextlib.suppress(Exception):
            exec(compile(mutant.tree, str(mutant.path), "exec"), vars(module))
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
    return sorted(path for path in found if path.name != "metrics.py")


def main(argv: list[str] | None = None) -> int:
    """Counts outcomes; 1 if a mutant that changes a step was missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--sample", type=int, default=1, help="Every N-th mutant.")
    given = parser.parse_args(argv)
    counts: dict[str, int] = {}
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        mutants = [m for path in files_of(given.names) for m in mutants_of(path)]
        for mutant in mutants[:: given.sample]:
            outcome = bench.try_mutant(mutant)
            counts[outcome] = counts.get(outcome, 0) + 1
            if outcome == "missed":
                missed.append(f"{mutant.path.relative_to(ALGORITHMS)}:{mutant.line} {mutant.what}")
                print("missed:", missed[-1], flush=True)
    print(json.dumps({"mutants": sum(counts.values()), **counts}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
