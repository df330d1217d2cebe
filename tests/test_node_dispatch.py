"""One copy of a token to a node: if this failed, experts on several nodes would learn otherwise."""

from test_golden import check_lines


def test_experts_on_several_nodes_equal_the_single_rank_run(tmp_path):
    check_lines("experts_on_nodes", tmp_path)
