"""Frames by number from video files, whatever their headers say; anything else is a FormatError that names the file."""

import errno
import io
import os
import runpy
import struct
import sys
import warnings
from pathlib import Path

import av
import numpy as np
import pytest

from parapos.data import FormatError
from parapos.data.readers import video
from parapos.data.readers.video import read_frames, write_video

from .fuzz import mutations, peak_below

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[4] / "shared"))
SAMPLES = SHARED / "samples" / "ucf101"
WANTED = [10 * k + i for k in range(5) for i in (0, 1)]


def grey(number, height=16, width=32):
    """A frame that tells its number."""
    return np.full((height, width, 3), 5 * number, np.uint8)


def numbers(frames):
    """What the brightness of frames says they are, to compare with what they are called."""
    return {i: round(float(image.mean()) / 5) for i, image in frames.images.items()}


def encode(path, images, *, codec="mjpeg", pixels="yuvj420p", container="avi"):
    """Frames in any codec and container."""
    with av.open(str(path), "w", format=container) as out:
        stream = out.add_stream(codec, rate=25)
        stream.height, stream.width = images[0].shape[:2]
        stream.pix_fmt = pixels
        for image in images:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24").reformat(format=pixels)))
        out.mux(stream.encode())
    return path


@pytest.fixture
def clip(tmp_path):
    """A file of 50 numbered frames."""
    write_video(tmp_path / "clip.avi", [grey(i) for i in range(50)])
    return tmp_path / "clip.avi"


def test_frames_are_those_asked_for(clip):
    found = read_frames(clip, WANTED)
    assert numbers(found) == {i: i for i in WANTED}
    assert found.count == 42  # none after the last one was decoded
    assert found.problem == ""
    assert all(image.shape == (16, 32, 3) and image.dtype == np.uint8 for image in found.images.values())
    assert numbers(read_frames(clip, [7, 3, 7])) == {3: 3, 7: 7}


def test_a_file_with_fewer_frames_gives_what_it_has(clip):
    found = read_frames(clip, [0, 49, 50, 99_999])
    assert numbers(found) == {0: 0, 49: 49}
    assert (found.count, found.problem) == (50, "")
    write_video(clip, [grey(9)])
    found = read_frames(clip, WANTED)
    assert (numbers(found), found.count) == ({0: 9}, 1)


def test_colours_are_red_green_blue(tmp_path):
    image = np.zeros((16, 16, 3), np.uint8)
    image[:] = 200, 100, 20
    write_video(tmp_path / "a.avi", [image])
    got = read_frames(tmp_path / "a.avi", [0]).images[0]
    assert np.abs(got.astype(int) - image).max() <= 4  # two roundings to and from YUV


def test_pictures_are_not_only_flat(tmp_path):
    rng = np.random.default_rng(0)
    soft = np.kron(rng.integers(0, 256, (4, 4, 1)), np.ones((16, 16, 3))).astype(np.uint8)
    write_video(tmp_path / "a.avi", [soft, soft[::-1].copy(), soft])
    found = read_frames(tmp_path / "a.avi", [0, 1, 2])
    for i, image in enumerate((soft, soft[::-1], soft)):
        assert np.abs(found.images[i].astype(int) - image).mean() < 3


@pytest.mark.parametrize("told", [0, 1, 10**9])
def test_headers_are_not_believed(told, clip):
    data = bytearray(clip.read_bytes())
    struct.pack_into("<I", data, data.index(b"avih") + 8 + 16, told)  # frames of the file
    struct.pack_into("<I", data, data.index(b"strh") + 8 + 32, told)  # and of the stream
    clip.write_bytes(data)
    found = read_frames(clip, [*WANTED, 60])
    assert (numbers(found), found.count) == ({i: i for i in WANTED}, 50)


def chunks(data):
    """Start and end of every frame in an AVI file."""
    at = data.index(b"movi") + 4
    while data[at : at + 4] == b"00dc":
        (size,) = struct.unpack_from("<I", data, at + 4)
        yield at + 8, at + 8 + size
        at += 8 + size + size % 2


def test_a_truncated_file_gives_the_frames_before_its_end(clip):
    data = clip.read_bytes()
    places = list(chunks(data))
    assert len(places) == 50
    for last in (1, 12, 30, 49):
        start, end = places[last]
        clip.write_bytes(data[:end])
        found = read_frames(clip, range(50))
        assert (numbers(found), found.count, found.problem) == ({i: i for i in range(last + 1)}, last + 1, "")
        clip.write_bytes(data[: (start + end) // 2])
        found = read_frames(clip, range(50))
        assert (numbers(found), found.count) == ({i: i for i in range(last)}, last)
        assert found.problem == "the file ends within a frame"
    for cut in (places[0][0] + 2, places[0][0] - 8, data.index(b"strf")):
        clip.write_bytes(data[:cut])
        with pytest.raises(FormatError, match=r"clip\.avi: "):
            read_frames(clip, [0])


def test_damage_ends_a_video_there(tmp_path):
    path = encode(tmp_path / "a.avi", [grey(i) for i in range(6)])
    data = bytearray(path.read_bytes())
    start, end = list(chunks(data))[3]
    data[start:end] = bytes(end - start)
    path.write_bytes(data)
    found = read_frames(path, range(6))
    assert (found.count, numbers(found)) == (3, {0: 0, 1: 1, 2: 2})
    assert found.problem.startswith("cannot be decoded: ")


@pytest.mark.parametrize(
    ("codec", "pixels", "container"),
    [
        ("ffv1", "gray", "avi"),
        ("ffv1", "gray16le", "avi"),
        ("ffv1", "yuv444p", "matroska"),
        ("rawvideo", "bgr24", "avi"),
        ("mpeg4", "yuv420p", "mp4"),
        ("mpeg2video", "yuv422p", "mov"),
        ("mjpeg", "yuvj420p", "avi"),
    ],
)
def test_all_pixel_formats_become_rgb(codec, pixels, container, tmp_path):
    path = encode(tmp_path / "a.bin", [grey(i) for i in (3, 40, 20)], codec=codec, pixels=pixels, container=container)
    found = read_frames(path, [0, 1, 2])
    assert numbers(found) == {0: 3, 1: 40, 2: 20}
    for image in found.images.values():
        assert image.shape == (16, 32, 3)
        assert image.max() - image.min() <= 6  # JPEG at its default quality


def test_frames_may_change_their_size(tmp_path):
    small = list(read_chunks(encode(tmp_path / "small.avi", [grey(8, 8, 8)])))
    path = encode(tmp_path / "a.avi", [grey(i) for i in range(3)])
    data = bytearray(path.read_bytes())
    start, end = list(chunks(data))[1]
    assert len(small[0]) <= end - start
    data[start:end] = small[0].ljust(end - start, b"\0")
    path.write_bytes(data)
    found = read_frames(path, range(3))
    assert [image.shape[:2] for image in found.images.values()] == [(16, 32), (8, 8), (16, 32)]


def read_chunks(path):
    data = path.read_bytes()
    return [data[start:end] for start, end in chunks(data)]


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nclip.avi\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"RIFF",
        b"<html>404</html>",
        PLAYLIST,
        b"ffconcat version 1.0\nfile 'clip.avi'\n",
        bytes(5000),
        b"\x1b[31mred",
    ],
)
def test_what_is_no_video_is_named(data, clip):
    path = clip.with_name("bad.avi")
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"bad\.avi: .*expected a video in avi, mov"):
        read_frames(path, [0])


def test_pictures_and_sound_are_no_videos(tmp_path):
    frame = av.VideoFrame.from_ndarray(grey(5), format="rgb24")
    frame.to_image().save(tmp_path / "a.png")
    with pytest.raises(FormatError, match=r"a\.png: "):
        read_frames(tmp_path / "a.png", [0])
    with av.open(str(tmp_path / "a.mkv"), "w") as out:
        stream = out.add_stream("pcm_s16le", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        sound.rate = 8000
        out.mux(stream.encode(sound))
        out.mux(stream.encode())
    with pytest.raises(FormatError, match=r"a\.mkv: no video stream"):
        read_frames(tmp_path / "a.mkv", [0])


def test_rare_codecs_are_refused(tmp_path):
    path = encode(tmp_path / "a.avi", [grey(1)], codec="huffyuv", pixels="yuv422p")
    with pytest.raises(FormatError, match=r"a\.avi: codec huffyuv, expected one of mpeg4, h264"):
        read_frames(path, [0])


@pytest.mark.parametrize("container", ["mpeg", "mpeg2video", "asf"])
def test_rare_containers_are_refused(container, tmp_path):
    path = encode(tmp_path / "a.avi", [grey(1)] * 5, codec="mpeg2video", pixels="yuv420p", container=container)
    with av.open(str(path)) as file:
        assert file.format.name == {"mpeg2video": "mpegvideo"}.get(container, container)  # FFmpeg can read it
    with pytest.raises(FormatError, match=r"a\.avi: .*expected a video in avi"):
        read_frames(path, [0])


class Failing(io.FileIO):
    """A file on a disk that breaks."""

    def read(self, size=-1):
        if self.tell() >= 32768:
            raise OSError(errno.EIO, "the disk broke")
        return super().read(size)


def test_a_broken_disk_is_not_a_broken_file(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    write_video(tmp_path / "a.avi", rng.integers(0, 256, (20, 64, 64, 3)).astype(np.uint8))
    assert (tmp_path / "a.avi").stat().st_size > 100_000
    monkeypatch.setattr(video, "open", lambda path, mode: Failing(path, mode.replace("b", "")), raising=False)
    with pytest.raises(OSError, match="the disk broke"):
        read_frames(tmp_path / "a.avi", [19])


def test_what_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_frames(tmp_path / "none.avi", [0])
    with pytest.raises(IsADirectoryError):
        read_frames(tmp_path, [0])
    with pytest.raises(FileNotFoundError):  # a path, not an address
        read_frames("http://localhost/a.avi", [0])


@pytest.mark.parametrize("codec", ["rawvideo", "mpeg4", "mjpeg"])
def test_large_frames_are_refused(codec, tmp_path, monkeypatch):
    pixels = {"rawvideo": "bgr24", "mjpeg": "yuvj420p"}.get(codec, "yuv420p")
    path = encode(tmp_path / "a.avi", [grey(1)], codec=codec, pixels=pixels)
    monkeypatch.setattr(video, "MAX_PIXELS", 16 * 32)
    assert read_frames(path, [0]).count == 1
    monkeypatch.setattr(video, "MAX_PIXELS", 16 * 32 - 1)
    with pytest.raises(FormatError, match=r"a\.avi: "):
        read_frames(path, [0])


def test_huge_claims_cost_nothing(tmp_path):
    path = encode(tmp_path / "a.avi", [grey(1)], codec="rawvideo", pixels="bgr24")
    data = bytearray(path.read_bytes())
    struct.pack_into("<ii", data, data.index(b"strf") + 8 + 4, 30_000, 30_000)
    path.write_bytes(data)
    with peak_below(50_000), pytest.raises(FormatError, match=r"a\.avi: "):
        read_frames(path, [0])


def test_huge_files_are_refused(clip, monkeypatch):
    monkeypatch.setattr(video, "MAX_BYTES", 10)
    with pytest.raises(FormatError, match=r"clip\.avi: \d+ bytes, expected at most 10"):
        read_frames(clip, [0])


@pytest.mark.parametrize(("indices", "told"), [([], "none"), ([-1, 2], "from -1 to 2"), ([100_000], "to 100000")])
def test_bad_indices(indices, told, clip):
    with pytest.raises(ValueError, match=rf"from 0 to 99999, got .*{told}"):
        read_frames(clip, indices)


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        ([], "at least one, got none"),
        ([grey(1, 15)], r"even sides, got \(15, 32, 3\)"),
        ([grey(1)[:, :, 0]], r"even sides, got \(16, 32\)"),
        ([grey(1), grey(2, 18)], r"uint8 \(16, 32, 3\), got uint8 \(18, 32, 3\)"),
        ([grey(1), grey(2).astype(float)], "got float64"),
    ],
)
def test_bad_frames(frames, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        write_video(tmp_path / "a.avi", frames)


def test_without_pyav(clip, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match=r"pip install 'parapos\[video\]'"):
        read_frames(clip, [0])


@pytest.mark.parametrize("name", ["readers.video", "clips", "ucf101", "video_tree"])
def test_pyav_is_loaded_when_a_video_is_read(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it was imported before
        runpy.run_module(f"parapos.data.{name}")


def seeds(folder):
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (16, 16, 3)).astype(np.uint8) for _ in range(4)]
    write_video(folder / "seed", images)
    yield (folder / "seed").read_bytes()
    for codec, pixels, container in (
        ("mpeg4", "yuv420p", "mp4"),
        ("mpeg4", "yuv420p", "matroska"),
        ("mjpeg", "yuvj420p", "avi"),
        ("rawvideo", "bgr24", "avi"),
    ):
        yield encode(folder / "seed", images, codec=codec, pixels=pixels, container=container).read_bytes()


def test_mutated_files_give_frames_or_a_format_error(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "MAX_PIXELS", 2**20)
    path, good, bad = tmp_path / "fuzz.avi", 0, 0
    with peak_below(150_000):
        for data in mutations(list(seeds(tmp_path)), 3200):
            path.write_bytes(data)
            try:
                found = read_frames(path, [0, 1, 3])
            except FormatError as error:
                bad += str(error).startswith(f"{path}: ")
            else:
                assert 1 <= found.count <= 4
                assert set(found.images) == {i for i in (0, 1, 3) if i < found.count}
                for image in found.images.values():
                    assert image.shape[2] == 3
                    assert image.dtype == np.uint8
                    assert 0 < image.size <= 3 * 2**20
                good += 1
        assert good > 500
        assert bad > 500
        assert good + bad == 3200


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="no sample videos here")
@pytest.mark.parametrize(
    ("name", "count"),
    [("UCF-101/SoccerJuggling/v_SoccerJuggling_g23_c01.avi", 240), ("unnamed_ucf_style/aaa.avi", 165)],
)
def test_real_videos(name, count):
    assert read_frames(SAMPLES / name, [99_999]).count == count
    found = read_frames(SAMPLES / name, WANTED)
    assert found.count == 42
    assert all(image.shape == (240, 320, 3) for image in found.images.values())
    near, far = (np.abs(found.images[0].astype(int) - found.images[i]).mean() for i in (1, 41))
    assert 0 < near < far
