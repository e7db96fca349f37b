"""Prophesee DAT: files built by hand from the description of the format, damaged files, and a real one."""

import os
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parapos.data import FormatError
from parapos.data.events import Events
from parapos.data.readers import TruncatedWarning, dat

from .fuzz import mutations, survive

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[4] / "shared"))
NCARS = SHARED / "samples" / "prophesee_gen1" / "ncars_not_gen1" / "sample_ncars.dat"
HEAD = b"% Data file containing Event2D events.\n% Version 2\n% Date 2017-03-30 12:53:58\n% Height 240\n% Width 304\n"
EVENTS = [(0, 0, 0, 0), (7, 303, 239, 1), (7, 16383, 16382, 0), (2**32 - 1, 5, 6, 1)]
BODY = b"".join(struct.pack("<II", t, x | y << 14 | p << 28) for t, x, y, p in EVENTS)


def rows(events):
    return list(zip(*(getattr(events, name).tolist() for name in ("t", "x", "y", "polarity")), strict=True))


@pytest.fixture
def put(tmp_path):
    def write(data):
        path = tmp_path / "file.dat"
        path.write_bytes(data)
        return path

    return write


@pytest.mark.parametrize("kind", [0, 12])
def test_events_and_size_of_the_frame(kind, put):
    file = dat.DatFile(put(HEAD + bytes([kind, 8]) + BODY))
    assert (len(file), file.width, file.height) == (4, 304, 240)
    assert rows(file.slice(0, 4)) == EVENTS
    assert rows(file.slice(1, 3)) == EVENTS[1:3]
    assert len(file.slice(4, 4)) == 0
    assert file.time(3) == 2**32 - 1
    found = dat.read(file.path)
    assert [getattr(found, name).dtype for name in ("t", "x", "y", "polarity")] == [
        "int64",
        "uint16",
        "uint16",
        "uint8",
    ]


def test_unused_bits_of_a_record_say_nothing(put):
    assert rows(dat.read(put(HEAD + b"\x00\x08" + struct.pack("<II", 1, 0xE0000003)))) == [(1, 3, 0, 0)]


def test_a_file_without_text_begins_with_events(put):
    file = dat.DatFile(put(BODY))
    assert (len(file), file.width, file.height) == (4, None, None)
    assert rows(file.slice(0, 4)) == EVENTS
    assert len(dat.read(put(HEAD + b"\x0c\x08"))) == 0


def test_an_empty_file_is_no_recording(put, tmp_path):
    """A file without text would have no byte without events; but so has one that was never written."""
    for truncated in ("error", "keep"):
        with pytest.raises(FormatError, match=r"file\.dat: at byte 0: an empty file, expected text or events"):
            dat.DatFile(put(b""), truncated=truncated)
    with pytest.raises(ValueError, match="a file without text needs events"):
        dat.write(tmp_path / "a.dat", Events.empty(), text=False)
    with pytest.raises(ValueError, match=r"looks like text"):
        dat.write(tmp_path / "a.dat", Events.of([0x2025], [0], [0], [0]), text=False)
    assert not (tmp_path / "a.dat").exists()


def test_slices_are_checked(put):
    file = dat.DatFile(put(BODY))
    for start, stop in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(ValueError, match="expected 0 <= start <= stop <= 4"):
            file.slice(start, stop)


@pytest.mark.parametrize("lost", [1, 4, 7])
def test_bytes_that_are_left_over_are_an_error_or_kept_on_request(lost, put):
    path = put(HEAD + b"\x00\x08" + BODY[:-lost])
    at = len(HEAD) + 2 + 24
    with pytest.raises(FormatError, match=f"file.dat: at byte {at}: {8 - lost} bytes are left.*takes the 3 events"):
        dat.DatFile(path)
    with pytest.warns(TruncatedWarning, match=f"at byte {at}: .*kept the 3 events"):
        assert rows(dat.read(path, truncated="keep")) == EVENTS[:3]


def test_whole_files_do_not_warn(put):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dat.read(put(HEAD + b"\x00\x08" + BODY), truncated="keep")
    with pytest.raises(ValueError, match="truncated must be one of error, keep, got 'no'"):
        dat.DatFile(put(BODY), truncated="no")


@pytest.mark.parametrize(
    ("data", "byte", "told"),
    [
        (HEAD + b"\x01\x08" + BODY, len(HEAD), "events of type 1 and 8 bytes"),
        (HEAD + b"\x00\x10" + BODY, len(HEAD), "events of type 0 and 16 bytes"),
        (HEAD, len(HEAD), "the file ends"),
        (HEAD + b"\x00", len(HEAD), "the file ends"),
        (HEAD[:-1], HEAD.index(b"% Width"), "a line that does not end"),
        (b"% " + b"x" * 70_000 + b"\n\x00\x08", 0, "all text in the first 65536 bytes"),
        (b"% Width wide\n\x00\x08", 0, "Width b'wide', expected a number from 1 to 99999"),
        (b"% Version 2\n% Height 0\n\x00\x08", 12, "Height b'0'"),
        (b"% Width 304\n% Height 240\n% Width 1280\n\x00\x08", 25, "Width 1280, expected 304 as before"),
        (b"% Version 1\n\x00\x08", 0, "version 1"),
        (b"% Version 4\n\x00\x08", 0, "version 4"),
    ],
)
def test_wrong_headers_are_told_with_their_place(data, byte, told, put):
    with pytest.raises(FormatError, match=f"file.dat: at byte {byte}: .*{told}"):
        dat.DatFile(put(data))


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        dat.DatFile(tmp_path / "none.dat")


@pytest.mark.parametrize("back", range(1, 8))
def test_order_is_checked_across_pieces(back, tmp_path, monkeypatch):
    """Equal times are in order; a step back is found wherever pieces begin."""
    monkeypatch.setattr(dat, "PIECE", 3)
    times = np.array([5, 5, 6, 6, 7, 8, 8, 9])
    dat.write(tmp_path / "a.dat", Events.of(times, *np.zeros((3, 8), int)), text=False)
    dat.DatFile(tmp_path / "a.dat").check_order()
    times[back:] -= 4
    dat.write(tmp_path / "a.dat", Events.of(times, *np.zeros((3, 8), int)), text=False)
    file = dat.DatFile(tmp_path / "a.dat")
    with pytest.raises(
        FormatError, match=rf"at byte {8 * back}: time goes back from \d to \d at event {back}, expected"
    ):
        file.check_order()
    file.check_order(back)
    file.check_order(0, back)


@given(times=st.lists(st.integers(0, 30)), asked=st.integers(-2, 33))
def test_binary_search(times, asked, tmp_path_factory):
    path = tmp_path_factory.mktemp("dat") / "a.dat"
    zeros = [0] * len(times)
    dat.write(path, Events.of(np.array(sorted(times), int), *(np.array(zeros, int) for _ in range(3))))
    file = dat.DatFile(path)
    assert file.find(asked) == sum(t < asked for t in times)
    assert file.find(asked, "right") == sum(t <= asked for t in times)
    with pytest.raises(ValueError, match="side must be one of left, right"):
        file.find(asked, "middle")


@given(
    events=st.lists(
        st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**14 - 1), st.integers(0, 2**14 - 1), st.integers(0, 1)),
        min_size=1,
    ),
    kind=st.sampled_from([0, 12]),
    text=st.booleans(),
)
def test_what_is_written_reads_back(events, kind, text, tmp_path_factory):
    path = tmp_path_factory.mktemp("dat") / "a.dat"
    if not text and struct.pack("<I", events[0][0]).startswith(b"% "):
        return  # such a time looks like text
    dat.write(path, Events.of(*zip(*events, strict=True)), kind=kind, text=text, width=304, height=240)
    file = dat.DatFile(path)
    assert rows(file.slice(0, len(file))) == events
    assert (file.width, file.height) == ((304, 240) if text else (None, None))


def test_the_writer_packs_as_the_format_says(tmp_path):
    path = tmp_path / "a.dat"
    dat.write(path, Events.of(*zip(*EVENTS, strict=True)), kind=0)
    assert path.read_bytes() == b"% Data file containing Event2D events.\n% Version 2\n\x00\x08" + BODY


@pytest.mark.parametrize(
    ("event", "told"), [((2**32, 0, 0, 0), "t must be"), ((-1, 0, 0, 0), "t must be"), ((0, 2**14, 0, 0), "x must be")]
)
def test_the_writer_refuses_what_does_not_fit(event, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        dat.write(tmp_path / "a.dat", Events.of(*([value] for value in event)))
    with pytest.raises(ValueError, match="kind must be one of"):
        dat.write(tmp_path / "a.dat", Events.empty(), kind=3)


@pytest.mark.skipif(not NCARS.is_file(), reason="no real file here")
def test_a_real_file():
    file = dat.DatFile(NCARS)
    assert (len(file), file.start, file.width, file.height) == (2009, 93, None, None)
    events = file.slice(0, len(file))
    assert (events.t[0], events.t[-1]) == (0, 99_952)
    assert (np.diff(events.t) >= 0).all()
    assert (events.x.min(), events.x.max(), events.y.min(), events.y.max()) == (0, 77, 0, 41)
    assert set(events.polarity.tolist()) == {0, 1}


def test_mutated_files(tmp_path, tenths):
    seeds = [HEAD + b"\x00\x08" + 6 * BODY, HEAD[:51] + b"\x0c\x08" + BODY, BODY]

    def read(path):
        dat.read(path)

    def keep(path):
        file = dat.DatFile(path, truncated="keep")
        file.slice(0, len(file))
        file.find(7)

    path = tmp_path / "broken.dat"
    good, refused = survive(read, mutations(seeds, 240 * tenths), path, per_byte=8, least=200_000)
    kept, still = survive(keep, mutations(seeds, 120 * tenths, 1), path, per_byte=8, least=200_000)
    assert min(good, refused, kept, still) > 5 * tenths
