"""Export of a checkpoint as a folder that plain transformers, or plain peft, can load."""

from __future__ import annotations

from ftis_node.export.model import SHARD_BYTES, export

__all__ = ["SHARD_BYTES", "export"]
