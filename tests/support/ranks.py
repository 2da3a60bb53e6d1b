"""``python -m tests.support.ranks FD``: a compute process whose second rank fails in its first backward pass.

FTIS_TEST_FAILS says how: `memory`, or anything else.
"""

import os
from typing import Any

import torch

from ftis_node.learner import Learner
from ftis_node.worker.__main__ import main
from ftis_node.worker.client import Worker

_backward = Learner._backward
_failed: list[bool] = []


def _failing(self: Learner, *given: Any) -> Any:
    if self._team.rank and not _failed:
        _failed.append(True)
        memory = os.environ["FTIS_TEST_FAILS"] == "memory"
        raise torch.OutOfMemoryError("CUDA out of memory.") if memory else RuntimeError("a broken card")
    return _backward(self, *given)


if __name__ == "__main__":
    Worker.MODULE = "tests.support.ranks"
    Learner._backward = _failing
    main()
