"""Prepared arrays: what is not the expected one is told, whatever NumPy stumbles over."""

import numpy as np
import pytest

from parapos.data import FormatError
from parapos.data.cache import map_array

AGAIN = "run `parapos prepare x` again"
HEADER = b"\x93NUMPY\x01\x00v\x00{'descr': ('<u2', 'fortran_order': False, 'shape': (3,), }".ljust(128)


def rows(path, dtype, count):
    return map_array(
        path, f"{count} rows of {np.dtype(dtype)}", lambda x: (x.dtype, x.shape) == (dtype, (count,)), AGAIN
    )


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", HEADER, b"\x93NUMPY\x01\x00", b"\x80\x04N."])
def test_what_is_no_array_is_told(content, tmp_path):
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"x\.npy: expected 3 rows of uint16"):
        rows(path, "<u2", 3)


def test_another_array_is_told(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.zeros(4, "<u2"))
    assert rows(path, "<u2", 4).tolist() == [0] * 4
    for dtype, count in (("<u2", 3), ("<u4", 4)):
        with pytest.raises(FormatError, match=rf"got uint16 \(4,\); remove it and {AGAIN}"):
            rows(path, dtype, count)
    for missing in (tmp_path / "y.npy", path / "z.npy"):
        with pytest.raises(FormatError, match=rf"{missing.name}: not there, expected 1 rows of uint16; {AGAIN}"):
            rows(missing, "<u2", 1)
