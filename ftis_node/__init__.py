"""ftis-node: different language models learn from one another, peer to peer (F-TIS, arXiv 2605.22537)."""

from ftis_node.host.allocator import expand_segments
from ftis_node.host.quiet import be_quiet

__version__ = "0.1.0"

be_quiet()
expand_segments()
