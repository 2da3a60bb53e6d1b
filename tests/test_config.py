"""`ftis-node config` shows what the layers add up to, and docs/settings.md says what each setting is."""

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
from tests import file_map, settings_page
from tests.support.begun import begun
from tests.support.cli import answer, misused, printed
from tests.support.swarm import RUN

DOCUMENT = Path(__file__).parent.parent / "docs" / "settings.md"


def test_the_documents_are_what_the_classes_say():
    page = DOCUMENT.with_name("method.md").read_text(encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == settings_page.document(), "run make settings"
    assert page == settings_page.with_methods(page), "run make settings"
    assert DOCUMENT.with_name("files.md").read_text(encoding="utf-8") == file_map.page(), "run make settings"


def test_every_setting_says_what_it_does_and_has_a_group():
    titles, groups = zip(*documentation.in_tiers(), strict=True)
    assert {name for names in groups for name in names} == Settings.model_fields.keys()
    assert all(title.removeprefix(f"{documentation.EXPERTS}: ") for title in titles[1:])
    for name in Settings.model_fields:
        text = settings_page.entry_of(name).text
        assert text.endswith(".")
        assert "[" not in text
    assert Settings.GROUPS.keys() <= Settings.model_fields.keys()


def test_what_is_shown_reads_back_as_the_same_settings(tmp_path):
    flags = {"model": 'a"b\\\x7f', "wait": "inf"}
    words = [word for name, value in flags.items() for word in ("--set", f"{name}={value}")]
    file = tmp_path / "shown.toml"
    file.write_text(printed("config", "show", "--origin", *words))
    there, _ = collect(task="", flags={}, file=file, environment={})
    here, _ = collect(task="arithmetic", flags=flags, environment={})
    assert there == here


def test_each_value_is_shown_with_where_it_came_from(monkeypatch, tmp_path):
    file = tmp_path / "s.toml"
    file.write_text("nice = 10\nmax_age = 100\n")
    monkeypatch.setenv("FTIS_WAIT", "3")
    line = ("config", "show", "--settings", file, "--set", "seed=3")
    shown = {}
    for text in printed(*line, "--origin").splitlines():
        if " = " in text:
            shown[text.split()[0]] = text.rsplit("# ", 1)[1]
    expected = {
        "port": "default",
        "lora_rank": "task arithmetic",
        "nice": f"file {file}",
        "max_age": f"file {file}",
        "wait": "environment FTIS_WAIT",
        "seed": "flags",
    }
    assert {name: shown[name] for name in expected} == expected
    told = answer(*line, "--origin")
    assert {name: told["origins"][name] for name in expected} == expected
    values = told["settings"]
    assert values["wait"] == 3
    assert values["nice"] == 10
    assert values["vram_gb"] is None
    assert "origins" not in answer(*line)


def test_the_settings_that_owners_change_are_shown_first_with_when():
    out = printed("config", "show", "--task", "gsm8k")
    titles, groups = zip(*documentation.in_tiers(), strict=True)
    shown = [line[2:] for line in out.splitlines() if line.startswith("# Experts: ")]
    assert shown == [*titles[1:]]
    assert len(shown) > 5
    assert "# longer if your peers are slower" in out.split("wait = ")[1].splitlines()[0]
    here = dict(Settings())
    in_order = [name for names in groups for name in names if here[name] is not None]
    assert list(tomllib.loads(out)) == in_order


def test_no_infinity_gets_into_json():
    assert answer("config", "show", "--set", "wait=inf")["settings"]["wait"] == "inf"


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
    code, out, err = cli("config", "show", "--settings", file)
    assert out == ""
    assert code == 2
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 2
    assert what in err


def test_a_share_of_the_memory_is_a_limit_of_it():
    total = 100 << 30
    assert memory_limit(Settings(vram_share=0.25), total) == 25 << 30
    assert memory_limit(Settings(vram_gb=3), total) == 3 << 30
    assert memory_limit(Settings(), total) is None


def test_a_share_of_main_memory_is_never_more_than_is_free():
    small, whole = (memory_budget(Settings(vram_share=share), torch.device("cpu")) for share in (0.001, 1.0))
    assert small == round(0.001 * psutil.virtual_memory().total)
    assert whole < psutil.virtual_memory().total


def test_a_home_shows_what_its_daemon_would_run_with(tmp_path):
    home = tmp_path / "home"
    other = tmp_path / "other.toml"
    begun(home, 7, "tiny-b", "lora")
    (home / "run.toml").write_text(dump_run_file(RunFile(run=RUN.model_copy(update={"task": "gsm8k"}))))
    line = ("config", "show", "--origin", "--home", home, "--set", "device=cpu", "--set", "vram_gb=8")
    shown = answer(*line)
    expected = {
        "model": ("tiny-b", "home"),
        "lora": (True, "home"),
        "optimiser": ("adamw", "home"),
        "wait": (10.0, "default"),  # of the home's run, which is not of arithmetic
    }
    for name, told in expected.items():
        assert (shown["settings"][name], shown["origins"][name]) == told
    assert answer(*line, "--set", "lora=false")["origins"]["lora"] == "flags"
    other_model = answer(*line, "--set", "model=tiny-a")
    assert other_model["settings"]["lora"] is None, "another model's is not ours"
    other.write_text(dump_run_file(RunFile(run=RUN)))
    assert "belongs to run" in misused(*line, "--run", other).what
    fresh = answer("config", "show", "--home", tmp_path / "none", "--run", other, "--origin")
    assert fresh["settings"]["wait"] == 2.0
    assert fresh["origins"]["wait"] == "task arithmetic"


def test_a_value_that_a_home_keeps_and_that_holds_no_more_can_be_forgotten():
    wrong = {"engine": "hf"}
    with pytest.raises(UsageError, match=r"from home is wrong.*make this home forget it with --set engine=default"):
        collect(task="", flags={}, environment={}, home=wrong)
    with pytest.raises(UsageError, match="leave it out for its default"):
        collect(task="", flags=wrong, environment={})


def write_rows(path, numbers):
    path.write_text("".join(f'{{"question": "{n}", "answer": {n}}}\n' for n in numbers))
    return path


def test_a_new_run_takes_a_file_of_held_out_rows(cli, tmp_path):
    train = write_rows(tmp_path / "train.jsonl", range(20))
    test = write_rows(tmp_path / "test", range(20, 25))
    new = ("run", "new", "-o", tmp_path / "run.toml", "--task", train, "--model", "tiny-a")
    told = printed(*new, "--eval-data", test)
    assert told.split()[-6:] == f"--task {train} --eval-data {test} --model tiny-a".split()
    code, _, err = cli("join", "--completion-tokens", "96")
    assert code == 2
    assert "ftis-node run new" in err
    assert "Cannot read" in misused(*new, "--eval-data", tmp_path / "none").what


def test_a_new_run_for_models_of_any_tokenizer(tmp_path):
    file = tmp_path / "run.toml"
    new = ("run", "new", "--any-tokenizer", "-o", file)
    made = answer(*new, "--completion-tokens", "40")
    shown = printed("run", "show", file)
    assert made["id"] in shown
    assert "for models of any tokenizer" in shown
    run = load_run_file(file).run
    assert run.text
    assert run.prompt_bytes == 16
    assert run.completion_bytes == 64
    assert run.completion_tokens == 40
    assert "contradict" in misused(*new, "--model", "tiny-a").what
    rows = write_rows(tmp_path / "rows.jsonl", range(20))
    assert "--any-tokenizer" in misused("run", "new", "--task", rows, "-o", file).fix
