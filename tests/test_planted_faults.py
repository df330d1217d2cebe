"""Three faults as benchmarks/planted_faults.py plants them, at call sites that a right run records:
if this failed, the benchmark would not alter the calls that it says, or diff would name others.
"""

from pathlib import Path

import planted_faults
import pytest
from planted_names import judged
from ranks import results_of

# A part of the call site, its layer, the change, the rank with the fault, and what diff must name.
PLANTS = [
    ("model.py MLP.forward", "blocks.2", "left out", 1, (1, "activation", "blocks.2")),
    ("_CrossEntropy", None, "doubled", None, (1, "activation", "loss")),
    ("_Linear.backward", None, "stale", None, (1, "activation", "gradient of head.norm")),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[dict]:
    """The rows of PLANTS, with --tp 2, against a run on one rank."""
    folder: Path = tmp_path_factory.mktemp("planted")
    sites = []
    for name, ranks in (("one", 1), ("tp", 2)):
        job = {"case": planted_faults.options(name, folder / name), "plant": None}
        (result,) = results_of("tests/plants_worker.py", ranks, [job], folder)
        sites = [site for site, *_ in result["seen"]]
    faults = []
    for number, (part, detail, change, rank, _) in enumerate(PLANTS):
        (site,) = {site for site in sites if part in site}
        plant = {"site": site, "detail": detail, "change": change, "rank": rank, "step": 1}
        faults.append({"number": number, "layout": "tp", "reference": "one", "plant": plant})
    return planted_faults.make_faults(folder, tuple(faults))


@pytest.mark.parametrize("number", range(len(PLANTS)), ids=[change for _, _, change, *_ in PLANTS])
def test_diff_names_a_generated_fault(rows, number):
    row = rows[number]
    tensor = row["tensor"]
    assert row["changed"]
    assert tensor, row["text"]
    assert (tensor["step"], tensor["kind"], tensor["name"]) == PLANTS[number][-1], row["text"]
    assert all(judged(row).values()), row["text"]
