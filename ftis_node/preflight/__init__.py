"""Preflight: one list of checks (`checks.CHECKS`) before a start. Nothing here changes the home or keeps a port.

Three commands are views of the list. `join` makes the checks that need neither PyTorch nor libp2p, and refuses to start
with every error at once. `join --dry-run` goes on with the heavy ones and prints a report (`report`). `doctor` also
checks the machine and the network, and prints each finding as soon as it is known (`case`).

A check takes the `Case`: what a person gave, and what earlier checks found out. It yields findings for the doctor, and
yields or raises `UserError` for a reason not to start. The checks are in `checks` (run, task, addresses), `place`
(home, disk, ports), `machine` (Python, torch, GPU), `models` (hub, memory, tokenizer) and `net` (peers). To add one,
write it there and name it in `checks.CHECKS`. `bugreport` packs all findings into a file, cleaned by `redaction`.
"""
