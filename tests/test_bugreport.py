"""`ftis-node bugreport` packs what helps, and no secret, wherever one was left lying about."""

import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable

import pytest
from huggingface_hub import constants

from ftis_node.config.run import Hints, RunFile, dump_run_file
from ftis_node.preflight.redaction import Redactor
from ftis_node.store.home import Home
from ftis_node.swarm.identity import Identity
from tests.support.begun import begun
from tests.support.swarm import RUN

KEY = b"\x5a" * 32
PEER = Identity(b"\3" * 32).peer_id
PLACE = f"/ip4/203.0.113.77/tcp/4001/p2p/{PEER}"
LEFT = "hf_AbCdEfGhIjKlMnOpQrStUv pa55w0rd-in-a-url sesame-open-sesame page-token-0123456789 bearer-of-bad-news "
LEFT += "weights-of-the-model state-of-the-optimiser body-of-a-packet not-ours-to-tell"
SECRETS = {*LEFT.split(), KEY.hex()}
Report = Callable[..., tuple[dict[str, str], str]]


@pytest.fixture
def home(tmp_path, monkeypatch) -> Home:
    """A home below a person's own, with secrets in all kinds of places."""
    monkeypatch.setenv("HOME", str(tmp_path / "person"))
    place = Home(tmp_path / "person" / "node")
    Identity(KEY).keep(place.key)
    (place.path / "page.token").write_text("page-token-0123456789\n")
    place.store.write_text("body-of-a-packet")
    place.run_file.write_text(dump_run_file(RunFile(run=RUN, hints=Hints(bootstraps=(PLACE,)))))
    left = {"trainable": "weights-of-the-model", "optimiser": "state-of-the-optimiser"}
    begun(place.path, 3, "tiny-a", "full", **left)
    place.log.write_text(
        f"Going on from step 3 in {place.path}\n"
        f"dialled {PLACE} and [2001:db8::77]:4001 and /dns4/node.somebody.example/tcp/1 and 198.51.100.9:80\n"
        "GET https://me:pa55w0rd-in-a-url@hub.example/model?token=sesame-open-sesame\n"
        "HF_TOKEN=hf_AbCdEfGhIjKlMnOpQrStUv; Authorization: Bearer bearer-of-bad-news\n"
        f"seed {KEY.hex()} and page-token-0123456789; completion_tokens=16 at 07:22:31 on 127.0.0.1\n"
    )
    place.metrics.write_text(json.dumps({"event": "step", "password": "sesame-open-sesame", "tokens": 812}) + "\n")
    monkeypatch.setenv("FTIS_HUB_PASSWORD", "sesame-open-sesame")
    monkeypatch.setenv("FTIS_WAIT", "3")
    monkeypatch.setenv("SOMETHING_ELSE", "not-ours-to-tell")
    monkeypatch.setenv("HF_TOKEN", "hf_AbCdEfGhIjKlMnOpQrStUv")
    monkeypatch.setattr(constants, "ENDPOINT", "http://me:pa55w0rd-in-a-url@127.0.0.1:9")
    return place


@pytest.fixture
def report(cli, home, tmp_path) -> Report:
    """Reports on the home in this process: the files that were packed, and stdout."""

    def make(*flags):
        code, told, err = cli("bugreport", "--home", home.path, "--out", tmp_path / "r.tar.gz", *flags)
        assert code == 0, err
        assert re.search(r"^ok +\w.*: .", err, re.MULTILINE)  # each finding with what was found
        return contents(tmp_path / "r.tar.gz"), told

    return make


def contents(path):
    found = {}
    with tarfile.open(path) as archive:
        for one in archive.getmembers():
            file = archive.extractfile(one)
            found[one.name.partition("/")[2]] = file.read().decode()
    return found


def test_what_helps_is_there_and_no_secret_is(report, tmp_path):
    packed, told = report()
    assert "Look through it before you send it" in told
    assert "node.log" in told
    assert (tmp_path / "r.tar.gz").stat().st_mode & 0o777 == 0o600
    assert packed.keys() == {
        "facts.json",
        "doctor.json",
        "settings.json",
        "environment.json",
        "run.toml",
        "node.log",
        "metrics.jsonl",
        "checkpoints.json",
        "home.txt",
    }
    everything = "\n".join(packed.values()) + told
    for secret in SECRETS:
        assert secret not in everything, secret
    for known in (PEER, "203.0.113.77", "2001:db8::77", "somebody.example", "198.51.100.9", str(tmp_path / "person")):
        assert known not in everything, known
    assert "~/node" in packed["node.log"]
    for stays in ("07:22:31", "127.0.0.1", "completion_tokens=16"):
        assert stays in packed["node.log"], stays
    assert json.loads(packed["settings.json"])["wait"] == {"value": 10.0, "origin": "default"}
    assert "FTIS_HUB_PASSWORD is no setting" in packed["doctor.json"], "so the settings are not what they should be"
    assert json.loads(packed["environment.json"])["FTIS_WAIT"] == "3"
    assert json.loads(packed["checkpoints.json"])["step-00000003"]["facts"]["progress"]["step"] == 3
    assert {one["subject"] for one in json.loads(packed["doctor.json"])} >= {"python", "home", "tokenizer"}
    assert json.loads(packed["facts.json"])["versions"]["torch"]
    assert json.loads(packed["metrics.jsonl"])["tokens"] == 812
    assert RUN.tokenizer in packed["run.toml"]


def test_addresses_are_left_where_that_is_wanted(report):
    packed, told = report("--with-addresses", "--json")
    assert json.loads(told)["packed"].keys() == packed.keys()
    everything = "\n".join(packed.values())
    assert PLACE in everything
    assert not any(secret in everything for secret in SECRETS)


def test_one_address_has_one_name_in_all_reports_of_a_home_and_another_elsewhere():
    text = f"{PLACE} {PLACE}/p2p-circuit/p2p/{PEER} 203.0.113.77"
    one = Redactor(b"a").clean(text)
    again = Redactor(b"a").clean(text)
    other = Redactor(b"b").clean(text)
    assert one == again != other
    names = [word for word in one.replace("/", " ").split() if word.startswith(("addr-", "peer-"))]
    assert len(names) == 6
    assert len(set(names)) == 2


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-22 07:22:31,456 INFO Step 7: pass@1 0.500",
        "torch 2.13.0+cpu 1.2.3",
        "tokens: 12, token_ids",
        "std::vector",
        "tokenizer = abc, token_ids: [1, 2], completion_tokens=16",
        'File "ftis_node/node/daemon.py:45", settings.toml:3',
        "https://huggingface.co/Qwen/Qwen2.5-3B",
        "global-attention-is-all-you-need glm-4-9b-chat-instruct sk-learn npm_config",
        "pass@1 0.5, x@y, a1b2c3d4 0123-4567 12:34:56 1.2.3 x.y.z",
    ],
)
def test_what_only_looks_like_a_secret_stays(text):
    assert Redactor(b"a").clean(text) == text


@pytest.mark.parametrize(
    ("text", "secrets"),
    [
        (r'{"message": "sent {\"token\": \"abc\"}"}', ("abc",)),
        (r'{"message": "sent {\"token\": \"ab\\\"c d\"} and"}', ("ab", "c d")),
        (r'{"message": "sent {\\\"password\\\": \\\"abc def\\\"}"}', ("abc", "def")),
        (rf"all:\n{PEER}", (PEER,)),
        (r"all:\n192.0.2.7", ("192.0.2.7",)),
        (r"all:\r\n2001:db8::77", ("2001:db8",)),
        (r"all:\thf_AbCdEfGhIjKlMnOpQrStUv", ("AbCd",)),
        (r"all:\nHF_TOKEN=sesame", ("sesame",)),
        (r"all:\nBearer sesame-open", ("sesame",)),
        ('password: "open sesame, please"', ("open", "sesame", "please")),
        ("secret='open sesame'", ("open", "sesame")),
        ("AWS_SECRET_ACCESS_KEY=sesame", ("sesame",)),
        ("SECRET_KEY=sesame", ("sesame",)),
        ("A_VERY_LONG_NAME_OF_A_SETTING_FOR_SOMEBODYS_TOKEN_FOR_READING=sesame", ("sesame",)),
        ("passphrase: sesame", ("sesame",)),
        ("http://user:p@ss/w@host", ("user", "p@ss", "ss/w")),
        ("dialled node.example.org:4001 again", ("example",)),
        (r"dialled\nnode.example.org:4001", ("example",)),
        ("-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIAAA\nMC4CAQAwBQY=\n-----END PRIVATE KEY-----", ("MC4C",)),
        (r"-----BEGIN RSA PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIAAA\nMC4CAQAwBQYDK2Vw", ("MC4C",)),
    ],
)
def test_secrets_and_addresses_are_found_in_all_kinds_of_dress(text, secrets):
    cleaned = Redactor(b"a").clean(text)
    assert not [secret for secret in secrets if secret in cleaned], cleaned
    assert cleaned != text


ANY = "AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"
HEX = "0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c"
WEBHOOKS = "https://hooks.slack.com/services/T0/B0/ discord.com/api/webhooks/1/ webhook.office.com/webhookb2/"
FORMS = "glpat- glrt- xoxb-123456789012- xoxe.xoxp-1- xapp-1- nvapi- xai- pypi- tskey-auth- ya29. gsk_ npm_ r8_ "
FORMS += "AIza hvs. sk_live_ sk-ant- ghp_ SG.abcdefghijklmnop. 1234567890:AA whsec_ " + WEBHOOKS
MACHINES = "02:42:ac:11:00:02 enx0242ac110002 02-42-AC-11-00-02 0242.ac11.0002"
BARE = (
    HEX,
    HEX[:32],
    HEX.upper(),
    f"dop_v1_{HEX}",
    "AGE-SECRET-KEY-1QQPZRY9X8GF2TVDW0S3JN54",
    "ASIAQQPZRY9X8GF2TVDW",
    "ann.lee+x@mail.example.org",
    "ann@example.org",
    "ann%40example.org",
    f"key_{HEX}",
    *MACHINES.split(),
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ ann@laptop",
)
DRESSES = "{}", "it is {}, then", '{{"name": "{}"}}', r'{{"a": "\"{}\""}}', r"all:\n{}", r"\u00e9{}", "x={}", "<{}>"


@pytest.mark.parametrize("secret", [*(form + ANY for form in FORMS.split()), *BARE])
def test_row_65_secrets_of_common_forms_are_removed(secret):
    for dress in DRESSES:
        cleaned = Redactor(b"a", with_addresses=True).clean(dress.format(secret))
        left = secret.removeprefix("https://")
        assert left not in cleaned, cleaned
        assert left[-16:] not in cleaned, cleaned
        assert cleaned.startswith(dress.partition("{}")[0].replace("{{", "{")), "what is before it stays"


def test_row_65_numbers_of_the_run_stay_and_other_keys_do_not(home, report):
    packet = 2 * HEX[:32]
    home.log.write_text(f"run {RUN.id.hex()} packet {packet} key {HEX} by ann@example.org\n")
    assert report()[0]["node.log"] == f"run {RUN.id.hex()} packet {packet} key [removed] by [removed]\n"
    clean = Redactor(b"a", public=f"hf:ann/sums@{HEX},question,answer code:{HEX[::-1]}").clean
    assert clean(f"hf:ann/sums@{HEX}, {HEX[::-1]}") == f"hf:ann/sums@{HEX}, {HEX[::-1]}"


def test_what_is_around_a_secret_stays():
    clean = Redactor(b"a").clean
    line = r'{"a": "x {\"token\": \"abc\", \"step\": 3}"}'
    assert clean(line) == line.replace("abc", "[removed]")
    assert clean("HF_TOKEN=abc; and http://me:p@ss@host/x") == "HF_TOKEN=[removed]; and http://[removed]@host/x"
    began = "-----BEGIN PRIVATE KEY-----\n2026-11-22 07:22:31 Step 7\nStep 8"
    assert clean(began) == "[removed]\n2026-11-22 07:22:31 Step 7\nStep 8", "the rest of the log is not hidden"


def test_the_way_home_is_removed_in_every_spelling(monkeypatch):
    monkeypatch.setenv("HOME", "/home/jos\u00e9")
    clean = Redactor(b"a").clean
    path = "/home/jos\u00e9/node"
    for text in (path, json.dumps(path), json.dumps(json.dumps(path))):
        assert "jos" not in clean(text)
        assert "~/node" in clean(text)
    assert Redactor(b"a", ["s\u00e9same-ouvre"]).clean(json.dumps("s\u00e9same-ouvre")) == '"[removed]"'


HOSTILE = """
import resource
from ftis_node.preflight.redaction import Redactor

resource.setrlimit(resource.RLIMIT_CPU, (10, 10))  # seconds
parts = ["a-", "token", "token ", "secret-", "-eyJaaaaaaaaa", "-eyJaaaaaaaaa.b", "://", "://a@", "a.", "1.", "1.1.1.1_",
         ":", "0:", "-----BEGIN PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----A", "basic ", "authorization ", "\\\\n",
         "token=\\\\", 'token="', "/dns/", "hf_", "aaaa-aaaa.", "a@", "a.a@a.", "0f", "0f:", "0fff.",
         "ssh-rsa AAAA", "xoxb-"]
for part in parts:
    text = part * (50_000 // len(part))
    Redactor(b"a").clean(text)
    Redactor(b"a").clean(f"token{' ' * 100}={text}")
for text in ("token" + "\\\\" * 50_000, "token=" + "\\\\" * 50_000 + "x", "token" + " " * 50_000):
    Redactor(b"a").clean(text)
"""


def test_a_hostile_log_is_cleaned_in_time_with_its_length():
    """A pattern that goes back over what it has seen takes minutes for these."""
    subprocess.run([sys.executable, "-c", HOSTILE], check=True, timeout=600)


def test_a_home_of_which_nothing_is_sound_is_reported(home, report, tmp_path):
    """A damaged run file, checkpoints of a model that is gone, wrong flags and a wrong environment at once."""
    home.run_file.write_text("run =")
    begun(home.path, 4, str(tmp_path / "gone"), "full")
    findings = json.loads(report("--set", "seed=x")[0]["doctor.json"])
    told = " ".join(one["text"] for one in findings if one["verdict"] == "fail")
    assert "is not TOML" in told
    assert "FTIS_HUB_PASSWORD is no setting" in told


def test_a_long_log_is_cut_at_a_line(home, report):
    with home.log.open("w") as log:
        for number in range(30_000):
            log.write(f"line {number} {'x' * 40}\n")
    lines = report()[0]["node.log"].splitlines()
    assert lines[-1].startswith("line 29999")
    assert lines[0].startswith("line ")
    assert 900_000 < sum(len(line) + 1 for line in lines) <= 1 << 20


def test_a_home_that_is_broken_is_reported_all_the_same(home, report):
    (home.checkpoints / "step-00000003" / "checkpoint.json").write_text("{")
    home.metrics.unlink()
    home.metrics.mkdir()
    packed, _ = report()
    assert json.loads(packed["checkpoints.json"]) == {"step-00000003": "damaged"}
    assert "metrics.jsonl" not in packed
