"""Each layer of settings overrules the ones below it, and every value knows where it came from."""

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as effort
from hypothesis import strategies as st
from pydantic import ValidationError

from ftis_node.config import settings as subject
from ftis_node.config.profiles import TASKS
from ftis_node.config.settings import RETIRED, Settings, changed, collect, recorded
from ftis_node.errors import Several, UsageError
from ftis_node.policy.names import built_in

DEFAULT = Settings()


def settled(**layers):
    return collect(**{"task": "gsm8k", "flags": {}, "environment": {}} | layers)


def refused(**layers):
    with pytest.raises(UsageError) as caught:
        settled(**layers)
    return caught.value


_layer = st.fixed_dictionaries(
    {}, optional={name: st.integers(1, 99) for name in ("batch_groups", "eval_every", "eval_prompts", "wait")}
)


@effort(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=_layer, environment=_layer, flags=_layer)
def test_the_highest_layer_that_names_a_setting_decides(tmp_path, file, environment, flags):
    path = tmp_path / "settings.toml"
    path.write_text("".join(f"{key} = {value}\n" for key, value in file.items()))
    settings, origins = settled(
        task="arithmetic",
        file=path,
        environment={f"FTIS_{key.upper()}": str(value) for key, value in environment.items()},
        flags=flags,
    )
    layers = {
        "default": DEFAULT.model_dump(),
        "task arithmetic": TASKS["arithmetic"].settings,
        f"file {path}": file,
        **{f"environment FTIS_{key.upper()}": {key: value} for key, value in environment.items()},
        "flags": flags,
    }
    for name in Settings.model_fields:
        origin = [layer for layer, values in layers.items() if name in values][-1]
        assert origins[name] == origin
        assert getattr(settings, name) == layers[origin][name]


def test_a_flag_that_was_not_given_overrules_nothing():
    settings, origins = settled(flags={"wait": None, "seed": 3}, environment={"FTIS_WAIT": "4"})
    assert settings.wait == 4
    assert origins["wait"] == "environment FTIS_WAIT"
    assert settings.seed == 3
    assert origins["seed"] == "flags"


@pytest.mark.parametrize(
    ("task", "full", "lora"),
    [
        ("arithmetic", 2e-4, 3e-3),
        ("gsm8k", 1e-6, 1e-4),
    ],
)
def test_the_learning_rate_is_ones_own_or_the_tasks_or_else_the_papers(task, full, lora):
    for flags, rates in (({}, [full, lora]), ({"learning_rate": 1e-5}, [1e-5, 1e-5])):
        settings, origins = settled(task=task, flags=flags | {"model": "qwen2.5-0.5b"})
        assert [settings.effective_learning_rate(task, lora=layers) for layers in (False, True)] == rates
        for name in built_in():
            tiny = settings.model_copy(update={"model": name}).effective_learning_rate(task, lora=False)
            assert tiny == (1e-5 if flags else 2e-4), "a built-in model learns any task at its own pace"
        own = settings.model_copy(update={"model": "tiny-llama"})
        assert own.effective_learning_rate(task, lora=False) == rates[0], "a folder, by whatever path"
        assert origins["learning_rate"] == ("flags" if flags else "default")


def test_the_tasks_filter_stands_in_for_the_papers_and_gives_way_to_ones_own():
    plain, _ = settled(task="arithmetic")
    assert plain.objective_parts("arithmetic", filters=True) == {"divergence": "k1", "reduction": "sum", "threshold": 1}
    assert plain.objective_parts("arithmetic", filters=False) == plain.objective_parts("gsm8k", filters=True) == {}
    own, _ = settled(task="arithmetic", flags={"threshold": "3", "epsilon": "0.1"})
    assert own.objective_parts("arithmetic", filters=False) == {"threshold": 3, "epsilon": 0.1}
    assert own.objective_parts("arithmetic", filters=True)["threshold"] == 3


def test_none_takes_a_filter_away():
    settings, _ = settled(flags={"threshold": "none", "importance": "none", "gate": "none"})
    parts = {"threshold": None, "importance": "none", "gate": None}
    assert settings.objective_parts("arithmetic", filters=True).items() >= parts.items(), "it is an importance, too"
    error = refused(flags={"threshold": "nothing"})
    assert "'threshold'" in error.what
    assert not isinstance(error, Several), "one mistake, whatever forms there are"


def test_each_wrong_value_of_a_list_is_told():
    error = refused(flags={"defences": ["claims", "lenght", "nonsense"]})
    assert isinstance(error, Several)
    assert "(got 'lenght')" in error.what
    assert "(got 'nonsense')" in error.what
    assert ", or: " not in error.what


def test_an_unknown_key_names_its_layer_and_the_nearest_key(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text("batch_group = 3\n")
    error = refused(file=file)
    assert f"'batch_group' in file {file}" in error.what
    assert "'batch_groups'" in error.fix
    assert "config show" in refused(flags={"zzzzzz": 1}).fix


def test_a_wrong_value_names_its_layer(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text('wait = "long"\n')
    error = refused(file=file)
    assert f"'wait' from file {file}" in error.what
    assert "'long'" in error.what
    assert "'port' from environment FTIS_PORT" in refused(environment={"FTIS_PORT": "http"}).what
    assert "'steps' from flags" in refused(flags={"steps": 0}, environment={"FTIS_STEPS": "5"}).what


WRONG = {
    "steps": [-1],
    "batch_groups": [2.5, 0],
    "own_share": [1.5],
    "learning_rate": [0, float("nan")],
    "dtype": ["float8"],
    "betas": ["0.9", "a,b"],
    "port": [70_000],
    "lora": ["perhaps"],
    "gradient_clip": [0],
    "max_age": [-1],
    "model": [["a"]],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_value_of_the_wrong_type_or_range_is_refused(key, value):
    assert f"{key!r} from flags" in refused(flags={key: value}).what


def test_a_flag_can_mend_a_wrong_value_below_it():
    assert settled(environment={"FTIS_PORT": "http"}, flags={"port": 5})[0].port == 5


def test_lists_may_be_written_with_commas():
    settings, _ = settled(flags={"betas": "0.8,0.9"}, environment={"FTIS_LORA_TARGETS": "q_proj, k_proj"})
    assert settings.betas == (0.8, 0.9)
    assert settings.lora_targets == ("q_proj", "k_proj")


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12))
def test_text_from_the_environment_stays_the_text_it_is(text):
    for name in (text, "7", "1e5", "true", "NaN", "null"):  # a model may be called like a number
        assert settled(environment={"FTIS_MODEL": name})[0].model == name


def test_other_programs_variables_are_left_alone():
    settings, _ = settled(environment={"FTIS_HOME": "/x", "FTISWAIT": "red", "WAIT": "3", "ftis_wait": "4"})
    assert settings == DEFAULT


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FTIS_LERNING_RATE", "'FTIS_LEARNING_RATE'"),
        ("FTIS_HOMES", "'FTIS_HOME'"),
        ("FTIS_QQQQQQQQ", "Unset it"),
    ],
)
def test_a_misspelt_variable_names_the_nearest(name, meant):
    error = refused(environment={name: "1"})
    assert name in error.what
    assert meant in error.fix


def test_settings_survive_the_way_to_the_compute_process():
    settings, _ = settled(task="arithmetic", flags={"lora": True, "steps": 4})
    assert Settings(**settings.model_dump(mode="json")) == settings


def test_a_running_node_changes_what_it_can_and_nothing_else():
    running = Settings(model="tiny-a", own_share=0.5)
    first = Settings(wait=3.0)
    values = {"threshold": "none", "upload_mbit": "1.5", "steps": "7"}
    new = changed(running, {**values, "own_share": "default", "wait": "default"}, first)
    assert new.own_share is None
    assert new.threshold == "none"
    assert new.upload_mbit == 1.5
    assert new.steps == 7
    assert new.model == "tiny-a"
    assert new.wait == 3.0, "what it was started with"
    for values, error in (
        ({"model": "tiny-b"}, "model cannot be changed while the node runs"),
        ({"wiat": "default"}, "Unknown setting 'wiat'"),
        ({"wait": "-1"}, "'wait' from set is wrong"),
        ({"gate": "2"}, "gate cannot be 2.0 \\(set\\)"),
    ):
        with pytest.raises(UsageError, match=error):
            changed(running, values, running)


def test_all_live_settings_are_settings():
    assert set(subject.LIVE) <= Settings.model_fields.keys()
    assert set(subject.LIVE_CONSTANTS) <= set(subject.OBJECTIVE_PARTS)


def test_an_earlier_versions_setting_is_unknown(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("exchange_peers = 9\n")
    with pytest.raises(UsageError, match="Unknown setting 'exchange_peers'"):
        settled(file=file)
    with pytest.raises(UsageError, match="Unknown setting 'stall_seconds' in environment FTIS_STALL_SECONDS"):
        settled(environment={"FTIS_STALL_SECONDS": "9"})
    assert collect(task="", flags={}, environment={}, home={"exchange_peers": "9"})[0] == Settings()


def test_settings_that_an_earlier_version_recorded_are_read_where_what_they_said_still_holds():
    earlier = Settings(wait=3.0).model_dump() | dict.fromkeys(RETIRED) | {"author_weight": "equal", "by_need": True}
    assert recorded(earlier) == recorded(earlier | {"engine": "hf"}) == Settings(wait=3.0)
    for change in (
        {"author_weight": "gain"},
        {"trust": "graft"},
        {"nothing": 1},
    ):
        with pytest.raises(ValidationError):
            recorded(earlier | change)
