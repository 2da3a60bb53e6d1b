"""The machine under a node: its clock, open files and signals, and libraries that would report to their makers."""
