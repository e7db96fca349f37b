"""Generated copies of ImageNet, small and in every layout, and how much is read of what is broken."""

import shutil

import pytest

from parapos.data.synthetic import LAYOUTS, write_imagenet


@pytest.fixture(params=[pytest.param(1, id="sample"), pytest.param(10, id="all", marks=pytest.mark.full)])
def tenths(request):
    """How many tenths of the broken files that a test knows it reads."""
    return request.param


@pytest.fixture(scope="session")
def imagenets(tmp_path_factory):
    """The same images in every layout: 12 classes, 20 training and 2 test images each. Tests must not change them."""
    root = tmp_path_factory.mktemp("imagenet")
    for layout in LAYOUTS:
        write_imagenet(root / layout, classes=12, train=20, test=2, layout=layout, size=(24, 20))
    return root


@pytest.fixture
def copied(imagenets, tmp_path):
    """A copy of the official layout that a test may break."""
    shutil.copytree(imagenets / "json", tmp_path / "copy")
    return tmp_path / "copy"
