"""The view of a node fits the terminal it is on."""

import io

import pytest
from rich.console import Console

from ftis_node.cli.local import HINT
from ftis_node.observe.answers import Peers, read
from ftis_node.observe.live import node_view
from tests.support.statuses import TRAINING, answered, peer

STATUS = TRAINING | {
    "name": "a",
    "reason": "Training with 12 peers, all over connections that this node opened: nobody can dial it.",
    "advice": "If it is out of memory, give it less to do: --vram, or --set micro_batch_tokens=…; else look into it.",
    "curve": [[step, step / 100] for step in range(90)],
}
PEERS = [peer(id=f"{number:08d}", used=number) for number in range(12)]
NAMES = {"00000011": "Nadia of the far hills", "00000010": "12D3KooW"}
LINES = [f"2026-11-22 12:00:0{number},000 INFO line {number} " + "x" * 90 for number in range(6)]


def seen(height, width=80, **changed):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    peers = read({"peers": PEERS, "names": NAMES}, Peers)
    console.print(node_view(answered(**STATUS | changed), peers, LINES, HINT, height=height))
    return file.getvalue().splitlines()


@pytest.mark.parametrize("height", [20, 24, 30, 36, 40, 41, 60])
def test_a_view_is_no_taller_and_no_wider_than_its_terminal(height):
    lines = seen(height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= 80
    assert "ONLINE" in lines[1], "what the node does is there in any case"


def test_on_24_rows_the_figures_and_some_peers_are_seen():
    text = "\n".join(seen(24))
    for there in ("out of memory", "groups", "traffic", "Nadia of the fa…", "line 5"):
        assert there in text, text
    wide = "\n".join(seen(60, 300))
    assert "(last 8 steps); the last:" in wide and "(last step)" in wide, "of which steps a figure is"
    assert sum("▄" in line or "█" in line for line in text.splitlines()) == 1, "a curve is one line"


def test_a_tall_terminal_shows_everything_and_so_does_a_view_that_is_printed_once():
    for text in ("\n".join(seen(60)), "\n".join(seen(None))):
        assert all(f"line {number}" in text for number in range(6))
        assert "and 4 more" in text
        assert "…00000010" in text


@pytest.mark.parametrize(
    ("generator", "words"),
    [
        ({"away": None, "mismatch": 0.002}, "vLLM; 0.002 nats off"),
        ({"away": "refused", "mismatch": None}, "itself, vLLM is away"),
        (None, None),
    ],
)
def test_who_samples_is_told_where_there_is_a_server(generator, words):
    text = "\n".join(seen(60, 140, last_step=STATUS["last_step"] | {"generator": generator}))
    assert words in text if words else "sampler" not in text


def test_it_says_how_the_weights_are_held():
    plan = {
        "memory_bytes": 1,
        "budget": 2,
        "fits": True,
        "dtype": "bfloat16",
        "quantisation": "nf4",
    }
    assert "tiny-a (full, bfloat16, NF4)" in seen(60, plan=plan)[0]
