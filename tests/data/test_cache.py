"""Prepared arrays: what is not the expected one is told, whatever NumPy stumbles over."""

import numpy as np
import pytest

from parapos.data import FormatError
from parapos.data.cache import map_array

HEADER = b"\x93NUMPY\x01\x00v\x00{'descr': ('<u2', 'fortran_order': False, 'shape': (3,), }".ljust(128)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", HEADER, b"\x93NUMPY\x01\x00", b"\x80\x04N."])
def test_what_is_no_array_is_told(content, tmp_path):
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"x\.npy: expected 3 rows of uint16"):
        map_array(path, np.dtype("<u2"), 3)


def test_another_array_is_told(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.zeros(4, "<u2"))
    assert map_array(path, np.dtype("<u2"), 4).tolist() == [0] * 4
    for dtype, count in (("<u2", 3), ("<u4", 4)):
        with pytest.raises(FormatError, match=r"got uint16 \(4,\); prepare the data again"):
            map_array(path, np.dtype(dtype), count)
    with pytest.raises(FileNotFoundError):
        map_array(tmp_path / "y.npy", np.dtype("<u2"), 1)
