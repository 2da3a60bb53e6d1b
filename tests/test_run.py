"""A run is what its id says, and a run file tells a person what is wrong with it."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from ftis_node import packet
from ftis_node.cli.invitations import invitation_in
from ftis_node.config import run
from ftis_node.config.run import Run, RunFile, parse_run_file, run_file_from_json
from ftis_node.errors import UsageError
from ftis_node.store.home import Home
from ftis_node.text import in_toml

VECTORS = json.loads((Path(__file__).parent.parent / "proto" / "vectors" / "runs.json").read_text())
FIELDS = {
    "task": "gsm8k",
    "data": "17" * 32,
    "template": "Q: {question}\nA:",
    "reward": "gsm8k",
    "group": 12,
    "slots": 64,
    "prompt_tokens": 512,
    "completion_tokens": 256,
    "temperature": 1.0,
    "eos": (151643, 151645),
    "tokenizer": "ab" * 32,
    "vocabulary": 151665,
    "collaboration": "vertical",
}


def run_of(**changes):
    return Run(**FIELDS | changes)


TEXT = run.dump_run_file(RunFile(run=run_of()))


def complaint(text, read=parse_run_file):
    with pytest.raises(UsageError) as caught:
        read(text)
    assert caught.value.what.isprintable()
    assert caught.value.fix.isprintable()
    return caught.value


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_the_code_agrees_with_the_test_vectors(vector):
    parsed = parse_run_file(vector["toml"]).run
    canonical = vector["canonical_json"]
    assert parsed.canonical_json().decode() == canonical
    assert parsed.id.hex() == vector["run_id"]
    assert hashlib.sha256(canonical.encode()).hexdigest()[:32] == vector["run_id"]
    assert run_file_from_json(f'{{"run":{canonical}}}').run == parsed, "as a peer may send it"
    assert ("parts" in run.run_file_as_json(RunFile(run=parsed))) == ("parts" in canonical)


def test_hints_and_the_order_of_keys_do_not_change_the_id():
    head, *lines = TEXT.split("\n\n")[0].replace('"""\nQ: {question}\nA:"""', '"Q: {question}\\nA:"').splitlines()
    shuffled = "\n".join([head, *reversed(lines), "[hints]", 'name = "another"', 'bootstraps = ["/ip4/1.2.3.4"]'])
    parsed = parse_run_file(shuffled)
    assert parsed.hints.bootstraps == ("/ip4/1.2.3.4",)
    assert parsed.run.id == run_of().id


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("temperature = 1.0", "temperature = 1"),
        ("\n", "\r\n"),
    ],
    ids=repr,
)
def test_another_spelling_does_not_change_the_id(ours, theirs):
    assert parse_run_file(TEXT.replace(ours, theirs)).run.id == run_of().id


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@example(
    before='\x7f\t\r\n\\"""',
    after='\n"',
    temperature=0.01,
    name="\x00\x7f",
    bootstraps=["\n"],
)
@given(
    before=TEXTS,
    after=TEXTS,
    temperature=st.floats(run.TEMPERATURE_MIN, run.TEMPERATURE_MAX),
    name=TEXTS,
    bootstraps=st.lists(TEXTS, max_size=3),
)
def test_a_run_file_reads_back(before, after, temperature, name, bootstraps):
    template = before.replace("{question}", "") + "{question}" + after.replace("{question}", "")
    if template.count("{question}") != 1:
        return
    hints = run.Hints(name=name, bootstraps=tuple(bootstraps), contact=after)
    run_file = RunFile(run=run_of(template=template, temperature=temperature), hints=hints)
    for back in (
        parse_run_file(run.dump_run_file(run_file)),
        run_file_from_json(run.run_file_as_json(run_file)),
    ):
        assert back == run_file
        assert back.run.id == run_file.run.id


LARGEST = dict.fromkeys(("round", "slot", "policy_step"), 2**64 - 1)


def test_the_largest_packet_of_a_run_fits_its_bound():
    tokens = 70_000 // 8
    small = run_of(group=9, completion_tokens=tokens)
    largest = packet.Packet(
        run_id=small.id,
        author_digest=bytes(8),
        prompt_digest=bytes(8),
        **LARGEST,
        token_ids=np.zeros(9 * tokens, "u4"),
        logprobs=np.zeros(9 * tokens, "f4"),
        finished=(True,) * 9,
        lengths=(tokens,) * 9,
    )
    assert len(packet.encode(largest)) <= small.packet_bytes_max <= 160 + 8 * 9 * tokens


def test_a_run_whose_packets_would_be_too_large_is_refused():
    error = complaint(TEXT.replace("completion_tokens = 256", "completion_tokens = 43700"))
    assert "group × completion_tokens" in error.what
    run_of(completion_tokens=43600)


WRONG = {
    "packet": [2],
    "task": ["../x", "a\n", "\x1b[31m"],
    "data": ["17" * 31, "AB" * 32],
    "slots": [0],
    "template": ["no question", "{question} {question}", "{question}" + "x" * 20000],
    "tokenizer": ["qwen"],
    "group": [1, 257, True, "12", 12.0],
    "prompt_tokens": [0],
    "completion_tokens": [0],
    "vocabulary": [1],
    "temperature": [0.0, float("inf"), float("nan")],
    "collaboration": ["diagonal"],
    "eos": [[], [2, 1], [1, 1], [-1, 1], [151665], [True], [1.0]],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG.items() for value in values],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_value_is_refused_by_name(name, value):
    with pytest.raises(ValidationError):
        run_of(**{name: value})
    named = "{question}" if name == "template" and len(value) < 20000 else name
    line = f"{name} = {in_toml(value, lines=True)}".replace("True", "true")
    text = re.sub(rf'^{name} = (""".*?"""|[^\n]*)', lambda _: line, TEXT, flags=re.S | re.M)
    error = complaint(text)
    assert named in error.what
    assert error.exit_code == 2


def test_an_unknown_key_names_the_nearest_one_or_all_and_cannot_write_to_the_terminal():
    error = complaint(TEXT.replace("completion_tokens", "completion_token"))
    assert "'completion_token'" in error.what
    assert "`completion_tokens`" in error.fix
    for misspelt, right in (("[hint]", "[hints]"), ("bootstrap ", "bootstraps ")):
        error = complaint(TEXT.replace(right, misspelt))
        assert f"`{right.strip('[] ')}`" in error.fix
    assert "bootstraps, contact" in complaint(TEXT + 'zzz = "1"\n').fix
    assert "red" in complaint('[run]\n"\\u001b[31mred" = 1\n').what


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[run]\ntask = gsm8k\n", 2),
        ("[run]\n\ngroup 12\n", 3),
        ('[run]\ntask = "a"\ntemplate = """x\n', 4),
    ],
)
def test_broken_toml_names_its_line(text, line):
    assert f"Line {line} " in complaint(text).what


@example("[[run]]\n")
@example("x = " + "9" * 10000)
@given(st.text(max_size=200))
def test_any_text_is_a_run_file_or_a_usage_error(text):
    for candidate in (text, "[run]\n" + text, TEXT + text):
        try:
            parse_run_file(candidate)
        except UsageError:
            continue


def sent(**changes):
    """JSON of a run with these changes."""
    return json.dumps({"run": FIELDS | changes})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "Invalid JSON"),
        (TEXT, "Invalid JSON"),
        ("[]", "should be an object"),
        ("{}", "no [run] table"),
        ('{"run": 1}', "run is not a table"),
        (sent(group="12"), "group"),
        (sent(group=12.0), "group"),
        (sent(eos=[1.0]), "eos"),
        (sent(temperature=float("nan")), "temperature"),
        (sent(rewards="integer"), "rewards"),
        (sent(**{"\x1b[31mred": 1}), "unknown key"),
        ('{"run":' * 9_000, "recursion limit"),
        ("[" * 60_000, "recursion limit"),
        (sent(slots=1).replace('"slots": 1', '"slots": 1' + "0" * 60_000), "Invalid JSON"),
        (" " * run.RUN_FILE_CHARACTERS_MAX + sent(), "has over"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_a_peer_sends_is_refused_by_name_unless_it_is_a_run(text, named):
    assert named in complaint(text, run_file_from_json).what


def test_a_key_that_quotes_a_line_number_does_not_decide_which_line_is_named():
    for quoted in ("at line 77", "at line " + "9" * 5000, "(at line 77, column 1)"):
        assert "Line 2 of the run file" in complaint(f'["{quoted}"]\n["{quoted}"]\n').what


def test_a_run_file_that_peers_could_not_read_is_refused():
    backslashes = ", ".join("'" + "\\" * 400 + "'" for _ in range(64))
    template = "{question}" + "\\" * 16_000
    written = re.sub(r'template = """.*?"""', lambda _: f"template = '{template}'", TEXT, flags=re.DOTALL)
    written = written.replace("bootstraps = []", f"bootstraps = [{backslashes}]")
    assert len(written) < run.RUN_FILE_CHARACTERS_MAX
    assert "too long" in complaint(written).what


def test_row_63_of_an_endless_file_no_more_is_read_than_a_run_has():
    with pytest.raises(UsageError, match="has over"):
        run.load_run_file(Path("/dev/zero"))
    with pytest.raises(UsageError, match="begins with ftis:"):
        invitation_in("/dev/zero", Home(Path("/nowhere")))


BEYOND = [
    *(("temperature", value, {}) for value in (1e-300, 0.0099, 100.5, 1e300)),
    ("prompt_tokens", run.TOKENS_MAX + 1, {}),
    ("completion_tokens", run.TOKENS_MAX + 1, {"group": 2}),
    ("slots", run.SLOTS_MAX + 1, {}),
    ("eos", tuple(range(65)), {}),
    ("vocabulary", (1 << 32) + 1, {}),
    ("parts", 257, {"collaboration": "horizontal"}),
]


@pytest.mark.parametrize(("name", "value", "others"), BEYOND, ids=str)
def test_row_44_a_run_that_would_break_a_node_is_refused_by_name(name, value, others):
    change = {name: value, **others}
    lines = ["[run]"]
    for key, field in (FIELDS | change).items():
        if isinstance(field, tuple):
            field = list(field)
        lines.append(f"{key} = {in_toml(field, lines=True)}")
    by_file = complaint("\n".join(lines))
    by_peer = complaint(sent(**change), run_file_from_json)
    for error in (by_file, by_peer):
        assert f"`{name}`" in error.what
    with pytest.raises(UsageError, match=name):
        run.make_run(**FIELDS | change)  # what `run new` makes


def test_row_44_a_run_at_its_bounds_is_one():
    for temperature in (run.TEMPERATURE_MIN, run.TEMPERATURE_MAX):
        bounds = {
            "temperature": temperature,
            "slots": run.SLOTS_MAX,
            "prompt_tokens": run.TOKENS_MAX,
        }
        run.make_run(**FIELDS | bounds)


# --- runs for models of any tokenizer ---------------------------------------------------------------------------------

OF_TOKENS = {"prompt_tokens", "eos", "vocabulary"}
TEXT_FIELDS = {key: value for key, value in FIELDS.items() if key not in OF_TOKENS}
TEXT_FIELDS |= {
    "packet": 2,
    "tokenizer": "any",
    "prompt_bytes": 2560,
    "completion_bytes": 1280,
}


def test_a_text_run_has_no_field_of_a_token_run_and_the_other_way_round():
    text = Run(**TEXT_FIELDS)
    tokens = run_of()
    assert text.text
    assert not tokens.text
    of_text, of_tokens = (set(json.loads(one.canonical_json())) for one in (text, tokens))
    assert of_text - of_tokens == {"prompt_bytes", "completion_bytes", "logprob_min"}
    assert of_tokens - of_text == OF_TOKENS
    file = RunFile(run=text)
    assert parse_run_file(run.dump_run_file(file)) == file
    assert run_file_from_json(run.run_file_as_json(file)) == file
    assert "for models of any tokenizer" in run.in_short(text)
    assert "one tokenizer" in run.in_short(tokens)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (TEXT_FIELDS | {"prompt_tokens": 5}, "prompt_tokens does not belong in a run of any tokenizer"),
        (FIELDS | {"prompt_bytes": 5}, "prompt_bytes does not belong in a run of one tokenizer"),
        (FIELDS | {"tokenizer": "xyz"}, "any"),
        (FIELDS | {"logprob_min": -32.0}, "logprob_min does not belong in a run of one tokenizer"),
        ({k: v for k, v in TEXT_FIELDS.items() if k != "completion_bytes"}, "completion_bytes is missing"),
        ({k: v for k, v in FIELDS.items() if k != "eos"}, "eos is missing: a run of one tokenizer needs it"),
        (TEXT_FIELDS | {"tokenizer": "0" * 64}, 'packet is 2 exactly if tokenizer is "any"'),
        (FIELDS | {"packet": 2}, 'packet is 2 exactly if tokenizer is "any"'),
        (TEXT_FIELDS | {"group": 12, "collaboration": "horizontal", "parts": 2}, "or of several turns, is vertical"),
        (FIELDS | {"packet": 3}, "packet is 3 exactly if a run has 2 turns or more"),
        (FIELDS | {"turns": 2}, "packet is 3 exactly if a run has 2 turns or more"),
        (FIELDS | {"packet": 3, "turns": 2, "collaboration": "horizontal", "parts": 2}, "several turns, is vertical"),
        (TEXT_FIELDS | {"logprob_min": 0.0}, "logprob_min"),
        (TEXT_FIELDS | {"completion_bytes": 1 << 20, "completion_tokens": 1 << 17}, "makes packets of up to"),
    ],
)
def test_fields_of_the_wrong_kind_are_named(fields, said):
    with pytest.raises(ValidationError, match=said):
        Run(**fields)


def test_the_largest_packet_of_a_text_run_fits_its_bound():
    text = Run(**TEXT_FIELDS | {"group": 9, "completion_tokens": 300, "completion_bytes": 1000})
    pieces = np.full(300, 3, np.uint8)
    pieces[-1] = 255
    one = packet.TextCompletion(bytes(int(pieces.sum())), pieces, np.zeros(300, np.float32), 0.0)
    made = packet.pack_text_group(
        run_id=text.id,
        author=bytes(38),
        prompt="",
        completions=[one] * 9,
        **LARGEST,
    )
    assert len(packet.encode(made)) <= text.packet_bytes_max
