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
DEEP = b"K\x01" + b"\x85" * 1_000_000  # a tuple in a tuple in a tuple
ORDERED = b"ccollections\nOrderedDict\n)R"


def text(letters):
    return b"X" + len(letters).to_bytes(4, "little") + letters.encode()


def storage(key, numel=b"K\x01", kind=b"FloatStorage", location=b"X\x03\0\0\0cpu"):
    """The instructions for a storage; `key`, `numel` and `location` are instructions too."""
    return b"(" + text("storage") + b"ctorch\n" + kind + b"\n" + key + location + numel + b"tQ"


HOSTILE = {
    "bytearray": (b"cbuiltins\nbytearray\n" + TERABYTE + b"\x85R.", r"it names builtins\.bytearray"),
    "tensor": (b"ctorch\nTensor\n" + TERABYTE + b"\x85R.", r"it names torch\.Tensor"),
    "set": (b"cbuiltins\nset\n" + DOUBLED + b"\x85\x85R.", r"it names builtins\.set"),
    "command": (b"cposix\nsystem\nX\x02\0\0\0ls\x85R.", r"it names posix\.system"),
    "module in a name": (b"ctorch.storage\nos.system\n.", r"it names torch\.storage\.os\.system"),
    "doubled key": (b"}" + DOUBLED + b"K\x01s.", "a key that is a tuple"),
    "doubled keys": (b"}(" + DOUBLED + b"K\x01u.", "a key that is a tuple"),
    "deep key": (b"}" + DEEP + b"K\x01s.", "a key that is a tuple"),
    "key from the memo": (b"}" + DOUBLED + b"q\xffh\xffK\x01s.", "a key that is a tuple"),
    "items by a call": (b"ccollections\nOrderedDict\n" + DOUBLED + b"\x85R.", "it calls collections OrderedDict with"),
    "call of a value": (b"K\x01)R.", "it calls number"),
    "call of storage": (b"ctorch\nFloatStorage\n" + TERABYTE + b"\x85R.", "it calls torch FloatStorage"),
    "doubled attributes": (ORDERED + DOUBLED + b"K\x01\x86\x85b.", "sets attributes of a dictionary from a tuple"),
    "deep attributes": (ORDERED + DEEP + b"K\x01\x86\x85b.", "sets attributes of a dictionary from a tuple"),
    "attributes of a storage": (storage(text("0")) + b"}b.", "sets attributes of a value from a dictionary"),
    "doubled storage": (storage(DOUBLED) + b".", "a storage that is named by a tuple"),
    "deep storage": (storage(DEEP) + b".", "a storage that is named by a tuple"),
    "doubled location": (storage(text("0"), location=DOUBLED) + b".", "a storage that is named by a tuple"),
    "long storage": (storage(text("0"), numel=DOUBLED) + b".", "a storage that is named by a tuple"),
    "storage by its text": (text("0") + b"Q.", "a storage that is named by a text"),
    "storage of two sizes": (b"}" + storage(text("0")) + storage(text("0"), b"K\x02"), "storage '0' has two sizes"),
    "storage of two types": (storage(text("0")) + storage(text("0"), kind=b"IntStorage"), "storage '0' has two sizes"),
    "unknown storage": (b"ctorch\nQUInt8Storage\n.", r"it names torch\.QUInt8Storage"),
    "item of a value": (b"K\x01" + text("a") + b"K\x01s.", "sets items of a number"),
    "marks": (b")" * 200_000 + b"(t" * 200_000 + b".", "ends with 400000 values"),
    "number alone": (b"K\x01.", "ends with a number"),
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


def test_the_bytes_of_storages_are_counted():
    x = torch.zeros(70_000, 2)
    state = {"a": x, "b": x[5:], "c": x.half(), "d": torch.zeros(0, 3), "e": torch.zeros(3, dtype=torch.long)}
    assert pickles.check(saved(state)) == {"0": 560_000, "1": 280_000, "2": 0, "3": 24}
