"""Counts tokens of code, and what a user meets, against the budgets of CONTRIBUTING.md.

    python -m tests.budget

A token is one of the program: comments, docstrings, line ends and indentation do not count, nor does generated code. So
the count is the same however the code is laid out. The exit code is 1 if a count of tokens is more than 2 % above its
budget, or another count above its own.
"""

import ast
import io
import re
import sys
import tokenize
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
ROOM = 1.02  # so that a mend passes


def tokens_of(source: str) -> int:
    """The number of tokens in a program's text."""
    docstring_lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            docstring_lines |= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in LAYOUT and token.start[0] not in docstring_lines for token in tokens)


def tokens_of_parts() -> dict[str, int]:
    """The tokens of the product, of the lab, and of the tests with their programs."""
    counts = {"product": 0, "lab": 0, "tests": 0}
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
        counts[part] += tokens_of(path.read_text(encoding="utf-8"))
    return counts


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
    budgets = {name: int(limit.replace(",", "")) for name, limit in ROW.findall((ROOT / "CONTRIBUTING.md").read_text())}
    exceeded = False
    for name, count in tokens_of_parts().items():
        print(f"{name}: {count:,} of {budgets[name]:,} tokens")
        exceeded |= count > budgets[name] * ROOM
    for name, count in surface().items():
        print(f"{name}: {count:,} of {budgets[name]:,}")
        exceeded |= count > budgets[name]
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
