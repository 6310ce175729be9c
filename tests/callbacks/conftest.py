import os

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o size=1m tmpfs {folder} 2>/dev/null"):
        pytest.skip("mounting a small tmpfs needs privileges")
    yield folder
    os.system(f"umount {folder}")
