"""Published folders that mean harm: refused in our words, with nothing run and nothing large allocated."""

import os
import pickle
import subprocess
import sys
import zipfile

import torch

from tests.interop.test_official import DIM, weights
from tests.interop.test_pickles import HOSTILE, storage, text
from tests.interop.test_published import config_of, publish


class Harm:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def rewrite(path, change, **options):
    """A checkpoint whose entries went through `change(name, bytes)`."""
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", **options) as new:
        for name, data in entries.items():
            new.writestr(name, change(name, data))


def claim(path, old, new, *, storage=True):
    """Writes another number wherever a pickle has the number `old`, which is first the size of a storage."""
    a, b = (b"J" + n.to_bytes(4, "little") for n in (old, new))

    def change(name, data):
        start = 0 if storage else data.find(a) + len(a)
        return data[:start] + data[start:].replace(a, b) if name.endswith("data.pkl") else data

    rewrite(path, change)


def second_directory(path):
    """Puts a directory that calls every entry stored before the end record, which points at the first one."""
    data = path.read_bytes()
    end = data.rindex(b"PK\x05\x06")
    size, start = (int.from_bytes(data[end + at : end + at + 4], "little") for at in (12, 16))
    directory, at = bytearray(data[start : start + size]), 0
    while at < len(directory):
        directory[at + 10 : at + 12] = b"\0\0"
        directory[at + 24 : at + 28] = directory[at + 20 : at + 24]
        at += 46 + sum(int.from_bytes(directory[at + n : at + n + 2], "little") for n in (28, 30, 32))
    path.write_bytes(data[:end] + directory + data[end:])


def patched(path, at, value):
    """Writes a number of 8 bytes at an offset from the end of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) + at : len(data) + at + 8] = value.to_bytes(8, "little")
    path.write_bytes(data)


def directories(made, state):
    """Archives of which two readers may see two directories."""
    deflated = {"compression": zipfile.ZIP_DEFLATED}
    pickle_bomb, bomb = (made(name, state) / "model.pt" for name in ("dirs_pickle", "dirs"))
    rewrite(pickle_bomb, lambda name, data: data + bytes(1 << 24) if name.endswith("data.pkl") else data, **deflated)
    rewrite(bomb, lambda name, data: bytes(1 << 24) if name.endswith("data/0") else data, **deflated)
    for path in (pickle_bomb, bomb):
        second_directory(path)
    for name, tail in (("comment", b"\x04\0note"), ("trailing", b"\0\0note")):
        path = made(name, state) / "model.pt"
        path.write_bytes(path.read_bytes()[:-2] + tail)
    # torch.save ends a file with an end record of 56 bytes for large files, its locator of 20, and one of 22
    path = made("locator", state) / "model.pt"
    patched(path, -22 - 20 + 8, 100)
    path = made("offset64", state) / "model.pt"
    patched(path, -22 - 20 - 8, 100)
    path = made("count64", state) / "model.pt"
    patched(path, -22 - 20 - 24, 3)


TWO_GB = (b"cbuiltins\nbytearray\n\x8a\x05" + (1 << 31).to_bytes(5, "little") + b"\x85R.", "")
MARKED = 70001  # a size that stands nowhere else in a checkpoint


def hostile(folder):
    """Published folders whose weights mean harm, by what is said of them."""
    config, state = config_of("imagenet", "pape"), weights("pape")

    def made(name, changed):
        return publish(folder / name, config, changed)

    made("code", {**state, "cls": Harm(folder / "harmed")})
    (made("pickle", state) / "model.pt").write_bytes(pickle.dumps(Harm(folder / "harmed")))
    made("expanded", {**state, "cls": torch.zeros(1).expand(1 << 40)})
    huge = made("claimed", {**state, "cls": torch.zeros(MARKED)})
    claim(huge / "model.pt", MARKED, (1 << 31) - 1)
    squared = made("squared", {**state, "cls": torch.zeros(MARKED, 1)})
    claim(squared / "model.pt", MARKED, (1 << 31) - 1)
    large = made("large", {**state, "cls": torch.zeros(MARKED, 1)})
    claim(large / "model.pt", MARKED, (1 << 31) - 1, storage=False)
    rewrite(made("compressed", state) / "model.pt", lambda name, data: data, compression=zipfile.ZIP_DEFLATED)
    bomb = made("bomb", state) / "model.pt"
    rewrite(
        bomb, lambda name, data: bytes(1 << 26) if name.endswith("data/0") else data, compression=zipfile.ZIP_DEFLATED
    )
    harms = {"key": HOSTILE["doubled key"], "deep": HOSTILE["deep key"], "bytes": TWO_GB}
    names = ("doubled attributes", "deep attributes", "doubled storage", "deep storage", "marks")
    for name, harm in (harms | {name.replace(" ", "_"): HOSTILE[name] for name in names}).items():
        data = b"\x80\x02" + harm[0]
        rewrite(made(name, state) / "model.pt", lambda entry, old, data=data: data if "data.pkl" in entry else old)
    directories(made, state)
    short = made("short", state) / "model.pt"  # a tensor would reach past its record
    rewrite(short, lambda name, data: data[:4] if name.endswith("data/0") else data)
    unsaved = made("unsaved", state) / "model.pt"
    lost = b"\x80\x02}" + text("a") + storage(text("lost")) + b"s."
    rewrite(unsaved, lambda name, data: lost if name.endswith("data.pkl") else data)
    twice = made("twice", state) / "model.pt"
    with zipfile.ZipFile(twice, "a") as archive:
        inside = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        archive.writestr(inside.replace("data.pkl", "DATA.pkl"), b"\x80\x02" + HOSTILE["doubled key"][0])
    climbing = made("climbing", state) / "model.pt"
    with zipfile.ZipFile(climbing) as archive:
        entries = {f"../../{name}": archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(climbing, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    for name, target in (("device", "/dev/zero"), ("loop", "model.pt")):
        (made(name, state) / "model.pt").unlink()
        (folder / name / "model.pt").symlink_to(target)
    (made("pipe", state) / "config.json").unlink()
    os.mkfifo(folder / "pipe" / "config.json")
    torch.save(state, made("legacy", state) / "model.pt", _use_new_zipfile_serialization=False)
    made("list", [1, 2])
    made("nested", {**state, "cls": {"x": torch.zeros(1)}})
    made("number", {**state, 3: torch.zeros(1)})
    made("sparse", {**state, "cls": torch.zeros(4, 4).to_sparse()})
    made("whole", {**state, "cls": torch.zeros(1, 1, DIM, dtype=torch.long)})
    made("wide", {**state, "cls": torch.zeros(1, 1, DIM + 1)})
    (made("cut", state) / "model.pt").write_bytes((folder / "wide/model.pt").read_bytes()[:5000])
    (made("empty", state) / "model.pt").write_bytes(b"")
    return sorted(path.name for path in folder.iterdir())


SCRIPT = """
import resource, sys
from pathlib import Path
from parapos.interop import official
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))


def peak():  # in MB. Not ru_maxrss, which begins at the peak of the process that started this one.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) // 1024


official.load(sys.argv[3])  # what importing and reading any checkpoint takes depends on the build of torch
before = peak()
for folder in sorted(Path(sys.argv[1]).iterdir()):
    if folder.is_dir():
        try:
            official.load(folder)
        except official.CheckpointError as error:
            print(folder.name, "refused:", str(error)[len(str(folder)):].replace(chr(10), " ")[:160])
print("peak", peak() - before)
"""


def test_files_that_mean_harm_run_nothing_and_take_no_memory(tmp_path):
    """In a process that may not take much more memory than for a checkpoint that is right."""
    folder = tmp_path / "published"
    folder.mkdir()
    names = hostile(folder)
    limit = str(12 << 30)  # of address space; the largest claim is 8 TB
    good = publish(tmp_path / "good", config_of("imagenet", "pape"), weights("pape"))
    command = [sys.executable, "-c", SCRIPT, str(folder), limit, str(good)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    refused = dict(line.split(" refused:", 1) for line in done.stdout.splitlines() if " refused:" in line)
    assert sorted(refused) == names, done.stdout
    assert not (folder / "harmed").exists()
    assert "posix.system" in refused["code"] or "os.system" in refused["code"]
    assert "not a checkpoint" in refused["pickle"]
    assert "not stored in full" in refused["expanded"]
    for name in ("claimed", "squared"):
        assert "claims 8589934588 bytes, but has a record of 280004 bytes" in refused[name]
    assert "more than the file holds" in refused["large"]
    assert "is compressed" in refused["compressed"]
    assert "is compressed" in refused["bomb"]
    assert "a key that is a tuple" in refused["key"]
    assert "a key that is a tuple" in refused["deep"]
    for name in ("doubled_attributes", "deep_attributes"):
        assert "sets attributes of a dictionary from a tuple" in refused[name]
    for name in ("doubled_storage", "deep_storage"):
        assert "a storage that is named by a tuple" in refused[name]
    assert "ends with 400000 values" in refused["marks"]
    for name in ("dirs", "dirs_pickle", "comment", "trailing", "locator", "offset64", "count64"):
        assert "its directory is not where torch.save writes it" in refused[name], refused[name]
    assert "of 4 bytes" in refused["short"]
    assert "storage 'lost' claims 4 bytes, but has no record" in refused["unsaved"]
    assert "builtins.bytearray" in refused["bytes"]
    assert "two of its entries" in refused["twice"]
    assert "no such file" in refused["device"]
    assert "no such file" in refused["pipe"]
    peak = int(done.stdout.rsplit("peak ", 1)[1])
    assert peak < 64, f"{peak} MB"
