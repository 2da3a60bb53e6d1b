"""A safetensors file, written tensor by tensor: at no time is there a copy of all of them.

The format is that of github.com/huggingface/safetensors, "Format". It has the header's length in 8 bytes, a header in
JSON, then the tensors' bytes, little-endian, in the header's order. Its own library needs all in main memory.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ftis_node.errors import FtisError

_PART = 1 << 24  # elements that are copied from a GPU at a time
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors of any device by their names.

    Raises:
        FtisError: a tensor has a dtype that is not known here; it is named.
        OSError: the file cannot be written.
    """
    # Wide elements first, as the format's own library does: then each tensor begins at a multiple of their size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise FtisError(f"The tensor {name} is of {tensor.dtype}, which no checkpoint can hold.")
        begin = end
        end += tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.unlink(missing_ok=True)  # tensors that were read from it look at the old file still
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            for part in _parts(tensors[name]):
                file.write(part)


def _parts(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, so many elements at a time, as they lie in main memory."""
    flat = tensor.detach().reshape(-1)
    for begin in range(0, len(flat), _PART):
        yield flat[begin : begin + _PART].to("cpu").view(torch.uint8).numpy().data
