"""The words of the package: variables are nouns, one word stands for one thing, and docstrings say what is."""

import ast
import re
from collections.abc import Iterator

from helpers.paths import ROOT

FILES = sorted((ROOT / "fxpipe").rglob("*.py"))
# Something was found, given or made: but what is it?
PARTICIPLES = frozenset({"found", "given", "made"})
# Words of fxpipe's own, each with the one that stands for it now.
OLD_WORDS = {
    "alike": "cache, equal, same",
    "calm": "deterministic",
    "dice": "python_rng",
    "drive": "run",
    "driver": "executor",
    "drivers": "executors",
    "foreign": "constant, external",
    "hollow": "uncomputed",
    "lots": "draws",
    "restless": "value_dependent",
    "rollers": "python_rng",
    "strangers": "external",
    "weigh": "weight_gradients",
}
QUESTION = re.compile(
    r"(What|Which|Who|Whose|Where|When|Why|How|Is|Are|Was|Were|Do|Does|Did|Has|Have|Had|Can|Could|Must|Should|Will|Would|"
    r"Whether)\b"
)


def names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The names that a file gives: of variables, arguments, functions, classes and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def problems_of_names(tree: ast.AST) -> list[str]:
    problems = []
    for name, line in names_in(tree):
        if name.strip("_") in PARTICIPLES:
            problems.append(f"{line}: {name} is no noun: call it what it is")
        for word in name.lower().split("_"):
            if word in OLD_WORDS:
                problems.append(f"{line}: {name}: better {OLD_WORDS[word]}")
    return problems


def problems_of_docstrings(tree: ast.AST) -> list[str]:
    problems = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
            first = re.split(r"(?<=[.?!])\s", " ".join(text.split()))[0]
            if QUESTION.match(first) or first.endswith("?"):
                problems.append(f"{getattr(node, 'name', 'the module')}: {first}")
    return problems


def test_variables_are_nouns_and_no_old_word_comes_back():
    problems = {path.relative_to(ROOT): problems_of_names(ast.parse(path.read_text())) for path in FILES}
    assert not {path: lines for path, lines in problems.items() if lines}


def test_docstrings_begin_with_no_question():
    problems = {path.relative_to(ROOT): problems_of_docstrings(ast.parse(path.read_text())) for path in FILES}
    assert not {path: lines for path, lines in problems.items() if lines}


def test_such_names_and_docstrings_are_seen():
    code = '''
class Drivers:
    """What runs. And when."""
    def _found(self, given):
        """Is it there?"""
        self.is_hollow = [made for made in given]
'''
    tree = ast.parse(code)
    assert [text.split(":")[1].split()[0] for text in problems_of_names(tree)] == [
        "Drivers", "_found", "given", "is_hollow", "made",
    ]  # fmt: skip
    assert [text.split(":")[0] for text in problems_of_docstrings(tree)] == ["Drivers", "_found"]
