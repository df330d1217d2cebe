"""Files of checkpoints: if this failed, elements would be at wrong places or in no file."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from checkpointing import file_format


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_are_the_range_in_order(shape, data):
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    array = np.arange(count).reshape(shape)
    found = list(file_format.split_into_boxes(tuple(shape), start, stop))
    slices = [tuple(slice(a, b) for a, b in box) for box in found]
    values = [v for index in slices for v in array[index].flat]
    assert values == list(range(start, stop))
    assert len(found) <= 2 * len(shape)
