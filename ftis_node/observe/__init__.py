"""Looking at a node: its local API, its metrics, and how they are drawn."""
