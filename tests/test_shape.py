"""What a reader may rely on: a name means one thing, and an object has all its attributes from the start."""

import ast
from collections import Counter
from pathlib import Path

import ftis_node

ROOT = Path(ftis_node.__file__).parent
FILES = {
    path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(ROOT.rglob("*.py"))
    if "lab" not in path.relative_to(ROOT).parts and not path.name.endswith("_pb2.py")
}


def twice(names):
    return [name for name, times in Counter(names).items() if times > 1]


def test_each_class_and_each_file_has_a_name_of_its_own():
    """A command's file may be called as what it is about."""
    classes = (node.name for tree in FILES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    files = (path.name for path in FILES if path.parts[0] != "cli" and not path.name.startswith("__"))
    assert (twice(classes), twice(files)) == ([], [])


def test_a_file_has_at_most_500_lines():
    paths = [path for folder in (ROOT, ROOT.parent / "tests") for path in folder.rglob("*.py")]
    assert [path for path in paths if "_pb2" not in path.name and path.read_text("utf-8").count("\n") > 500] == []


def born_late(made):
    """The attributes that methods give to an object, and that neither the body of its class, nor `__init__` and what it
    calls, gave before."""
    methods = [node for node in made.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    given = {method.name: set(assigned(method)) for method in methods}
    declared = {target.id for node in made.body for target in targets(node) if isinstance(target, ast.Name)}
    first = {method for method in methods if method.name in ("__init__", "__post_init__")}
    calls = {
        node.func.attr
        for method in first
        for node in ast.walk(method)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_self(node.func.value)
    }
    begun = {name for method in {*calls, *(method.name for method in first)} for name in given.get(method, ())}
    return {name for names in given.values() for name in names} - begun - declared


def assigned(method):
    """The attributes of self that a method gives a value."""
    for node in ast.walk(method):
        for part in (part for target in targets(node) for part in ast.walk(target)):
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
    ours = {node.name for tree in FILES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    late = {
        f"{path}:{node.name}": sorted(names)
        for path, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and {ast.unparse(base) for base in node.bases} <= ours
        and (names := born_late(node))
    }
    assert late == {}


def test_an_attribute_that_is_born_late_is_found():
    text = """class A:
        c = 1
        def __init__(self): self.a = 1; self.e: int; self.g()
        def f(self): self.a, self.b = 2, 3; self.c = self.d = self.e = 4
        def g(self): self.d = 5"""
    (made,) = ast.parse(text).body
    assert isinstance(made, ast.ClassDef) and born_late(made) == {"b"}
