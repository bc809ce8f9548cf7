"""What import-linter cannot see: imports inside functions are allowed, at the top of a module they are not."""

import ast
import sys

import pytest
from processes import ROOT, environment, run

PACKAGE = ROOT / "hdma"
# torch may be missing, and MPI starts when imported: only where they are used.
HEAVY = {"torch", "mpi4py", "ml_dtypes"}
STANDARD_ONLY = ("plan.py", "layout.py", "topology.py", "launch.py", "env.py", "errors.py", "algorithms/*.py")


def imported(tree, top_level_only):
    """Names of the packages that a module imports; at its top level, or anywhere."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "hdma").split(".")[0] if not node.level else "hdma"
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        type_checking = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        if not (top_level_only and (inside or type_checking)):
            waiting += ast.iter_child_nodes(node)


# The backend is a part of torch's, and nothing else imports it.
FREE = [path for path in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "backend" not in path.parents]


@pytest.mark.parametrize("path", FREE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_heavy_import_at_the_top(path):
    assert not HEAVY & set(imported(ast.parse(path.read_text()), top_level_only=True))


def test_standard_library_only():
    for pattern in STANDARD_ONLY:
        for path in PACKAGE.glob(pattern):
            packages = set(imported(ast.parse(path.read_text()), top_level_only=False))
            assert packages <= {*sys.stdlib_module_names, "hdma"}, path


def test_import_loads_neither_torch_nor_mpi():
    check = "import sys, hdma; print({'torch', 'mpi4py', 'ml_dtypes'} & set(sys.modules))"
    done = run([sys.executable, "-c", check], environment())
    assert (done.code, done.out.strip()) == (0, "set()")


def test_import_is_quick():
    """Beside numpy's in the same process, in CPU time: machines and what else runs on them differ."""
    check = "import time; a = time.process_time(); import numpy; b = time.process_time(); import hdma; "
    check += "print((time.process_time() - b) / (b - a))"
    ratios = [float(run([sys.executable, "-c", check], environment()).out) for _ in range(5)]
    assert min(ratios) < 2
