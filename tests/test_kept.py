"""benchmarks/kept.py: a list of cases is run in parts, and no result is lost or made twice."""

from kept import Kept


def test_rows_of_all_parts_are_kept_in_one_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    for part in (range(3), range(3, 40)):
        Kept(path).run(lambda case: [{"case": case}, {"case": -case}], part, at_a_time=4)
    found = [row["case"] for row in Kept(path).rows()]
    assert sorted(map(abs, found)) == sorted([*range(40)] * 2)
    assert all(a == -b for a, b in zip(found[::2], found[1::2])), "rows of a case are together"


def test_no_case_is_begun_when_the_time_is_over(tmp_path):
    keep, begun = Kept(tmp_path / "rows.jsonl", minutes=0), []
    keep.run(lambda case: begun.append(case) or [], range(3))
    assert begun == keep.rows() == []
