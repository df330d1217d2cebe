"""Measured rows that state their machine: read strictly, compared by source."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import plan_accuracy as accuracy
import source_accuracy
import stated_rows
from source_accuracy import Guess

from config.messages import UserError

PUBLIC = ROOT / "benchmarks" / "data" / "public"


@pytest.fixture(scope="module")
def titan() -> list[stated_rows.StatedRow]:
    return stated_rows.read(str(PUBLIC / "torchtitan.csv"))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("recompute", "seqsel", "is 'seqsel', not one of"),
        ("precision", "bf16 (fp32 grad)", r"is 'bf16 \(fp32 grad\)', not one of bf16"),
        ("machine", "a100", "is 'a100', not one of"),
        ("zero_stage", "4", "is '4', not one of 0, 1, 2, 3"),
        ("mbs", "0", "is '0', not a whole number above 0"),
        ("dp", "7", r"tp\(1\) \* pp\(1\) \* dp\(7\) is not 8 GPUs"),
        ("mem_kind", "peak", "is none of nvidia-smi"),
        ("inexpressible", "magic", "has 'magic'"),
        ("software", "dropuot=True", "has 'dropuot'; did you mean 'dropout'"),
        ("software", "dropout=maybe", "has 'dropout=maybe'"),
        ("note", "kernel=flash9", "has the kernel 'flash9'"),
        ("engine", "jax", "is 'jax', not one of trine"),
        ("sec_per_it", "nan", "is 'nan', not a number"),
    ],
)
def test_a_value_that_is_not_understood_names_row_and_column(tmp_path, column, value, message):
    with open(PUBLIC / "torchtitan.csv", newline="") as file:
        row = next(csv.DictReader(file))
    row |= {"dp_clean": "", "sec_clean": "", "engine": "", column: value}
    path = tmp_path / "rows.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)
    with pytest.raises(UserError, match=f"row TT-T1a, column {column}: {message}"):
        stated_rows.read(str(path))


def test_rows_that_the_planner_cannot_say_are_set_aside_and_counted(titan):
    assert sum(not row.aside for row in titan) == 12
    assert {row.aside.split()[0] for row in titan if row.aside} == {"float8"}


def test_figures_of_a_table_by_hand(titan):
    rows = [replace(row, section="one") for row in titan if row.section == "TT h100"][:3]
    rows = [replace(row, aside="", status="ok", gigabytes=10.0) for row in rows]
    rows = [replace(row, seconds=s) for row, s in zip(rows, (1.0, 2.0, 4.0), strict=True)]
    rows.append(replace(rows[0], id="out", status="OOM", seconds=None))
    guesses = dict(zip((r.id for r in rows), (Guess(3, 11, 0.0), Guess(2, 9, 0.0)), strict=False))
    guesses |= {rows[2].id: Guess(4, 10, 0.9), "out": Guess(1, 99, 0.01)}
    found = source_accuracy.compare(rows, guesses)
    assert found["time"]["mean"] == pytest.approx(2 / 3)
    assert found["time"]["scaled_mean"] == pytest.approx(4 / 9)
    assert found["time"]["largest"] == 2
    assert found["choice"] == {"tables": 1, "best_picked": 0, "regret": 1.0, "tau": 1 / 3}
    assert found["caution"]["first_out_of_memory"] == 1
    assert found["memory"]["reserved"]["mean"] == pytest.approx(0.2 / 3)
    assert found["out_of_memory"]["missed"] == found["out_of_memory"]["false_alarms"] == 1


def test_the_command_writes_the_figures_of_each_source_and_of_all(tmp_path, capsys):
    out = tmp_path / "figures.json"
    files = [str(PUBLIC / f"{name}.csv") for name in ("dgxc", "fms_fsdp")]
    accuracy.main(["--rows", *files, "--json", str(out)])
    figures = json.loads(out.read_text())
    assert set(figures) == {"dgxc", "fms_fsdp", "all"}
    assert figures["all"]["time"]["n"] == 18
    assert "| dgxc | 10 |" in capsys.readouterr().out
