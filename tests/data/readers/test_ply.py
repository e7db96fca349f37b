"""PLY: files built by hand in all three forms, damaged and lying ones, and a real scene."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from parapos.data import FormatError
from parapos.data.readers import ply

from .fuzz import mutations, peak_below, survive

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[4] / "shared"))
SCENES = sorted(SHARED.glob("samples/scannet/scans/*/*.ply"))
HEAD = "ply\nformat {} 1.0\ncomment made by hand\n"
VERTEX = "element vertex {}\nproperty float x\nproperty float y\nproperty float z\nproperty uchar red\n"
FACE = "element face {}\nproperty list uchar int vertex_indices\n"
POINTS = [(0.0, 1.5, -2.0, 7), (1.0, 0.0, 0.25, 255), (4.0, 4.0, 4.0, 0), (0.5, 0.5, 0.5, 1)]
FORMS = ["ascii", "binary_little_endian", "binary_big_endian"]


def binary(order, faces=((0, 1, 2), (0, 2, 3))):
    body = b"".join(struct.pack(f"{order}fffB", *row) for row in POINTS)
    return body + b"".join(struct.pack(f"{order}B{len(face)}i", len(face), *face) for face in faces)


def whole(form, faces=((0, 1, 2), (0, 2, 3)), vertices=4):
    head = (HEAD.format(form) + VERTEX.format(vertices) + FACE.format(len(faces)) + "end_header\n").encode()
    if form != "ascii":
        return head + binary("<" if "little" in form else ">", faces)
    lines = [" ".join(map(str, row)) for row in POINTS] + [" ".join(map(str, (len(f), *f))) for f in faces]
    return head + ("\n".join(lines) + "\n").encode()


@pytest.fixture
def put(tmp_path):
    def write(data):
        path = tmp_path / "file.ply"
        path.write_bytes(data)
        return path

    return write


@pytest.mark.parametrize("form", FORMS)
def test_vertices_and_triangles(form, put):
    found = ply.read(put(whole(form)))
    assert list(zip(*(found.vertex[name].tolist() for name in ("x", "y", "z", "red")), strict=True)) == POINTS
    assert [found.vertex[name].dtype for name in ("x", "red")] == ["float32", "uint8"]
    assert found.faces.tolist() == [[0, 1, 2], [0, 2, 3]]
    assert found.columns("x", "y", "z").shape == (4, 3)
    assert found.columns("x", "nx") is None


@pytest.mark.parametrize("form", FORMS)
def test_polygons_become_fans(form, put):
    found = ply.read(put(whole(form, ((0, 1, 2, 3), (1, 2), (3, 2, 1)))))
    assert found.faces.tolist() == [[0, 1, 2], [0, 2, 3], [3, 2, 1]]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_is_read(form, tmp_path):
    rng = np.random.default_rng(0)
    vertex = {"x": rng.random(9), "y": rng.random(9), "z": rng.random(9), "red": np.arange(9, dtype=np.uint8)}
    faces = rng.integers(0, 9, (5, 3))
    ply.write(tmp_path / "a.ply", vertex, faces, form)
    found = ply.read(tmp_path / "a.ply")
    assert all(np.array_equal(found.vertex[name], vertex[name]) for name in vertex)
    assert np.array_equal(found.faces, faces)
    ply.write(tmp_path / "b.ply", {name: column[:0] for name, column in vertex.items()}, None, form)
    assert ply.read(tmp_path / "b.ply").faces is None
    with pytest.raises(ValueError, match="form must be one of ascii"):
        ply.write(tmp_path / "c.ply", vertex, form="text")


def test_elements_before_are_passed_over_and_others_are_not_read(put):
    head = "ply\nformat binary_little_endian 1.0\nelement camera 2\nproperty double view\n" + VERTEX.format(4)
    head += "element face 1\nproperty uchar material\nproperty list uchar int vertex_index\nproperty short last\n"
    head += "element other 99\nproperty list uchar int x\nend_header\n"
    body = struct.pack("<dd", 1, 2) + binary("<", ()) + struct.pack("<BBiiih", 1, 3, 0, 1, 3, 5)
    found = ply.read(put(head.encode() + body))
    assert found.faces.tolist() == [[0, 1, 3]]
    assert found.vertex["red"].tolist() == [7, 255, 0, 1]


FLOAT_AT = len(whole("binary_little_endian", ())) - len(binary("<", ()))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "at byte 0: an empty file"),
        (b"ply2\n", r"at byte 0: b'ply2', expected ply"),
        (b"ply\nformat ascii 1.0\nelement vertex 1", "at byte 21: the header does not end"),
        (b"ply\nformat ascii 2.0\n", "at byte 4: .*expected format ascii or binary_little_endian"),
        (b"ply\nend_header\n", "at byte 4: no format"),
        (b"ply\nformat ascii 1.0\nend_header\n", "no element vertex"),
        (b"ply\nformat ascii 1.0\nelement vertex -1\nend_header\n", "at byte 21: .*expected element NAME COUNT"),
        (b"ply\nformat ascii 1.0\nelement vertex 1\nproperty half x\nend_header\n", "at byte 38: .*property TYPE NAME"),
        (b"ply\nformat ascii 1.0\nelement vertex 1\nproperty float x\nend_header\n1\n", "vertices have no y"),
        (whole("ascii").replace(b"0.25", b"nan"), "z of vertex 1 is nan, expected a finite number"),
        (whole("ascii").replace(b"0.25", b"1e99"), "z of vertex 1 is inf"),
        (whole("ascii").replace(b"255", b"256"), "b'256', expected a number of type u1"),
        (whole("ascii").replace(b"255", b"7.5"), "b'7.5', expected a number of type u1"),
        (whole("ascii").replace(b"1.0 0.0", b"1_0 0.0"), "b'1_0', expected a number of type f4"),
        (whole("ascii").replace(b"3 0 1 2", b"3 0 1"), "3 numbers in a face, expected its 3 corners"),
        (whole("ascii").replace(b"3 0 1 2", b"3 0 1 4"), r"triangle 0 has corners \[0, 1, 4\], expected 0 to 3"),
        (whole("ascii", vertices=4_000_000_000), "3 numbers, expected 4|4 numbers|the file ends"),
        (whole("binary_little_endian", vertices=4_000_000_000), "bytes are left, expected 4000000000"),
        (whole("binary_little_endian")[:-1], "the file ends in face|has no bytes for|bytes are left"),
        (whole("binary_little_endian").replace(b"face 2", b"face 4000000000"), "expected 4000000000"),
        (whole("binary_big_endian", ((0, 1, -2),)), "has corners"),
    ],
)
def test_refused(data, told, put):
    with pytest.raises(FormatError, match=f"file.ply: at byte .*({told.removeprefix('at byte ')})|{told}"):
        ply.read(put(data))


def test_the_place_of_a_coordinate_that_is_no_number(put):
    data = bytearray(whole("binary_little_endian", ()))
    data[FLOAT_AT + 2 * 13 + 4 : FLOAT_AT + 2 * 13 + 8] = struct.pack("<f", float("nan"))
    with pytest.raises(FormatError, match=f"at byte {FLOAT_AT + 26}: y of vertex 2 is nan"):
        ply.read(put(bytes(data)))


def test_colours_and_normals(tmp_path):
    numbers = {axis: np.zeros(2, np.float32) for axis in ("x", "y", "z", "nx", "ny", "nz")}
    reds = {name: np.array([0.0, 1.0], np.float32) for name in ("red", "green", "blue")}
    coord, color, normal = ply.cloud_columns(ply.Ply({**numbers, **reds}), "a.ply")
    assert (coord.shape, color.tolist()[1], normal.shape) == ((2, 3), [255, 255, 255], (2, 3))
    wide = {name: np.array([0, 300], np.int32) for name in ("red", "green", "blue")}
    with pytest.raises(FormatError, match=r"a\.ply: at byte 0: colours outside"):
        ply.cloud_columns(ply.Ply({**numbers, **wide}), "a.ply")
    with pytest.raises(FormatError, match="normals that are not finite"):
        ply.cloud_columns(ply.Ply({**numbers, "nx": np.array([0, np.inf], np.float32)}), "a.ply")


def test_announced_points_take_no_memory(put):
    lies = [whole(form, vertices=4_000_000_000) for form in FORMS]
    paths = [put(lie) for lie in lies[:1]]
    with peak_below(50_000):
        for path, lie in zip(paths * 3, lies, strict=True):
            path.write_bytes(lie)
            with pytest.raises(FormatError):
                ply.read(path)


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.full)])
def test_broken_files(count, tmp_path):
    seeds = [whole(form, faces) for form in FORMS for faces in (((0, 1, 2), (0, 2, 3)), ((0, 1, 2, 3),))]
    good, refused = survive(ply.read, mutations(seeds, count), tmp_path / "a.ply", per_byte=80, least=600_000)
    assert good > count // 100
    assert refused > count // 4


@pytest.mark.skipif(not SCENES, reason="no real scenes here")
def test_a_real_scene():
    for path in SCENES:
        found = ply.read(path)
        coord, color, normal = ply.cloud_columns(found, path)
        assert len(coord) > 1000
        assert color.dtype == np.uint8
        assert normal is None
        assert found.faces.max() < len(coord)
        if path.name == "scene0000_00_vh_clean_2.ply":
            assert (len(coord), len(found.faces)) == (81369, 153587)
            assert (found.vertex["alpha"] == 255).all()
