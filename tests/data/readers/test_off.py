"""OFF: the fused first line, comments, polygons, damaged files, and real ones."""

import os
from pathlib import Path

import numpy as np
import pytest

from parapos.data import FormatError
from parapos.data.readers import off

from .fuzz import mutations, survive

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[4] / "shared"))
MESHES = sorted(SHARED.glob("samples/modelnet40/ModelNet40_off/*/*/*.off"))
BODY = b"0 0 0\n1 0 0\n1 1 0.5\n0 1 0\n4 0 1 2 3\n3 0 1 2 255 0 0\n"
STARTS = [b"OFF\n4 2 0\n", b"OFF4 2 0\n", b"OFF 4 2 0\n", b"# a mesh\nOFF # here\n\n4 2\n"]


@pytest.mark.parametrize("start", STARTS)
def test_vertices_and_triangles(start, tmp_path):
    (tmp_path / "a.off").write_bytes(start + BODY.replace(b"\n", b"\r\n"))
    vertices, faces = off.read(tmp_path / "a.off")
    assert vertices.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0.5], [0, 1, 0]]
    assert faces.tolist() == [[0, 1, 2], [0, 2, 3], [0, 1, 2]]


@pytest.mark.parametrize("fused", [True, False])
def test_what_is_written_is_read(fused, tmp_path):
    vertices, faces = np.random.default_rng(0).random((7, 3)).round(6), np.array([[0, 1, 2], [6, 5, 4]])
    off.write(tmp_path / "a.off", vertices, faces, fused=fused)
    assert (tmp_path / "a.off").read_text().startswith("OFF7 2 0\n" if fused else "OFF\n7 2 0\n")
    found = off.read(tmp_path / "a.off")
    assert np.array_equal(found[0], vertices)
    assert np.array_equal(found[1], faces)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "at byte 0: b'', expected OFF"),
        (b"NOFF\n4 2 0\n" + BODY, "at byte 0: b'NOFF', expected OFF"),
        (b"OFF\n4 -2 0\n" + BODY, "at byte 4: .*expected the numbers of vertices"),
        (b"OFF\n4000000000 2 0\n" + BODY, "vertex 6 of 4000000000"),
        (b"OFF\n4 4000000000 0\n" + BODY, "the file ends, expected the corners of face 2 of 4000000000"),
        (b"OFF\n4 2 0\n" + BODY.replace(b"0.5", b"inf"), "at byte 22: b'inf', expected a finite number"),
        (b"OFF\n4 2 0\n" + BODY.replace(b"0.5", b""), "expected x, y and z of vertex 2"),
        (b"OFF\n4 2 0\n" + BODY.replace(b"3\n3", b"4\n3"), "expected corners from 0 to 3"),
        (b"OFF\n4 2 0\n" + BODY.replace(b"4 0 1 2 3", b"9 0 1 2 3"), "expected the corners of face 0"),
    ],
)
def test_refused(data, told, tmp_path):
    (tmp_path / "a.off").write_bytes(data)
    with pytest.raises(FormatError, match=f"a.off: .*{told}"):
        off.read(tmp_path / "a.off")


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.full)])
def test_broken_files(count, tmp_path):
    seeds = [start + BODY for start in STARTS]
    good, refused = survive(off.read, mutations(seeds, count), tmp_path / "a.off", per_byte=80, least=200_000)
    assert good > count // 100
    assert refused > count // 4


@pytest.mark.skipif(not MESHES, reason="no real meshes here")
@pytest.mark.parametrize("path", MESHES, ids=lambda p: p.stem)
def test_real_meshes(path):
    vertices, faces = off.read(path)
    first = path.read_bytes().split(b"\n")[:2]
    counts = (first[0][3:] or first[1]).split()
    assert (len(vertices), len(faces)) == (int(counts[0]), int(counts[1]))  # triangles alone
    assert np.isfinite(vertices).all()
