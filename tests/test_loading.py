"""What a process imports is walked by no garbage collection, during the import or after it."""

import gc
import subprocess
import sys

import pytest

from ftis_node.host.loading import loading


def test_garbage_is_collected_again_also_after_an_import_that_fails():
    with pytest.raises(ImportError), loading():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_what_is_imported_is_walked_no_more():
    code = """
import gc
from ftis_node.host.loading import loading
before = gc.get_stats()
with loading():
    import xml.dom.minidom
    kept = [[] for _ in range(10_000)]
assert gc.get_stats() == before, "a collection during the import"
assert gc.get_freeze_count() > 10_000 and len(gc.get_objects()) < 10_000
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
