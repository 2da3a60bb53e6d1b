"""What a reader may rely on: a name means one thing, and an object has all its attributes from the start."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import ftis_node

ROOT = Path(ftis_node.__file__).parent
FILES = [
    path.relative_to(ROOT)
    for path in sorted(ROOT.rglob("*.py"))
    if "lab" not in path.relative_to(ROOT).parts and not path.name.endswith("_pb2.py")
]


@cache
def classes():
    """Each class with the file that it is in."""
    trees = {path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in FILES}
    return [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def twice(names):
    return [name for name, times in Counter(names).items() if times > 1]


def test_each_class_and_each_file_has_a_name_of_its_own():
    """A command's file may be called as what it is about."""
    assert twice(made.name for _, made in classes()) == []

    files = [path for path in FILES if path.parts[0] != "cli"]
    assert twice(path.name for path in files if not path.name.startswith("__")) == []


def test_a_file_has_at_most_500_lines():
    paths = [*ROOT.rglob("*.py"), *(ROOT.parent / "tests").rglob("*.py")]
    lines = {path: path.read_text("utf-8").count("\n") for path in paths if "_pb2" not in path.name}
    assert max(lines.values()) <= 500, max(lines, key=lines.get)


def born_late(made):
    """The attributes that methods give to an object, and that neither the body of its class, nor `__init__` and what it
    calls, gave before."""
    methods = {}
    known = set()
    for node in made.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            methods[node.name] = node
        known |= {target.id for target in targets(node) if isinstance(target, ast.Name)}
    given = {name: set(assigned(method)) for name, method in methods.items()}
    for first in {"__init__", "__post_init__"} & methods.keys():
        for name in (first, *called(methods[first])):
            known |= given.get(name, set())
    return set().union(*given.values()) - known


def called(method):
    """The methods of self that a method calls."""
    for node in ast.walk(method):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_self(node.func.value):
            yield node.func.attr


def assigned(method):
    """The attributes of self that a method gives a value."""
    for node in ast.walk(method):
        for target in targets(node):
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and is_self(part.value) and isinstance(part.ctx, ast.Store):
                    yield part.attr


def is_self(node):
    return isinstance(node, ast.Name) and node.id == "self"


def targets(node):
    """What a statement declares, or gives a value."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


def test_an_object_has_all_its_attributes_from_the_start():
    """Those of a library's class are the library's affair."""
    ours = {made.name for _, made in classes()}
    for path, made in classes():
        if {ast.unparse(base) for base in made.bases} <= ours:
            assert born_late(made) == set(), f"{path}:{made.name}"


def test_an_attribute_that_is_born_late_is_found():
    text = """class A:
        c = 1
        def __init__(self): self.a = 1; self.e: int; self.g()
        def f(self): self.a, self.b = 2, 3; self.c = self.d = self.e = 4
        def g(self): self.d = 5"""
    (made,) = ast.parse(text).body
    assert born_late(made) == {"b"}
