"""Files of checkpoints: if this failed, elements would be at wrong places or in no file."""

import math

import h5py
import numpy as np
import pytest
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


def test_a_tensor_that_the_ranks_do_not_cover_is_refused(tmp_path):
    total, crc = file_format.write_shard(
        str(tmp_path / "rank_00000.h5"), 5, {"weights": ("float32", [np.ones(5, "f4")])}
    )
    part = file_format.ShardFile(
        "rank_00000.h5", total, crc, {"weights": "float32"}, [("w", [((0, 5),)])]
    )
    with pytest.raises(RuntimeError, match="5 elements of w"):
        file_format.index_image({"w": (6,)}, [part])


def test_the_file_matches_its_checksum(tmp_path):
    """The checksum is computed while writing; it must be that of the file."""
    path, runs = str(tmp_path / "x.h5"), [np.random.rand(n) for n in (1, 3_000_000, 777)]
    whole = np.concatenate(runs)
    arrays = {"b": ("float64", runs), "a": ("float32", [whole.astype("f4")])}
    total, crc = file_format.write_shard(path, len(whole), arrays)
    assert (total, crc) == file_format.checksum_file(path)
    with h5py.File(path) as file:
        assert np.array_equal(file["b"], whole)
        assert np.array_equal(file["a"], whole.astype("f4"))
    assert total <= 12 * len(whole) * 1.01
