"""docs/files.md, which `make settings` writes: each file of the program, what it is for, and its constants."""

import ast
from collections.abc import Iterator
from pathlib import Path

PROGRAM = Path(__file__).parent.parent / "ftis_node"
HEAD = """# Every file in a line

`make settings` writes this page. A line has the file, the first sentence of what it says of itself, and the constants
at its top. Where to change what, in words: [architecture.md](architecture.md).
"""


def page() -> str:
    """The page, folder by folder."""
    lines = [HEAD]
    folder = None
    for path in sorted(PROGRAM.rglob("*.py"), key=lambda path: (path.parent, path.name)):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        about = ast.get_docstring(tree)
        if about is None:  # generated, or empty
            continue
        if path.parent != folder:
            folder = path.parent
            lines.append(f"\n## {folder.relative_to(PROGRAM.parent)}\n")
        sentence = " ".join(about.split("\n\n")[0].split()).split(". ")[0].rstrip(".:")
        names = ", ".join(f"`{name}`" for name in constants(tree))
        lines.append(f"* [{path.name}](../{path.relative_to(PROGRAM.parent)}): {sentence}. {names}".rstrip())
    return "\n".join(lines) + "\n"


def constants(tree: ast.Module) -> Iterator[str]:
    """The names in capitals that are assigned at the top of a file, in order."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name) and target.id.isupper():
                yield target.id
