"""The list of faults in `tools/mutants.py` is kept up to date with the code, and who survives is told."""

import ast
import importlib.util
import sys

import pytest
from helpers.paths import ROOT

TOOL = ROOT / "tools" / "mutants.py"


@pytest.fixture(scope="module")
def mutants():
    spec = importlib.util.spec_from_file_location("mutants", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutants"]


def test_each_fault_can_be_put_in_and_is_python(mutants):
    for mutant in mutants.MUTANTS:
        text = (mutants.ROOT / "fxpipe" / mutant.file).read_text()
        faulty = mutant.apply(text)
        assert faulty != text, mutant
        ast.parse(faulty)


def test_each_fault_has_tests_that_are_there(mutants):
    for mutant in mutants.MUTANTS:
        for test in mutant.tests.split():
            file, _, name = test.partition("::")
            path = mutants.ROOT / "tests" / file
            assert path.is_file(), mutant
            assert not name or f"def {name}(" in path.read_text(), mutant
        assert mutant.tests or mutant.why_equivalent, mutant


def test_there_are_many_of_all_kinds(mutants):
    assert len(set(mutants.MUTANTS)) == len(mutants.MUTANTS) >= 80
    packages = {mutant.file.partition("/")[0] for mutant in mutants.MUTANTS}
    wanted = "runtime scheduling rewriting partitioning tracing profiling planning simulation".split()
    assert packages.issuperset(wanted)


def test_a_fault_that_the_code_has_outgrown_is_an_error(mutants):
    mutant = mutants.Mutant("pipes.py", "a = b", "a = c", "test_units.py")
    with pytest.raises(ValueError, match=r"stands 0 times in fxpipe/pipes\.py"):
        mutant.apply("a = 1")
    with pytest.raises(ValueError, match="stands 2 times"):
        mutant.apply("a = b\na = b")


def test_long_tests_are_there_and_no_fault_names_one(mutants):
    long = mutants.ROOT.joinpath("tests", "long_tests.txt").read_text(encoding="utf-8").split()
    for test in long:
        file, _, name = test.partition("::")
        assert f"def {name.rpartition('::')[2]}(" in (mutants.ROOT / "tests" / file).read_text(encoding="utf-8"), test
    assert not {*long} & {name for mutant in mutants.MUTANTS for name in mutant.tests.split()}
