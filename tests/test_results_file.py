"""benchmarks/results_file.py: if this failed, a second run would delete what was found by hand."""

from benchmarks import results_file


def test_sections_below_a_report_are_kept(tmp_path):
    page = tmp_path / "page.md"
    results_file.write(page, "# Title\n\n| a |\n\n## By size\n\nold\n")
    page.write_text(page.read_text() + "\n## Notes\n\nThe third row was wrong at first.\n")
    results_file.write(page, "# Title\n\n| b |\n\n## By size\n\nnew\n")
    wanted = (
        "# Title\n\n| b |\n\n## By size\n\nnew\n\n## Notes\n\nThe third row was wrong at first.\n"
    )
    assert page.read_text() == wanted
    results_file.write(page, "# Title\n\n| b |\n\n## By size\n\nnew\n")
    assert page.read_text() == wanted, "written twice it is the same"
