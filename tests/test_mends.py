"""The list of mends: if this failed, undo_mends.py could not undo a mend, because the code that the
list quotes has changed, or would run a test that is not there any more.
"""

import tomllib

import pytest
from ranks import ROOT

FILES = sorted((ROOT / "benchmarks/data/mends").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_mend_can_be_undone_and_has_its_tests(path):
    problems = []
    for mend in tomllib.loads(path.read_text())["mend"]:
        for change in mend.get("undo", []):
            file = ROOT / change["file"]
            if not file.exists() or file.read_text().count(change["text"]) != 1:
                problems.append((mend["what"], change["file"]))
        for test in mend.get("tests", []):
            name, _, function = test.partition("::")
            text = (ROOT / name).read_text()
            if f"def {function.partition('[')[0]}(" not in text:
                problems.append((mend["what"], test))
    assert problems == []
