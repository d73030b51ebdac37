"""README.md and docs/: code runs, links lead somewhere, and what is listed is all there is.

Blocks of Python of a page run one after the other, in one namespace, in an empty folder. A block that a title names as
another library's (`title="torchgpipe"`) is only parsed; one that it names for a trainer of EXTRAS runs in
`make test-all`, which installs that. Blocks of the pages of OVER_RANKS run on two processes.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT
from helpers.ranks import Ranks

from fxpipe import errors
from fxpipe.scheduling import SCHEDULES, STREAM_POLICIES

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OVER_RANKS = {"processes.md"}
OTHERS = ("torchgpipe", "torch.distributed.pipelining", "DeepSpeed", "torch.distributed.pipeline.sync", "before")
EXTRAS = {"lightning": "lightning", "trl": "trl", "sentence-transformers": "sentence_transformers"}  # title: package
FENCE = re.compile(r"^( *)```[ {.]*(\w+)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


class Block:
    """A block of code of a page."""

    def __init__(self, path: Path, text: str, match: re.Match[str]):
        indent, self.language, attributes, code = match.groups()
        title = re.search(r'title="([^"]*)"', attributes)
        self.title = title[1] if title else ""
        self.code = "\n".join(line.removeprefix(indent) for line in code.split("\n"))
        self.path, self.line = path, text.count("\n", 0, match.start()) + 1

    def compiled(self) -> Any:
        return compile("\n" * self.line + self.code, str(self.path), "exec")


def blocks_of(path: Path, *languages: str) -> Iterator[Block]:
    text = path.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        block = Block(path, text, match)
        if block.language in languages:
            yield block


def python_of(path: Path) -> list[Block]:
    return list(blocks_of(path, "python", "py"))


def runs_here(block: Block) -> bool:
    return not block.title.startswith(OTHERS) and block.title not in EXTRAS


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def run_blocks(codes: Iterable[Any]) -> None:
    """Runs code in one namespace, cleared as at the end of a script: classes hold its names, and so its pipes."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        for code in codes:
            exec(code, namespace)
    finally:
        namespace.clear()


PAGES_WITH_CODE = [page for page in PAGES if page.name not in OVER_RANKS and any(map(runs_here, python_of(page)))]


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::DeprecationWarning:accelerate")
@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=name_of)
def test_code_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run_blocks(block.compiled() for block in python_of(page) if runs_here(block))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of libraries that nobody here writes
@pytest.mark.parametrize("extra", EXTRAS)
def test_code_with_a_trainer_runs(extra, tmp_path, monkeypatch, capsys):
    pytest.importorskip(EXTRAS[extra], reason=f"{extra} is not installed: pip install fxpipe[trainers]")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    blocks = [block for page in PAGES for block in python_of(page) if block.title == extra]
    assert blocks
    run_blocks(block.compiled() for block in blocks)


def run_on_rank(mesh, folder, blocks):
    os.chdir(folder)
    run_blocks(compile("\n" * line + code, name, "exec") for code, name, line in blocks)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name in OVER_RANKS], ids=name_of)
def test_code_over_processes_runs(page, tmp_path):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    blocks = [(block.code, str(block.path), block.line) for block in python_of(page)]
    assert blocks
    with Ranks(2) as ranks:
        ranks.run(run_on_rank, str(tmp_path), blocks)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_of_other_libraries_is_python(page):
    for block in python_of(page):
        if not runs_here(block):
            ast.parse(block.code)


def test_a_block_is_found_with_its_place():
    page = ROOT / "README.md"
    block = python_of(page)[0]
    assert page.read_text(encoding="utf-8").splitlines()[block.line] == block.code.splitlines()[0]


# -- What pages name ---------------------------------------------------------------------------------------------------


def targets_of(page: Path) -> Iterator[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?:|#", target):
            yield target


def test_links_of_the_readme_lead_to_files():
    targets = list(targets_of(ROOT / "README.md"))
    assert len(targets) > 25
    missing = [target for target in targets if not (ROOT / target.partition("#")[0]).exists()]
    assert not missing
    for path, _, anchor in (target.partition("#") for target in targets):
        headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        slugs = [re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings]
        assert not anchor or anchor in slugs, f"{path}#{anchor}"


def test_the_readme_is_short_and_says_first_what_is_proven():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 1200
    assert "Not yet run on a real GPU" in text.partition("\n## ")[0]


PATHS = re.compile(r"`((?:tests|tools|examples|fxpipe|docs)/[\w./]*)(?:::(\w+))?`")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_tests_that_are_named_exist(page):
    for path, test in PATHS.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{test}"


def test_every_exception_has_its_cause_and_remedy():
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    public = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert {*sections} == public
    for name, section in sections.items():
        bases = {base.__name__ for base in vars(errors)[name].__mro__[1:] if issubclass(base, Exception)} - {
            "Exception"
        }
        assert "**Cause.**" in section, name
        assert "**Remedy.**" in section, name
        assert bases <= {*re.findall(r"`(\w+)`", section)}, name


def test_every_schedule_has_its_picture_and_its_line():
    choosing = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    how = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    for name in SCHEDULES.keys() - {"inference"}:  # which trains nothing
        assert f'`"{name}"`' in choosing, name
        assert name in STREAM_POLICIES or f"pictures/{name}.svg" in how, name  # streams are no single step


def shell_lines() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for block in blocks_of(page, "sh", "bash", "console", "text"):
            for line in block.code.replace("\\\n", " ").splitlines():
                if line.startswith("python -m fxpipe.inspect "):
                    yield name_of(page), line.partition("#")[0]


def test_options_of_the_command_line_exist(tmp_path, monkeypatch):
    from fxpipe.inspect.cli_options import make_parser

    monkeypatch.chdir(tmp_path)
    for page in PAGES:
        for block in blocks_of(page, "json"):
            (tmp_path / block.title).write_text(block.code, encoding="utf-8")
    lines = list(shell_lines())
    assert len(lines) > 3
    for _, line in lines:
        make_parser().parse_args(shlex.split(line)[3:])


# -- The site ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install fxpipe[docs]")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install fxpipe[docs]")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.mark.slow
def test_pages_are_built_without_a_warning(site):
    assert len(list(site.rglob("index.html"))) >= len(PAGES) - 1
    assert len(list(site.glob("pictures/*.svg"))) > 10


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"?(https?:[^\s\">]+)", text)
        assert not [url for url in loaded if "canonical" not in url], page.name
