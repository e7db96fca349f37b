"""Pickles of checkpoints, read as text before anything is made of them."""

import io
import pickle
import zipfile

import pytest
import torch
from torch import nn

from parapos.interop import pickles

TERABYTE = b"\x8a\x06" + (1 << 40).to_bytes(6, "little")
DOUBLED = b"K\x01K\x01\x86" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(60))  # 2 ** 60 numbers to hash
HOSTILE = {
    "bytearray": (b"cbuiltins\nbytearray\n" + TERABYTE + b"\x85R.", r"it names builtins\.bytearray"),
    "tensor": (b"ctorch\nTensor\n" + TERABYTE + b"\x85R.", r"it names torch\.Tensor"),
    "set": (b"cbuiltins\nset\n" + DOUBLED + b"\x85\x85R.", r"it names builtins\.set"),
    "command": (b"cposix\nsystem\nX\x02\0\0\0ls\x85R.", r"it names posix\.system"),
    "module in a name": (b"ctorch.storage\nos.system\n.", r"it names torch\.storage\.os\.system"),
    "doubled key": (b"}" + DOUBLED + b"K\x01s.", "a key that is a tuple"),
    "doubled keys": (b"}(" + DOUBLED + b"K\x01u.", "a key that is a tuple"),
    "deep key": (b"}K\x01" + b"\x85" * 1_000_000 + b"K\x01s.", "a key that is a tuple"),
    "key from the memo": (b"}" + DOUBLED + b"q\xffh\xffK\x01s.", "a key that is a tuple"),
    "items by a call": (b"ccollections\nOrderedDict\n" + DOUBLED + b"\x85R.", "it calls collections OrderedDict with"),
    "call of a value": (b"K\x01)R.", "it calls value"),
    "call of storage": (b"ctorch\nFloatStorage\n" + TERABYTE + b"\x85R.", "it calls torch FloatStorage"),
    "new object": (b"ccollections\nOrderedDict\n)\x81.", "the instruction NEWOBJ"),
    "list": (b"].", "the instruction EMPTY_LIST"),
    "name from the stack": (b"X\x02\0\0\0osX\x06\0\0\0system\x93.", "the instruction STACK_GLOBAL"),
    "long name": (b"}X\x01\x02\0\0" + b"x" * 513 + b"K\x01s.", "a name has 513 letters"),
    "claimed text": (b"}X\xff\xff\xff\x7fabc.", "is broken"),
    "no end": (b"}", "is broken"),
    "empty stack": (b"R.", "is broken"),
    "unknown memo": (b"h\x07.", "is broken"),
    "no mark": (b"}K\x01u.", "is broken"),
    "large": (b"N" * (pickles.LARGEST + 1), "bytes, expected at most"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_dictionary_of_tensors_is_refused(name):
    data, message = HOSTILE[name]
    with pytest.raises(pickles.PickleError, match=message):
        pickles.check(b"\x80\x02" + data)


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    with zipfile.ZipFile(file) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def test_what_torch_saves_passes():
    net = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Linear(4, 5))
    pickles.check(saved(net.state_dict()))  # ordered, with versions of its modules
    pickles.check(saved(dict(net.named_parameters())))
    x = torch.zeros(70_000, 2)
    kinds = (torch.float64, torch.bfloat16, torch.float16, torch.int64)
    pickles.check(saved({"a": x, "b": x, "c": x[5:], **{f"k{n}": x.to(kind) for n, kind in enumerate(kinds)}}))
    pickles.check(saved({f"layer.{n}": torch.zeros(1) for n in range(1000)}))  # more than 256 entries of the memo
    with pytest.raises(pickles.PickleError, match=r"it names|instruction"):
        pickles.check(saved({"a": x, "b": [1, 2]}))
    with pytest.raises(pickles.PickleError, match="instruction"):
        pickles.check(pickle.dumps({"a": 1.5}, protocol=2))
