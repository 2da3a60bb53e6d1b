"""What a GGUF file says of itself. It may be a stranger's: each count and length is checked before it is believed."""

import math
import mmap
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

MAGIC = b"GGUF"
FIELDS_MAX = 1 << 12
TENSORS_MAX = 1 << 16
ITEMS_MAX = 1 << 21  # of one array: the largest vocabulary with its merges has a quarter of it
TEXT_MAX = 1 << 20  # bytes of one text: a chat template
NAME_MAX = 256
HEADER_MAX = 1 << 27  # bytes before the tensors
DIMENSIONS_MAX = 4
_ALIGNMENT = 32
_ALIGNMENT_MAX = 1 << 16
_TEXT = 8
_LIST = 9
# A kind of value → its form, as `struct` names it.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


class UnusableFile(ValueError):
    """The bytes are no sound GGUF file, or hold a model that is not read here; the message says what is wrong.

    It is a part of a sentence about the file, such as "it is empty": others put words in front. If it has the word
    "tokenizer", `gguf.__main__` advises to name another one.
    """


Bytes = bytes | mmap.mmap
"""Of a file, which may be mapped."""


@dataclass(frozen=True)
class Stored:
    """A tensor in the file.

    Attributes:
        shape: slowest dimension first, as torch has it. kind: the number of its quantisation, see `folder.kind_of`.
        start, size: the place of its bytes in the file, from its beginning.
    """

    shape: tuple[int, ...]
    kind: int
    start: int
    size: int

    @property
    def elements(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


class _Row(NamedTuple):
    """What the header says of a tensor. shape: as in `Stored`; offset: from where the tensors begin."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """facts: values by key; of a list that was not asked for, its length. tensors: by name, in the file's order.

    kinds: the numbers of the facts' kinds, as the format has them; for an export that writes the facts again.
    """

    facts: dict[str, Any]
    tensors: dict[str, Stored]
    kinds: dict[str, int] = field(default_factory=dict)

    def fact(self, key: str, otherwise: Any = None) -> Any:
        """A value of the file's own architecture, with whose name its key begins in the file: here it is left out.

        It is of any type, for a stranger may have written it.
        """
        return self.facts.get(f"{self.facts.get('general.architecture')}.{key}", otherwise)


def read_header(data: Bytes, blocks: dict[int, tuple[int, int]], lists: Collection[str]) -> GgufHeader:
    """The facts and the places of all tensors; no tensor is read, and nothing of `data` is kept.

    Args:
        data: the whole file.
        blocks: of each known quantisation the elements and the bytes of a block.
        lists: keys whose lists are wanted.

    Raises:
        UnusableFile: it is damaged, not whole, or lies about its sizes.
    """
    reader = _Reader(data)
    if reader.take(4) != MAGIC:
        raise UnusableFile("it does not begin with GGUF")
    version = reader.number("I")
    if version & 0xFFFF == 0:
        raise UnusableFile("its numbers are in the order of another kind of machine (big endian)")
    if version not in (2, 3):
        raise UnusableFile(f"it is of version {version}, and 2 and 3 are read")
    tensors = reader.count(TENSORS_MAX, 24, "tensors")  # of no fewer bytes each
    fields = reader.count(FIELDS_MAX, 13, "fields")
    facts: dict[str, Any] = {}
    kinds = {}
    for _ in range(fields):
        key = reader.text(NAME_MAX)
        if key in facts:
            raise UnusableFile(f"it has {key!a} twice")
        kinds[key] = reader.number("I")
        facts[key] = reader.value(kinds[key], wanted=key in lists)
    if not isinstance(facts.get("general.architecture"), str):
        raise UnusableFile("it does not say which architecture it is of")
    rows = [reader.tensor() for _ in range(tensors)]
    alignment = facts.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= _ALIGNMENT_MAX or alignment & (alignment - 1):
        raise UnusableFile("its alignment is no power of two")
    begin = -(-reader.place // alignment) * alignment
    return GgufHeader(facts, dict(_placed(rows, begin, len(data), blocks)), kinds)


def _placed(
    rows: list[_Row],
    begin: int,
    end: int,
    blocks: dict[int, tuple[int, int]],
) -> Iterator[tuple[str, Stored]]:
    """Tensors that lie in the file, and none over another: so together they are no larger than the file.

    Take all of them before any is believed: whether one lies over another is checked after the last.

    Args:
        begin, end: bytes of the file before its tensors, and in all.

    Raises:
        UnusableFile: one does not.
    """
    names = set()
    spans = []
    for name, shape, kind, offset in rows:
        if name in names:
            raise UnusableFile(f"it has the tensor {name!a} twice")
        names.add(name)
        if kind not in blocks:
            raise UnusableFile(f"the tensor {name!a} is of an unknown quantisation ({kind})")
        elements, size = blocks[kind]
        if shape[-1] % elements:
            raise UnusableFile(f"rows of the tensor {name!a} are no whole blocks")
        whole = math.prod(shape) // elements * size
        start = begin + offset
        if start + whole > end:
            raise UnusableFile(f"the tensor {name!a} goes beyond its end: it is not whole")
        spans.append((start, start + whole, name))
        yield name, Stored(shape, kind, start, whole)
    spans.sort()
    for before, after in pairwise(spans):
        if after[0] < before[1]:
            raise UnusableFile(f"the tensors {before[2]!a} and {after[2]!a} lie over one another")


class _Reader:
    """Reads one value after the other, and never beyond the end. All methods go on at `place`, a byte of the file.

    All raise UnusableFile where what is there is not what they should read.
    """

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.place = 0
        self.end = min(len(data), HEADER_MAX)

    def take(self, size: int) -> bytes:
        """The next so many bytes."""
        if size > self.end - self.place:
            raise UnusableFile("it ends in the middle of its header, or that is too long")
        self.place += size
        return self.data[self.place - size : self.place]

    def number(self, form: str) -> Any:
        """The next number of this form of `struct`, little-endian."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def count(self, most: int, each: int, of: str) -> int:
        """A count of things, of which at most so many are believed, and of which each takes so many bytes at least.

        of: their name, for the message.
        """
        found = int(self.number("Q"))
        if found > most or found * each > self.end - self.place:
            raise UnusableFile(f"it claims {found} {of}, more than it can hold")
        return found

    def text(self, most: int = TEXT_MAX) -> str:
        """The next text, of so many bytes at most."""
        size = int(self.number("Q"))
        if size > most:
            raise UnusableFile(f"it has a text of {size} bytes")
        try:
            return self.take(size).decode()
        except UnicodeDecodeError:
            raise UnusableFile("one of its texts is no UTF-8") from None

    def value(self, kind: int, *, wanted: bool) -> Any:
        """The next value of this kind; of a list that is not wanted, its length. There are no lists in lists."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            raise UnusableFile(f"it has a value of an unknown kind ({kind})")
        kind = self.number("I")
        if kind == _TEXT:
            count = self.count(ITEMS_MAX, 8, "texts in a list")
            texts = (self.text() for _ in range(count))
            if wanted:
                return list(texts)
            return sum(1 for _ in texts)
        if kind not in _SCALARS:
            raise UnusableFile(f"it has a list of an unknown kind ({kind})")
        form = _SCALARS[kind]
        count = self.count(ITEMS_MAX, struct.calcsize(form), "numbers in a list")
        packed = self.take(count * struct.calcsize(f"<{form}"))
        if wanted:
            return list(struct.unpack(f"<{count}{form}", packed))
        return count

    def tensor(self) -> _Row:
        """What comes next, of one tensor."""
        name = self.text(NAME_MAX)
        count = self.number("I")
        if not 1 <= count <= DIMENSIONS_MAX:
            raise UnusableFile(f"the tensor {name!a} has {count} dimensions")
        shape = tuple(int(self.number("Q")) for _ in range(count))[::-1]
        if min(shape) < 1 or math.prod(shape) > 16 * len(self.data):  # no quantisation has more in a byte
            raise UnusableFile(f"the tensor {name!a} is larger than the file")
        return _Row(name, shape, self.number("I"), self.number("Q"))
