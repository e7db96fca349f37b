"""AEDAT 3.1: files built by hand from the description of the format, damaged files, and files of other versions."""

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
from parapos.data.readers import TruncatedWarning, aedat

from .fuzz import mutations, survive

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[4] / "shared"))
OTHER = SHARED / "samples" / "dvsgesture" / "aedat2_not_dvsgesture"
HEAD = b"#!AER-DAT3.1\r\n#Format: RAW\r\n#Source 1: DVS128\r\n#Start-Time: 2015-01-01 12:00:00\r\n#!END-HEADER\r\n"


def polarity(*events, overflow=0, valid=None, capacity=None, kind=1):
    """A packet of (t, x, y, p) or (t, x, y, p, valid)."""
    body = b"".join(
        struct.pack("<Ii", x << 17 | y << 2 | p << 1 | (flag[0] if flag else 1), t) for t, x, y, p, *flag in events
    )
    count = len(events)
    valid = count if valid is None else valid
    capacity = count if capacity is None else capacity
    return (
        struct.pack("<hhiiiiii", kind, 1, 8, 4, overflow, capacity, count, valid) + body + bytes(8 * (capacity - count))
    )


def special(count=2, size=8):
    return struct.pack("<hhiiiiii", 0, 1, size, 4, 0, count, count, count) + b"\xff" * (size * count)


@pytest.fixture
def put(tmp_path):
    def write(*parts, head=HEAD):
        path = tmp_path / "file.aedat"
        path.write_bytes(head + b"".join(parts))
        return path

    return write


def rows(events):
    return list(zip(*(getattr(events, name).tolist() for name in ("t", "x", "y", "polarity")), strict=True))


def test_packets_are_joined_and_other_types_passed_over(put):
    path = put(
        polarity((5, 1, 2, 1), (5, 127, 126, 0)),
        special(),
        special(3, 20),
        polarity((9, 3, 4, 1), capacity=4),
        polarity((7, 9, 9, 1), kind=12),
        polarity((11, 32767, 32766, 1)),
    )
    found = aedat.read(path)
    assert rows(found) == [(5, 1, 2, 1), (5, 127, 126, 0), (9, 3, 4, 1), (11, 32767, 32766, 1)]
    assert [getattr(found, name).dtype for name in ("t", "x", "y", "polarity")] == [
        "int64",
        "uint16",
        "uint16",
        "uint8",
    ]


def test_time_overflows_are_counted_in_64_bits(put):
    last = 2**31 - 1
    path = put(
        polarity((last, 1, 1, 1)),
        polarity((0, 1, 1, 0), (last, 2, 2, 0), overflow=1),
        polarity((3, 0, 0, 1), overflow=last),
    )
    assert aedat.read(path).t.tolist() == [last, 2**31, 2**32 - 1, last * 2**31 + 3]


def test_invalid_events_are_left_out(put):
    events = [(1, 1, 1, 1), (2, 2, 2, 0, 0), (3, 3, 3, 1), (4, 4, 4, 0, 0)]
    assert aedat.read(put(polarity(*events, valid=2))).t.tolist() == [1, 3]
    assert aedat.read(put(polarity(*events))).t.tolist() == [1, 2, 3, 4]  # the packet says that all are valid


def test_events_are_sorted_and_ties_keep_their_order(put):
    path = put(polarity((9, 1, 0, 1), (4, 2, 0, 0)), polarity((4, 3, 0, 1), (1, 4, 0, 0)))
    assert rows(aedat.read(path)) == [(1, 4, 0, 0), (4, 2, 0, 0), (4, 3, 0, 1), (9, 1, 0, 1)]


def test_a_recording_without_events(put):
    for path in (put(), put(special())):
        assert len(aedat.read(path)) == 0


@pytest.mark.parametrize(("lost", "kept"), [(1, 4), (8, 4), (9, 3), (31, 1), (40, 0), (44, 0)])
def test_a_truncated_packet_is_an_error_or_kept_on_request(lost, kept, put):
    whole = polarity((1, 1, 1, 1)) + polarity(*[(t, t, t, 1) for t in range(2, 7)])
    start = len(HEAD) + 36
    path = put(whole[:-lost])
    with pytest.raises(
        FormatError, match=f"file.aedat: at byte {start}: .*truncated='keep' takes the {kept + 1} events"
    ):
        aedat.read(path)
    with pytest.warns(TruncatedWarning, match=f"at byte {start}: .*kept the {kept + 1} events"):
        assert aedat.read(path, truncated="keep").t.tolist() == list(range(1, kept + 2))


def test_a_truncated_packet_of_another_type(put):
    with pytest.warns(TruncatedWarning, match="kept the 1 events"):
        assert len(aedat.read(put(polarity((1, 1, 1, 1)), special()[:-3]), truncated="keep")) == 1


def test_whole_files_do_not_warn(put):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        aedat.read(put(polarity((1, 1, 1, 1))), truncated="keep")


def test_truncated_is_checked(put):
    with pytest.raises(ValueError, match="truncated must be one of error, keep, got 'skip'"):
        aedat.read(put(), truncated="skip")


def patched(byte, kind, value):
    data = bytearray(polarity((1, 1, 1, 1), (2, 2, 2, 1)))
    struct.pack_into(kind, data, byte, value)
    return bytes(data)


@pytest.mark.parametrize(
    ("packet", "byte", "told"),
    [
        (patched(0, "<h", -32767), 0, "a packet of type -32767"),
        (patched(4, "<i", 0), 4, "events of 0 bytes"),
        (patched(4, "<i", -8), 4, "events of -8 bytes"),
        (patched(4, "<i", 16), 4, "polarity events of 16 bytes"),
        (patched(8, "<i", 0), 4, "time at byte 0, expected 8 and 4"),
        (patched(12, "<i", -1), 12, "overflow -1"),
        (patched(16, "<i", 0), 16, "room for 0 events"),
        (patched(16, "<i", -5), 16, "room for -5 events"),
        (patched(16, "<i", 1), 20, "2 events, 2 of them valid, in a packet for 1"),
        (patched(20, "<i", -2), 20, "-2 events"),
        (patched(24, "<i", 3), 20, "3 of them valid"),
        (patched(40, "<i", -7), 40, "time -7"),
    ],
)
def test_wrong_packets_are_told_with_their_place(packet, byte, told, put):
    before = polarity((1, 1, 1, 1))
    with pytest.raises(FormatError, match=f"file.aedat: at byte {len(HEAD) + len(before) + byte}: .*{told}"):
        aedat.read(put(before, packet))


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (b"#!AER-DAT2.0\r\n# x\r\n", "at byte 0: AEDAT 2.0, .*expected AEDAT 3.1"),
        (b"#!AER-DAT3.0\r\n#!END-HEADER\r\n", "AEDAT 3.0"),
        (b"#!AER-DAT4.0\r\n\x00\x01", "AEDAT 4.0"),
        (b"#!AER-DAT3.10\r\n#!END-HEADER\r\n", "AEDAT 3.10"),
        (b"RIFF....AVI ", "not AEDAT, expected the line #!AER-DAT3.1, got b'RIFF"),
        (b"", "an empty file"),
        (b"#!AER-DAT3.1", "at byte 0: no line #!END-HEADER"),
        (b"#!AER-DAT3.1\r\n#Format: RAW\r\n" + polarity((1, 1, 1, 1)), "at byte 28: no line #!END-HEADER"),
        (b"#!AER-DAT3.1\r\n" + b"#\r\n" * 30_000 + b"#!END-HEADER\r\n", "no line #!END-HEADER"),
        (
            b"#!AER-DAT3.1\r\n#Format: SerializedTS\r\n#!END-HEADER\r\n",
            "at byte 14: packets are packed as b'SerializedTS'",
        ),
    ],
)
def test_other_files_are_refused(head, told, put):
    with pytest.raises(FormatError, match=told):
        aedat.read(put(head=head))


def test_lines_may_end_in_a_line_feed_alone(put):
    assert len(aedat.read(put(polarity((1, 1, 1, 1)), head=HEAD.replace(b"\r", b"")))) == 1


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        aedat.read(tmp_path / "none.aedat")


@pytest.mark.skipif(not OTHER.is_dir(), reason="no real files here")
@pytest.mark.parametrize("name", ["IMU_translBoxes.aedat", "sample_aedat_header.aedat"])
def test_real_aedat_2_is_refused(name):
    with pytest.raises(FormatError, match=r"at byte 0: AEDAT 2\.0"):
        aedat.read(OTHER / name)


@given(
    events=st.lists(
        st.tuples(st.integers(0, 2**34), st.integers(0, 2**15 - 1), st.integers(0, 2**15 - 1), st.integers(0, 1))
    ),
    packet=st.integers(1, 5),
)
def test_what_is_written_reads_back(events, packet, tmp_path_factory):
    path = tmp_path_factory.mktemp("aedat") / "a.aedat"
    aedat.write(path, Events.of(*zip(*events, strict=True)) if events else Events.empty(), packet=packet)
    assert rows(aedat.read(path)) == sorted(events, key=lambda event: event[0])


def test_the_writer_packs_as_the_format_says(tmp_path):
    path = tmp_path / "a.aedat"
    aedat.write(path, Events.of([5, 2**31 + 6], [1, 127], [2, 126], [1, 0]))
    data = path.read_bytes()
    body = data[data.index(b"#!END-HEADER\r\n") + 14 :]
    assert data.startswith(b"#!AER-DAT3.1\r\n")
    assert body == polarity((5, 1, 2, 1)) + polarity((6, 127, 126, 0), overflow=1)


@pytest.mark.parametrize(
    ("event", "told"), [((-1, 0, 0, 0), "t must be"), ((2**62, 0, 0, 0), "t must"), ((0, 2**15, 0, 0), "x must")]
)
def test_the_writer_refuses_what_does_not_fit(event, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        aedat.write(tmp_path / "a.aedat", Events.of(*([value] for value in event)))


def test_mutated_files(tmp_path, tenths):
    rng = np.random.default_rng(1)
    many = [(int(t), int(x), int(y), int(p)) for t, x, y, p in rng.integers(0, (9**9, 128, 128, 2), (40, 4))]
    seeds = [
        HEAD + polarity(*many[:9]) + special() + polarity(*many[9:30], overflow=1) + polarity(*many[30:], valid=3),
        HEAD + b"".join(polarity(event) for event in many[:6]),
        HEAD[:14] + HEAD[-14:] + polarity(*many),
    ]
    path = tmp_path / "broken.aedat"
    good, refused = survive(aedat.read, mutations(seeds, 240 * tenths), path, per_byte=8, least=200_000)
    kept, still = survive(
        lambda p: aedat.read(p, truncated="keep"), mutations(seeds, 120 * tenths, 1), path, per_byte=8, least=200_000
    )
    assert min(good, refused, kept, still) > 10 * tenths
