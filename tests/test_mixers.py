"""Mixers in the place of attention: if this failed, a hybrid model would be another one in some
layout, or in transformers.
"""

import test_golden


def test_every_layout_with_mixers_equals_the_single_rank_run(tmp_path):
    test_golden.check_lines("mixers", tmp_path)
