"""``python -m ftis_node``: the same as ``ftis-node``."""

from ftis_node.cli import main

main()
