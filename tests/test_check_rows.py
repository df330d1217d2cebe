"""check_rows.py of benchmarks: if this failed, measured rows that cannot be would be fitted on."""

import json
import subprocess
import sys

import pytest
from ranks import ROOT

from base.errors import UserError
from benchmarks.planner import check_rows, published_rows

ROWS = str(ROOT / "benchmarks" / "data" / "measured_rows.csv")
ANOMALIES = [
    ("001-L340", "swapped"),  # 1
    ("001-L341", "formula"),  # 2
    ("001-L475", "disagree"),  # 3
    ("001-L319", "dp"),  # 4
    ("001-L329", "rate"),  # 5
    ("001-L331", "rate"),
    ("001-L330", "disagree"),
    ("001-L305", "memory"),  # 6
    ("001-L447", "outlier"),  # 7
    ("001-L149", "label"),  # 8
    ("001-L150", "label"),
    ("001-L448", "disagree"),  # 9
    ("001-L125", "disagree"),  # 10
    ("001-L153", "disagree"),
    ("001-L168", "repeat"),  # 11
    ("001-L179", "repeat"),
    ("001-L188", "repeat"),
    ("001-L197", "repeat"),
    ("001-L206", "repeat"),
    ("001-L253", "repeat"),
    ("001-L410", "repeat"),
    ("001-L422", "repeat"),
    ("001-L431", "repeat"),
    ("000-L018", "pp"),  # 12
    ("000-L033", "rate"),
    ("000-L017", "size"),
    ("000-L017", "outlier"),
    ("001-L011", "topology"),  # 15
    ("001-L018", "topology"),
]


def test_check_rows_prints_findings_as_text_and_as_data(capsys):
    check_rows.main([ROWS])
    lines = capsys.readouterr().out.splitlines()
    check_rows.main([ROWS, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert len(lines) == len(found) + 1 > 20
    assert set(found[0]) == {"row_id", "kind", "text"}
    assert lines[-1].startswith(f"{len(found)} findings in ")
    program = str(ROOT / "benchmarks/planner/check_rows.py")
    words = [sys.executable, program, "nowhere.csv"]
    done = subprocess.run(words, capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 2
    assert done.stderr == "error: cannot read nowhere.csv: No such file or directory\n"


@pytest.mark.parametrize(
    ("name", "contradicted"),
    [
        ("torchtitan", 0),
        ("internevo", 0),
        ("nemo_guide", 1),
        ("aleph", 0),
        ("dgxc", 0),
        ("simumax", 0),
        ("vocabulary", 0),
    ],
)
def test_rows_that_differ_in_what_they_state_do_not_contradict_one_another(name, contradicted):
    """In cp, fp8, kernel, software, vocabulary or length of samples; the rest was looked at."""
    rows = published_rows.read(str(ROOT / "benchmarks" / "data" / "public" / f"{name}.csv"))
    found = published_rows.check(rows)
    assert len({finding.row_id for finding in found}) == contradicted, found


def test_the_ranks_of_cp_are_counted_among_the_gpus():
    rows = published_rows.read(str(ROOT / "benchmarks" / "data" / "public" / "torchtitan.csv"))
    row = next(row for row in rows if row["cp"] == "4") | {"dp": "8"}
    (finding,) = published_rows.check([row])
    assert finding.text == "tp(1) * pp(1) * dp(8) * cp(4) = 32 is not 8 GPUs; dp 2 fits"


def test_check_refuses_what_is_not_a_table(tmp_path):
    file = tmp_path / "odd.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"odd.csv has 1 rows and lacks the columns row_id"):
        published_rows.read(str(file))


@pytest.fixture(scope="module")
def findings() -> set[tuple[str, str]]:
    return {(f.row_id, f.kind) for f in published_rows.check(published_rows.read(ROWS))}


@pytest.mark.parametrize(("row", "kind"), ANOMALIES)
def test_check_finds_the_published_anomalies(findings, row, kind):
    assert (row, kind) in findings


def test_check_leaves_sound_rows_alone(findings):
    flagged = {row for row, _ in findings}
    sound = {row["row_id"] for row in published_rows.read(ROWS)} - flagged
    assert len(sound) > 120
    assert {"001-L060", "001-L278", "001-L474", "002-L022", "003-L075"} <= sound
