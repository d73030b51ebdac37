"""The words of the package: variables are nouns, one word stands for one thing, and docstrings say what is.

And the words of README, docs and examples: those of PyTorch's documentation.
"""

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
    "hollow": "without values",
    "lots": "draws",
    "restless": "value_dependent",
    "rollers": "python_rng",
    "strangers": "external",
    "weigh": "weight_gradients",
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
# Phrases over which a reader stumbles, each with what is written instead.
STUMBLES = {
    r"behind": "after, following",
    r"anew|once more": "again",
    r"(go|goes|went) by": "depend on, use",
    r"(is|are|was|were|be|been) told|tells? (what|which|who|how)": "show, report",
    r"heeds?": "respect, take into account",
    r"at once": "immediately, at the same time",
    r"(is|are|be) no (tensor|scalar|number|mean|sum|module|operator)": "is not a ...",
    r"[\d.]+ G parameters": "70B parameters",
    r"nobody|whom": "the passive, or 'you'",
    r"beside": "next to, in addition to, as well as",
    r"reckon(s|ed)?": "estimate, compute",
    r"as ever": "as usual",
    r"as one likes": "any number of",
    r"so many|as many as": "that many, the number of",
    r"that of|those of": "the noun again",
    r"one (behind|after) the other|by turns": "one after another, in order, alternately",
    r"in (its|their) stead|in the place of": "instead of",
    r"hand(s|ed)? (out|over|on)": "pass, return",
    r"knows? of": "is aware of, depends on",
    r"(may|has to) stand": "can be",
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


def stumbles_of(text: str) -> list[str]:
    """The phrases of STUMBLES in a text, with their lines; blocks of output (```text) are what programs print."""
    prose = re.sub(r"^```text.*?^```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    problems = []
    for pattern, better in STUMBLES.items():
        words = pattern.replace(" ", r"\s+")
        for match in re.finditer(rf"\b({words})\b", prose, re.IGNORECASE):
            line = prose.count("\n", 0, match.start()) + 1
            problems.append(f"{line}: {match[0]!r}: better {better}")
    return problems


def test_pages_and_examples_use_plain_words():
    problems = {path.relative_to(ROOT): stumbles_of(path.read_text(encoding="utf-8")) for path in PAGES}
    assert not {path: lines for path, lines in problems.items() if lines}


def test_such_phrases_are_seen():
    text = "It stands behind.\n```text\nbehind\n```\nIt goes\nby time, as is told: it is no tensor of 70 G parameters."
    assert [problem.partition(":")[0] for problem in stumbles_of(text)] == ["1", "5", "6", "6", "6"]


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
