"""Measure how easy the code is to read, beside codebases that are held up as models.

    python scripts/house.py [ROOT] [--packages] [--brief]

ROOT is `src/wflmc` by default. `--packages` adds a row for every package, `--brief`
prints the number of lines alone. The figures are:

- `nodes/stmt`: syntax-tree nodes per statement, over functions of three statements and
  more (median and 90 % quantile): how much a reader has to unpack at once, however the
  statement is wrapped;
- `pairs`: assignments of several unrelated values in one statement (`a, b = x, y`);
  swaps and the unpacking of a call do not count;
- `Any`: uses of `typing.Any`, under whatever name it is imported;
- `everyday`: names bound to everyday words that say nothing of what they hold;
- `args`: the percentage of public functions with two or more parameters whose docstring
  describes them under `Args`;
- `words`: the median number of words in the docstring of a public function.

No figure is a target to be met by packing or padding: read the places that are listed,
and mend what a stranger would stumble over. `scripts/ratchet.py` keeps them from
getting worse.
"""

import argparse
import ast
import io
import math
import statistics
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

HEADER = "nodes/stmt  pairs   Any  everyday  args  words"
"""The columns of a row of figures."""
MODEL_CODEBASES = {
    "BlackJAX": " 7.5, 10.8     15    25        13   43%     65",
    "posteriors": " 7.0,  9.1      0    34         0   79%     77",
    "JAX-Privacy": " 6.6,  9.3     11    26         3   64%     63",
    "Equinox": " 5.2,  7.8      3   149        10    0%     70",
}
"""The figures of other codebases, measured by the same code."""
EVERYDAY_TEXT = """
given found told heard each made kept asked lost few many most some one two other others
place places at how what room rooms say said share known wanted allowed coming done own
apart together along across least whole rest new old now here there thing things about
"""
"""The everyday words, separated by blanks."""
EVERYDAY_WORDS = frozenset(EVERYDAY_TEXT.split())
"""Names that say nothing of the value that they are bound to."""
MIN_STATEMENTS = 3
"""Functions with fewer statements have no density: their mean says little."""
DENSE_QUANTILE = 0.9
"""The quantile of density that stands for the densest functions."""
LAYOUT_TOKENS = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)
"""Tokens that do not make a line one of code."""
DECISIONS = (
    ast.If,
    ast.For,
    ast.While,
    ast.IfExp,
    ast.ExceptHandler,
    ast.comprehension,
    ast.Assert,
)
"""Syntax that adds a branch to a function."""
PARTS = (ast.expr, ast.keyword, ast.comprehension, ast.arg)
"""Syntax that counts as a node of a statement."""
BINDINGS = (ast.AnnAssign, ast.AugAssign, ast.For, ast.comprehension, ast.NamedExpr)
"""Syntax with a single target that it binds."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Occurrence(NamedTuple):
    """A name or construct that is counted, and the line that it stands on."""

    name: str
    line: int


@dataclass(frozen=True)
class FunctionMeasurement:
    """What is measured of one function.

    Args:
        name: of the function.
        line: on which it begins.
        density: syntax nodes per statement; None for functions of fewer than
            `MIN_STATEMENTS` statements.
        branches: one more than the number of decisions.
        parameters: the number of parameters, `self` included.
        docstring_words: the number of words; None for a private function, or one
            without a docstring.
        describes_arguments: whether the docstring describes the parameters; None where
            it does not have to.
    """

    name: str
    line: int
    density: float | None
    branches: int
    parameters: int
    docstring_words: int | None
    describes_arguments: bool | None


@dataclass
class FileMeasurement:
    """What is measured of one file.

    Args:
        path: relative to the root, with slashes.
        code_lines: lines without docstrings, comments and blank lines.
        functions: all functions and methods, nested ones included.
        classes: the names of all classes.
        pairs: assignments of unrelated values.
        any_uses: uses of `typing.Any`.
        everyday: names from `EVERYDAY_WORDS` that are bound.
    """

    path: str
    code_lines: int
    functions: list[FunctionMeasurement] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    pairs: list[Occurrence] = field(default_factory=list)
    any_uses: list[Occurrence] = field(default_factory=list)
    everyday: list[Occurrence] = field(default_factory=list)

    @property
    def package(self) -> str:
        """The package of the root, or the module, that the file belongs to."""
        return self.path.split("/")[0]


class Figures(NamedTuple):
    """The figures of a package; the module's docstring defines them."""

    nodes_median: float
    nodes_90: float
    pairs: int
    any_uses: int
    everyday: int
    args_percent: int
    docstring_words: float

    def row(self) -> str:
        """Return the figures as a row under `HEADER`."""
        nodes = f"{self.nodes_median:4.1f}, {self.nodes_90:4.1f}"
        counts = f"{self.pairs:5}  {self.any_uses:4}  {self.everyday:8}"
        docstrings = f"{self.args_percent:3}%  {self.docstring_words:5.0f}"
        return f"{nodes}  {counts}  {docstrings}"


def measure_tree(root: Path) -> list[FileMeasurement]:
    """Measure every Python file under a folder, except those of tests.

    Args:
        root: the folder of a package, such as `src/wflmc`.

    Returns:
        The measurements of the files, in the order of their paths.
    """
    measurements = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "test" not in name:
            text = path.read_text(encoding="utf-8")
            measurements.append(measure_file(name, text))
    return measurements


def measure_file(path: str, text: str) -> FileMeasurement:
    """Measure one file.

    Args:
        path: the name under which places in the file are reported.
        text: the source code.

    Returns:
        The measurement of the file.
    """
    tree = ast.parse(text)
    any_names = _names_of_any(tree)
    measurement = FileMeasurement(path=path, code_lines=_count_code_lines(text, tree))
    for node in ast.walk(tree):
        for name in _bound_names(node):
            if name in EVERYDAY_WORDS:
                occurrence = Occurrence(name, _line(node))
                measurement.everyday.append(occurrence)
        if _is_any(node, any_names):
            measurement.any_uses.append(Occurrence("Any", _line(node)))
        if isinstance(node, ast.Assign) and _assigns_unrelated_values(node):
            source = ast.unparse(node)
            measurement.pairs.append(Occurrence(source, node.lineno))
        if isinstance(node, ast.ClassDef):
            measurement.classes.append(node.name)
        if isinstance(node, Function):
            measurement.functions.append(measure_function(node))
    return measurement


def measure_function(function: Function) -> FunctionMeasurement:
    """Measure one function.

    Args:
        function: its syntax tree.

    Returns:
        The measurement of the function.
    """
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    is_public = not function.name.startswith("_")
    docstring = ast.get_docstring(function) if is_public else None
    is_method = bool(arguments.args) and arguments.args[0].arg in ("self", "cls")
    needs_arguments = is_public and len(named) - is_method >= 2
    return FunctionMeasurement(
        name=function.name,
        line=function.lineno,
        density=_nodes_per_statement(function),
        branches=_count_branches(function),
        parameters=len(named),
        docstring_words=len(docstring.split()) if docstring else None,
        describes_arguments=(
            _describes_arguments(docstring or "") if needs_arguments else None
        ),
    )


def compute_figures(measurements: Iterable[FileMeasurement]) -> Figures:
    """Compute the figures of some files.

    Args:
        measurements: of the files.

    Returns:
        The figures as they are printed: densities to one decimal, percentages rounded
        down. Medians of nothing are 0.
    """
    files = list(measurements)
    functions = [function for file in files for function in file.functions]
    densities = sorted(
        function.density for function in functions if function.density is not None
    )
    words = [
        function.docstring_words
        for function in functions
        if function.docstring_words is not None
    ]
    described = [
        function.describes_arguments
        for function in functions
        if function.describes_arguments is not None
    ]
    quantile = densities[int(DENSE_QUANTILE * len(densities))] if densities else 0.0
    return Figures(
        nodes_median=round(_median(densities), 1),
        nodes_90=round(quantile, 1),
        pairs=sum(len(file.pairs) for file in files),
        any_uses=sum(len(file.any_uses) for file in files),
        everyday=sum(len(file.everyday) for file in files),
        args_percent=100 * sum(described) // max(len(described), 1),
        docstring_words=_median(words),
    )


def _median(values: list[float] | list[int]) -> float:
    return statistics.median(values) if values else 0.0


def _line(node: ast.AST) -> int:
    """Return the line of a node; a comprehension's is that of its target."""
    if isinstance(node, ast.comprehension):
        return node.target.lineno
    return getattr(node, "lineno", 0)


def _names_of_any(tree: ast.Module) -> set[str]:
    """Return `Any` and the names under which a file imports it."""
    names = {"Any"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported = [alias for alias in node.names if alias.name == "Any"]
            names.update(alias.asname or alias.name for alias in imported)
    return names


def _is_any(node: ast.AST, any_names: set[str]) -> bool:
    """Return whether a node uses `typing.Any`."""
    if isinstance(node, ast.Name):
        return node.id in any_names
    return isinstance(node, ast.Attribute) and node.attr == "Any"


def _assigns_unrelated_values(node: ast.Assign) -> bool:
    """Return whether an assignment is one of several values that is not a swap."""
    target = node.targets[0]
    if not isinstance(target, ast.Tuple | ast.List):
        return False
    if not isinstance(node.value, ast.Tuple | ast.List):
        return False
    names = ast.dump(target)
    values = [ast.dump(value) for value in node.value.elts]
    swapped = [value.replace("Load()", "Store()") in names for value in values]
    return not all(swapped)


def _bound_names(node: ast.AST) -> list[str]:
    """Return the names that a node binds."""
    if isinstance(node, ast.arg):
        return [node.arg]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, BINDINGS):
        targets = [node.target]
    leaves = [leaf for target in targets for leaf in ast.walk(target)]
    names = [leaf.id for leaf in leaves if isinstance(leaf, ast.Name)]
    attributes = [leaf for leaf in leaves if isinstance(leaf, ast.Attribute)]
    return names + [leaf.attr for leaf in attributes if isinstance(leaf.ctx, ast.Store)]


def _is_docstring(node: ast.AST) -> bool:
    """Return whether a statement is a string alone."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def _count_code_lines(text: str, tree: ast.Module) -> int:
    """Count the lines without docstrings, comments and blank lines."""
    docstring_lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and _is_docstring(node):
            last_line = node.end_lineno or node.lineno
            docstring_lines.update(range(node.lineno, last_line + 1))
    code_lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT_TOKENS:
            code_lines.update(range(token.start[0], token.end[0] + 1))
    return len(code_lines - docstring_lines)


def _nodes_per_statement(function: Function) -> float | None:
    """Return the density of a function; None where it has too few statements."""
    statements = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.stmt)
        and node is not function
        and not _is_docstring(node)
    ]
    if len(statements) < MIN_STATEMENTS:
        return None
    # By identity: a nested function's parts belong to two statements, and count once.
    parts = {id(part) for statement in statements for part in _parts(statement)}
    return len(parts) / len(statements)


def _parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement, without those of statements nested in it."""
    queue = [
        child
        for child in ast.iter_child_nodes(statement)
        if not isinstance(child, ast.stmt | ast.excepthandler)
    ]
    while queue:
        node = queue.pop()
        if isinstance(node, PARTS):
            yield node
        children = ast.iter_child_nodes(node)
        queue += [child for child in children if not isinstance(child, ast.stmt)]


def _count_branches(function: Function) -> int:
    """Return one more than the number of decisions in a function."""
    branches = 1
    for node in ast.walk(function):
        if isinstance(node, DECISIONS):
            branches += 1
        elif isinstance(node, ast.BoolOp):
            branches += len(node.values) - 1
    return branches


def _describes_arguments(docstring: str) -> bool:
    """Return whether a docstring has a section of arguments with something in it."""
    section = docstring.partition("Args:")[2]
    if section:
        return any(":" in line for line in section.splitlines()[1:])
    numpy_section = docstring.partition("Parameters")[2]
    return len(numpy_section.split()) > 4


def _by_package(files: list[FileMeasurement]) -> dict[str, list[FileMeasurement]]:
    """Return the files of every package, the package with most lines of code first."""
    packages: dict[str, list[FileMeasurement]] = defaultdict(list)
    for file in files:
        packages[file.package].append(file)
    by_size = sorted(
        packages, key=lambda name: -sum(file.code_lines for file in packages[name])
    )
    return {name: packages[name] for name in by_size}


def print_table(files: list[FileMeasurement], packages: bool) -> None:
    """Print the figures of other codebases and of the measured one.

    Args:
        files: the measurements.
        packages: whether to print a row for every package as well.
    """
    print(f"  {'':16}{HEADER}      (median, 90 %)")
    for codebase, row in MODEL_CODEBASES.items():
        print(f"  {codebase:16}{row}")
    print(f"  {'this':16}{compute_figures(files).row()}")
    if packages:
        for package, package_files in _by_package(files).items():
            print(f"  {package:16}{compute_figures(package_files).row()}")


def print_worst_places(files: list[FileMeasurement]) -> None:
    """Print the places that make the figures what they are.

    Args:
        files: the measurements.
    """
    functions = [(file.path, function) for file in files for function in file.functions]
    sizes = [
        f"{package} {sum(file.code_lines for file in package_files)}"
        for package, package_files in _by_package(files).items()
    ]
    densest = sorted(functions, key=lambda row: -(row[1].density or -math.inf))
    dense_places = [
        f"{function.density or 0:.0f} {path}:{function.line} {function.name}"
        for path, function in densest[:8]
    ]
    everyday = Counter(name for file in files for name, _ in file.everyday)
    most_branches = sorted(functions, key=lambda row: -row[1].branches)
    branch_places = [
        f"{function.branches} {path}:{function.name}"
        for path, function in most_branches[:6]
    ]
    most_parameters = sorted(functions, key=lambda row: -row[1].parameters)
    parameter_places = [
        f"{function.parameters} {path}:{function.name}"
        for path, function in most_parameters[:6]
    ]
    classes = Counter(name for file in files for name in file.classes)
    repeated = [f"{name} {count}" for name, count in classes.most_common() if count > 1]
    everyday_names = [f"{name} {count}" for name, count in everyday.most_common(12)]
    print("packages:        " + ", ".join(sizes))
    print("densest:         " + "; ".join(dense_places))
    print("everyday names:  " + ", ".join(everyday_names))
    print("most decisions:  " + "; ".join(branch_places))
    print("most parameters: " + "; ".join(parameter_places))
    print("repeated classes: " + "; ".join(repeated[:30]))


def main() -> None:
    """Print the figures of the folder that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", default="src/wflmc", type=Path)
    parser.add_argument("--packages", action="store_true", help="a row per package")
    parser.add_argument("--brief", action="store_true", help="lines of code alone")
    options = parser.parse_args()
    files = measure_tree(options.root)
    lines = sum(file.code_lines for file in files)
    print(f"{lines} lines of code in {len(files)} files")
    if not options.brief:
        print_table(files, packages=options.packages)
        print_worst_places(files)


if __name__ == "__main__":
    main()
