"""`ftis-node config` shows what the layers add up to, and docs/settings.md says what each setting is."""

import json
import tomllib
from pathlib import Path

import psutil
import pytest
import torch

from ftis_node.config import documentation
from ftis_node.config.run import RunFile, dump_run_file, load_run_file
from ftis_node.config.settings import Settings, collect
from ftis_node.errors import UsageError
from ftis_node.worker.planning import memory_budget, memory_limit
from tests import settings_page
from tests.support.begun import begun
from tests.support.swarm import RUN

DOCUMENT = Path(__file__).parent.parent / "docs" / "settings.md"


def test_the_documents_are_what_the_classes_say():
    page = DOCUMENT.with_name("method.md").read_text(encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == settings_page.document(), "run make settings"
    assert page == settings_page.with_methods(page), "run make settings"


def test_every_setting_says_what_it_does_and_has_a_group():
    (_, owners), *experts = documentation.in_tiers()
    assert {*owners}.union(*(names for _, names in experts)) == Settings.model_fields.keys()
    assert all(title.removeprefix(f"{documentation.EXPERTS}: ") for title, _ in experts)
    told = [settings_page.entry_of(name).text for name in Settings.model_fields]
    assert all(text.endswith(".") and "[" not in text for text in told)
    assert Settings.GROUPS.keys() <= Settings.model_fields.keys()


def test_bounds_and_units_are_read_off_the_class():
    found = {entry.name: (entry.values, entry.unit) for entry in map(settings_page.entry_of, Settings.model_fields)}
    assert found["vram_share"] == ("> 0 and ≤ 1", "")
    assert found["betas"] == ("≥ 0 and < 1", "")
    assert found["upload_mbit"] == ("≥ 0", "Mbit/s")
    assert found["log_format"] == ("text, json", "")
    assert found["defences"] == ("claims, newcomers, likelihood, length", "")
    assert found["threshold"] == ("≥ 0, or none", "")
    assert found["max_age"] == ("> 0", "s")


def test_what_is_shown_reads_back_as_the_same_settings(cli, tmp_path):
    pairs = ("--set", 'model=a"b\\\x7f', "--set", "wait=inf")
    code, out, _ = cli("config", "show", "--origin", *pairs)
    assert code == 0
    file = tmp_path / "shown.toml"
    file.write_text(out)
    there = collect(task="", flags={}, file=file, environment={})[0]
    flags = {"model": 'a"b\\\x7f', "wait": "inf"}
    assert there == collect(task="arithmetic", flags=flags, environment={})[0]


def test_each_value_is_shown_with_where_it_came_from(cli, tmp_path):
    file = tmp_path / "s.toml"
    file.write_text("nice = 10\nmax_age = 100\n")
    flags = ("--settings", str(file), "--set", "seed=3")
    code, out, _ = cli("config", "show", "--origin", *flags, environment={"FTIS_WAIT": "3"})
    assert code == 0
    shown = {line.split()[0]: line.rsplit("# ", 1)[1] for line in out.splitlines() if " = " in line}
    expected = {
        "port": "default",
        "lora_rank": "task arithmetic",
        "nice": f"file {file}",
        "max_age": f"file {file}",
        "wait": "environment FTIS_WAIT",
        "seed": "flags",
    }
    assert {name: shown[name] for name in expected} == expected
    answer = json.loads(cli("config", "show", "--origin", "--json", *flags)[1])
    assert {name: answer["origins"][name] for name in expected} == expected
    assert (answer["settings"]["wait"], answer["settings"]["nice"], answer["settings"]["vram_gb"]) == (3, 10, None)
    assert "origins" not in json.loads(cli("config", "show", "--json", *flags)[1])


def test_the_settings_that_owners_change_are_shown_first_and_each_page_says_when(cli):
    out = cli("config", "show", "--task", "gsm8k")[1]
    titles = [line[11:] for line in out.splitlines() if line.startswith("# Experts: ")]
    (_, owners), *experts = documentation.in_tiers()
    assert titles == [title[9:] for title, _ in experts] and len(titles) > 5
    assert "# longer if your peers are slower" in out.split("wait = ")[1].splitlines()[0]
    here = {name for name, value in Settings() if value is not None}
    assert list(tomllib.loads(out)) == [
        *(name for name in owners if name in here),
        *(name for _, names in experts for name in names if name in here),
    ]
    before, after = settings_page.document().split("## Experts")
    for name in Settings.model_fields:
        assert (f"| `{name}` |" in before) is (name in documentation.OWNERS), name
        assert (f"* `{name}` = " in after.split("## Machine")[0]) is (name not in documentation.OWNERS), name
    assert documentation.OWNERS.keys() <= Settings.model_fields.keys()


def test_no_infinity_gets_into_json(cli):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    out = cli("config", "show", "--json", "--set", "wait=inf")[1]
    assert json.loads(out, parse_constant=refuse)["settings"]["wait"] == "inf"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("upload_mbits = 3", "Did you mean 'upload_mbit'"),
        ("vram_gb = 3\nvram_share = 0.5", "Keep one of them"),
        ("[network]\nport = 3", "Unknown setting 'network'"),
    ],
)
def test_a_file_that_is_not_sound_is_told_with_its_remedy(content, what, cli, tmp_path):
    file = tmp_path / "s.toml"
    file.write_text(content)
    code, out, err = cli("config", "show", "--settings", str(file))
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and len(err.splitlines()) == 2 and what in err


def test_a_share_of_the_memory_is_a_limit_of_it():
    total = 100 << 30
    assert memory_limit(Settings(vram_share=0.25), total) == 25 << 30
    assert memory_limit(Settings(vram_gb=3), total) == 3 << 30
    assert memory_limit(Settings(), total) is None


def test_a_share_of_main_memory_is_never_more_than_is_free():
    small, whole = (memory_budget(Settings(vram_share=share), torch.device("cpu")) for share in (0.001, 1.0))
    assert small == round(0.001 * psutil.virtual_memory().total)
    assert whole < psutil.virtual_memory().total


def test_a_home_shows_what_its_daemon_would_run_with(cli, tmp_path):
    home = tmp_path / "home"
    other = tmp_path / "other.toml"
    begun(home, 7, "tiny-b", "lora")
    (home / "run.toml").write_text(dump_run_file(RunFile(run=RUN.model_copy(update={"task": "gsm8k"}))))
    flags = ("config", "show", "--json", "--origin", "--home", str(home), "--set", "device=cpu", "--set", "vram_gb=8")
    shown = json.loads(cli(*flags)[1])
    found = {name: (shown["settings"][name], shown["origins"][name]) for name in ("model", "lora", "wait", "optimiser")}
    assert found == {
        "model": ("tiny-b", "home"),
        "lora": (True, "home"),
        "optimiser": ("adamw", "home"),
        "wait": (10.0, "default"),  # of the home's run, which is not of arithmetic
    }
    assert json.loads(cli(*flags, "--set", "lora=false")[1])["origins"]["lora"] == "flags"
    other_model = json.loads(cli(*flags, "--set", "model=tiny-a")[1])
    assert other_model["settings"]["lora"] is None, "another model's is not ours"
    other.write_text(dump_run_file(RunFile(run=RUN)))
    code, _, err = cli(*flags, "--run", str(other))
    assert code == 2 and "belongs to run" in err
    fresh = ("config", "show", "--home", str(tmp_path / "none"), "--run", str(other), "--origin")
    (wait,) = (line.split() for line in cli(*fresh)[1].splitlines() if line.startswith("wait = "))
    assert wait == ["wait", "=", "2.0", "#", "task", "arithmetic"]


def test_a_value_that_a_home_keeps_and_that_holds_no_more_can_be_forgotten():
    kept = {"home": {"engine": "hf"}, "task": "", "flags": {}, "environment": {}}
    with pytest.raises(UsageError, match=r"from home is wrong.*make this home forget it with --set engine=default"):
        collect(**kept)
    with pytest.raises(UsageError, match="leave it out for its default"):
        collect(**kept | {"home": {}, "flags": {"engine": "hf"}})


def test_a_new_run_takes_a_file_of_held_out_rows(cli, tmp_path):
    for name, rows in (("train", range(20)), ("test", range(20, 25))):
        (tmp_path / name).write_text("".join(f'{{"question": "{n}", "answer": {n}}}\n' for n in rows))
    (tmp_path / "train").rename(tmp_path / "train.jsonl")
    new = ("run", "new", "--model", "tiny-a", "--task", str(tmp_path / "train.jsonl"), "-o", str(tmp_path / "run.toml"))
    words = cli(*new, "--eval-data", str(tmp_path / "test"))[1].split()
    assert words[words.index("--task") :] == [*new[4:6], "--eval-data", str(tmp_path / "test"), *new[2:4]]
    code, _, err = cli("join", "--completion-tokens", "96")
    assert code == 2 and "ftis-node run new" in err
    code, _, err = cli(*new, "--eval-data", str(tmp_path / "none"))
    assert code == 2 and "Cannot read" in err


def test_a_new_run_for_models_of_any_tokenizer(cli, tmp_path):
    new = ("run", "new", "--any-tokenizer", "-o", str(tmp_path / "run.toml"))
    code, out, err = cli(*new, "--completion-tokens", "40", "--json")
    assert code == 0, err
    code, shown, _ = cli("run", "show", str(tmp_path / "run.toml"))
    assert code == 0 and json.loads(out)["id"] in shown and "for models of any tokenizer" in shown
    run = load_run_file(tmp_path / "run.toml").run
    assert run.text and (run.prompt_bytes, run.completion_bytes, run.completion_tokens) == (16, 64, 40)
    code, _, err = cli(*new, "--model", "tiny-a")
    assert code == 2 and "contradict" in err
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": "{n}", "answer": {n}}}\n' for n in range(20)))
    code, _, err = cli("run", "new", "--task", str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "run.toml"))
    assert code == 2 and "--any-tokenizer" in err
