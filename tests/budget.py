"""Counts tokens of code, how dense it is, and what a user meets, against the budgets of CONTRIBUTING.md.

    python -m tests.budget

A token is one of the program: comments, docstrings, line ends and indentation do not count, nor does generated code. So
the count is the same however the code is laid out. The exit code is 1 if tokens or a density are more than 2 % above
their budget, or another count above its own.
"""

import ast
import io
import re
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftis_node.config.settings import Settings
from ftis_node.methods import METHODS
from tests.support.command_lines import root

ROOT = Path(__file__).parent.parent
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
METRIC = re.compile(r"`(?!\w+_p\d+`)[^`]+`")
ROW = re.compile(r"^\| ([a-z]+) \|.*\| ([\d,]+) \|$", re.MULTILINE)
DENSITY_ROW = re.compile(r"^\| ([a-z]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)
ROOM = 1.02  # so that a mend passes


@dataclass
class Measure:
    """Counts of program text. lines: those with a token on them. The rest: how often each kind of expression is."""

    tokens: int = 0
    lines: int = 0
    conditional_expressions: int = 0
    tuple_assignments: int = 0
    assignment_expressions: int = 0

    def add(self, source: str):
        """Count a program's text."""
        docstring_lines = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                docstring = node.body[0]
                docstring_lines |= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                self.tuple_assignments += isinstance(node.targets[0], ast.Tuple)
            self.conditional_expressions += isinstance(node, ast.IfExp)
            self.assignment_expressions += isinstance(node, ast.NamedExpr)
        lines = set()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type not in LAYOUT and token.start[0] not in docstring_lines:
                self.tokens += 1
                lines |= set(range(token.start[0], token.end[0] + 1))
        self.lines += len(lines)

    def density(self) -> dict[str, float]:
        """Tokens a line, and how many of each kind of expression are in 1,000 lines."""
        thousands = self.lines / 1000
        return {
            "tokens a line": self.tokens / self.lines,
            "conditional expressions": self.conditional_expressions / thousands,
            "tuple assignments": self.tuple_assignments / thousands,
            "assignment expressions": self.assignment_expressions / thousands,
        }


def measured() -> dict[str, Measure]:
    """The product, the lab, and the tests with their programs."""
    parts = {"product": Measure(), "lab": Measure(), "tests": Measure()}
    for path in [*ROOT.glob("ftis_node/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        if path.name.endswith("_pb2.py"):
            continue
        folder, below = path.relative_to(ROOT).parts[:2]
        if folder == "tests":
            part = "tests"
        elif below == "lab":
            part = "lab"
        else:
            part = "product"
        parts[part].add(path.read_text(encoding="utf-8"))
    return parts


def commands_in(group: Any) -> int:
    """The number of commands that a person can type, those of groups included and the groups not."""
    found = [group.get_command(None, name) for name in getattr(group, "commands", ())]  # the root makes each when asked
    return sum(commands_in(one) for one in found) or 1


def surface() -> dict[str, int]:
    """What a user meets, counted. metrics: names that rows of metrics.md explain, without percentiles."""
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    return {
        "settings": len(Settings.model_fields),
        "commands": commands_in(root()),
        "presets": len(METHODS),
        "metrics": sum(
            len(METRIC.findall(row.split(" (")[0])) for row in metrics.splitlines() if row.startswith("* `")
        ),
    }


def main() -> int:
    """Print each count beside its budget; return the exit code."""
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    budgets = {name: int(limit.replace(",", "")) for name, limit in ROW.findall(guide)}
    densities = {name: [float(limit) for limit in limits] for name, *limits in DENSITY_ROW.findall(guide)}
    exceeded = False
    parts = measured()
    for name, measure in parts.items():
        print(f"{name}: {measure.tokens:,} of {budgets[name]:,} tokens")
        exceeded |= measure.tokens > budgets[name] * ROOM
    for name, measure in parts.items():
        for (what, density), limit in zip(measure.density().items(), densities[name], strict=True):
            print(f"{name}: {density:.1f} of {limit:g} {what}")
            exceeded |= density > limit * ROOM
    for name, count in surface().items():
        print(f"{name}: {count:,} of {budgets[name]:,}")
        exceeded |= count > budgets[name]
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
