"""Frames of a video file by their numbers, and a writer of small files. Needs PyAV, the extra `video`.

Frames are decoded one after the other from the first, and counted: no seeking, and nothing that a header says about
their number is believed. Of what FFmpeg knows, only common containers and codecs are let in; playlists and all else
that leads to more files or to the network are not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import FormatError

Image = NDArray[np.uint8]  # (H, W, 3), red first

FORMATS = ("avi", "mov", "mp4", "matroska", "webm")
CODECS = (
    *("mpeg4", "h264", "hevc", "vp8", "vp9", "libdav1d", "av1", "mpeg1video", "mpeg2video", "msmpeg4", "msmpeg4v2"),
    *("mjpeg", "h263", "rawvideo", "ffv1"),
)
MAX_BYTES = 1024**3  # of a file
MAX_PIXELS = 4096 * 2304  # of a frame
MAX_FRAMES = 100_000  # to decode


@dataclass(frozen=True)
class Frames:
    """What was found of the wanted frames, by number.

    count: frames decoded, which is all of a file's unless it has more than the last wanted one. problem: why decoding
    ended before the file did, empty if it did not.
    """

    images: dict[int, Image] = field(repr=False)
    count: int
    problem: str = ""


def read_frames(path: str | Path, indices: Iterable[int]) -> Frames:
    """RGB frames of the first video stream, as far as the file has them. Decoding stops after the last wanted one.

    Data that cannot be decoded ends a video there. A file without any frame, with frames of more than MAX_PIXELS, or
    that is no video at all, is a FormatError; one that is not there an OSError.
    """
    wanted = set(indices)
    if not wanted or min(wanted) < 0 or max(wanted) >= MAX_FRAMES:
        told = f"from {min(wanted)} to {max(wanted)}" if wanted else "none"
        raise ValueError(f"indices must be from 0 to {MAX_FRAMES - 1}, got {told}")
    images: dict[int, Image] = {}
    count, problem = 0, ""
    try:
        for frame in _frames(path, max(wanted)):
            if count in wanted:
                images[count] = _rgb(frame)
            count += 1
    except FormatError as error:
        if count == 0:
            raise
        problem = str(error).removeprefix(f"{path}: ")
    return Frames(images, count, problem)


def stream_frames(path: str | Path) -> Iterator[tuple[float, Image]]:
    """Seconds from the first frame, and the frame, one after the other: only one is held at a time.

    At most MAX_FRAMES. Errors are those of `read_frames`; data that cannot be decoded is a FormatError after the frames
    before it. Frames without a time get that of 25 a second.
    """
    start = 0.0
    for count, frame in enumerate(_frames(path, MAX_FRAMES - 1)):
        seconds = count / 25 if frame.time is None else float(frame.time)
        start = seconds if count == 0 else start
        yield seconds - start, _rgb(frame)


def _rgb(frame: Any) -> Image:
    return frame.to_ndarray(format="rgb24", threads=1)


def _frames(path: str | Path, last: int) -> Iterator[Any]:
    """Frames 0 to `last` as PyAV has them; then a FormatError if decoding ended before the file did."""
    av = _pyav()
    count, problem = 0, ""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            raise FormatError(f"{path}: {size} bytes, expected at most {MAX_BYTES}")
        try:
            for frame in _decode(av, file, last):
                yield frame
                count += 1
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from None
        except av.error.FFmpegError as error:
            problem = f"cannot be decoded: {error.strerror}"
        except OSError:  # of the file itself
            raise
        except Exception as error:  # PyAV stumbles over some broken headers
            problem = f"cannot be decoded: {type(error).__name__}: {error}"
    if count == 0:
        raise FormatError(f"{path}: {problem or 'no frame'}; expected a video in {', '.join(FORMATS)}")
    if problem:
        raise FormatError(f"{path}: {problem}")


def _decode(av: Any, file: Any, last: int) -> Iterator[Any]:
    """Frames 0 to `last` of the first video stream."""
    options = {
        "format_whitelist": ",".join(FORMATS),
        "codec_whitelist": ",".join(CODECS),
        "protocol_whitelist": "none",
        "max_streams": "64",
        "max_pixels": str(2 * MAX_PIXELS + 2**16),  # FFmpeg counts the frame with its padding
        "threads": "1",
    }
    with av.open(file, "r", options=options, metadata_errors="replace") as container:
        if not container.streams.video:
            raise FormatError("no video stream, expected one")
        stream = container.streams.video[0]
        context = stream.codec_context
        if context is None or context.codec.name not in CODECS:
            told = "an unknown codec" if context is None else f"codec {context.codec.name}"
            raise FormatError(f"{told}, expected one of {', '.join(CODECS)}")
        context.options = {"max_pixels": options["max_pixels"]}
        context.thread_count = 1
        count, spare = 0, 16 * last + 1024
        for packet in container.demux(stream):
            if packet.is_corrupt:
                raise FormatError("the file ends within a frame")
            for frame in packet.decode():
                if frame.width * frame.height > MAX_PIXELS:
                    raise FormatError(f"{frame.width} x {frame.height} pixels, expected at most {MAX_PIXELS} in all")
                yield frame
                count += 1
                if count > last:
                    return
            spare -= 1
            if spare == 0:
                raise FormatError(f"{count} frames in {16 * last + 1024} packets, expected about as many")


def write_video(path: str | Path, frames: Iterable[Image], *, rate: int = 25) -> None:
    """Writes uint8 frames (H, W, 3) of one size as MPEG-4 in AVI, at high quality. H and W must be even."""
    with VideoWriter(path, rate=rate) as writer:
        for image in frames:
            writer.add(image)
        if writer.shape is None:
            raise ValueError("frames must be at least one, got none")


class VideoWriter:
    """`write_video` for frames that come one by one; a context, which ends the file."""

    def __init__(self, path: str | Path, *, rate: int = 25) -> None:
        self.shape: tuple[int, ...] | None = None
        self._av, self._rate = _pyav(), rate
        self._file = open(path, "wb")  # noqa: SIM115
        self._container = self._av.open(self._file, "w", format="avi")
        self._stream: Any = None

    def add(self, image: Image) -> None:
        if self.shape is None:
            if image.ndim != 3 or image.shape[2] != 3 or image.shape[0] % 2 or image.shape[1] % 2 or not image.size:
                raise ValueError(f"frames must be (H, W, 3) with even sides, got {image.shape}")
            options = {"qmin": "2", "qmax": "2"}
            self._stream = self._container.add_stream("mpeg4", rate=self._rate, options=options)
            self._stream.height, self._stream.width = image.shape[:2]
            self._stream.pix_fmt = "yuv420p"
            self._stream.codec_context.thread_count = 1
            self.shape = image.shape
        if image.shape != self.shape or image.dtype != np.uint8:
            raise ValueError(f"frames must all be uint8 {self.shape}, got {image.dtype} {image.shape}")
        self._container.mux(self._stream.encode(self._av.VideoFrame.from_ndarray(image, format="rgb24")))

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if self._stream is not None and error[0] is None:
                self._container.mux(self._stream.encode())
        finally:
            if self._stream is not None:
                self._container.close()
            self._file.close()


def _pyav() -> Any:
    try:
        import av
    except ImportError as error:
        raise ImportError(f"video files need PyAV ({error}); install it with: pip install 'parapos[video]'") from None
    return av
