"""Mistakes that a person can make at the command line, and what they are told: the table of `tests.test_errors`."""

from dataclasses import dataclass, field
from typing import Any

from tests.support.swarm import RUN

DEAD = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWKAFkdZjAMAKaNHMycURaoRJDkJLfz2N7GFb4fDUZPfWV"
JOIN = "join --dry-run --device cpu --home {tmp}/home"


@dataclass(frozen=True)
class Row:
    """A command line; its exit code; the words of what is wrong, and of what to do (regular expressions).

    files: written before, by their names under {tmp}; an empty one where the line names {tmp}/file. `run` is a run
    file's text, changed by replacing its pairs.
    """

    line: str
    what: str
    fix: str
    code: int = 2
    files: dict[str, str | bytes] = field(default_factory=dict)
    run: tuple[tuple[str, str], ...] | None = None


def a_task(*rows: str) -> dict[str, Any]:
    return {"files": {"rows.jsonl": "".join(f"{row}\n" for row in rows)}}


GROUP = f"group = {RUN.group}"
EOS = f"eos = {list(RUN.eos)}", "eos = [1]"
GOOD = '{"question": "1+1", "answer": "2"}'
OTHER = GOOD.replace("1+1", "2+0")
ONES = "{tmp}/rows.jsonl"
EVAL = "eval --checkpoint"
TASK = f"{JOIN} --task {{tmp}}/rows.jsonl"
CHANGED = f"{JOIN} --run {{tmp}}/changed.toml"
PEERS, OTHER_KIND = f"{JOIN} --peers /ip4/127.0.0.1/tcp/4001", "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
NEW = "run new -o {tmp}/run.toml"
SHOW = "run show {tmp}/changed.toml"
CHECK = "run show {tmp}/file"

ROWS = {
    # settings
    "an unknown setting": Row(f"{JOIN} --set lerning_rate=1", "lerning_rate", "learning_rate"),
    "a key of the run": Row(
        f"{JOIN} --set completion_tokens=64", "Unknown .*'completion_tokens'", "the run's.*run new"
    ),
    "a home where nothing can be": Row(JOIN.replace("{tmp}", "/proc"), "/proc is no place for files", "--home", 1),
    "settings that are no text": Row(f"{JOIN} --settings {{tmp}}/file", "/file is not U", "8", files={"file": b"\xff"}),
    "deep settings": Row(
        f"{JOIN} --settings {{tmp}}/file", "/file nests", "flatter", files={"file": "x=" + "[" * 5000}
    ),
    "a newer home": Row(JOIN, "has schema 99", "", 1, files={"home/home.json": '{"schema": 99}'}),
    "a log that is none": Row("logs --home {tmp}", "cannot be used: Is a dir", "path", 1, files={"node.log/x": ""}),
    "a setting without a value": Row(f"{JOIN} --set wait", "no value", "wait=VALUE"),
    "a value out of range": Row(f"{JOIN} --own-share 3", "own_share.*flags", "valid value"),
    "a value that is no number": Row(f"{JOIN} --set betas=0.9,x", "'betas' from flags.*valid number", "valid value"),
    "no settings file": Row(f"{JOIN} --settings {{tmp}}/none.toml", "cannot be read", "path"),
    "settings that are no TOML": Row(f"{JOIN} --settings {{tmp}}/file", "is not TOML", "line", files={"file": "="}),
    "an unknown objective": Row(f"{JOIN} --objective ftsi", "no objective 'ftsi'", "'ftis'"),
    "an objective that cannot be": Row(f"{JOIN} --set divergence=x", "There is no divergence", "Use one of"),
    "a run file that is there": Row("run new -o {tmp}/file", "exists already", "--overwrite"),
    "a device that is none": Row(f"{JOIN} --device teapot", "is no device", "cpu, cuda"),
    "LoRA on nothing": Row(f"{JOIN} --lora --set lora_targets=x", "no linear module x", "q_proj.*lora_targets"),
    "LoRA on a misspelt module": Row(f"{JOIN} --lora --set lora_targets=q_proj,vproj", "module vproj", "mean 'v_proj'"),
    "JSON from a daemon": Row("join --json --home {tmp}/home", "--dry-run", "status --json"),
    "parts of a vertical run": Row(f"{NEW} --parts 3", "--parts is for a horizontal run", "--collaboration horizontal"),
    "an epoch of a vertical run": Row(f"{NEW} --epoch 60", "--epoch is for a horizontal run", "--collaboration"),
    "a rule without data of one's own": Row(f"{JOIN} --own-reward exact", "--own-reward is the rule", "both"),
    "a batch without room for one's own data": Row(
        f"{JOIN} --own-data {ONES} --set batch_groups=1", "no room for --own-data", "batch_groups=2", **a_task(GOOD)
    ),
    # models
    "an unknown model": Row(f"{JOIN} --model tiny-q", "no model 'tiny-q'", "tiny-a"),
    "a GGUF file that is not there": Row(f"{JOIN} --model {{tmp}}/no.gguf", "no file .*no.gguf", "downloaded first"),
    "a folder without a model": Row(f"{JOIN} --model {{tmp}}", "holds no model", "save_pretrained"),
    "half a model": Row(f"{JOIN} --model {{tmp}}", "cannot be loaded", "--model FOLDER", 1, files={"config.json": "{"}),
    "a model that is none": Row(
        f"{JOIN} --model {{tmp}}", "no model that can be planned", "Qwen", files={"config.json": '{"model_type": "t5"}'}
    ),
    "a name of Ollama's": Row(f"{JOIN} --model llama3.2:3b", "name of Ollama's", "ollama show llama3.2:3b .*--model"),
    "a model of another size": Row(f"{JOIN} --model qwen3-4b", "no model 'qwen3-4b'", "^ *Give a local folder"),
    "no hub": Row(f"{JOIN} --model qwen2.5-3b", "cannot be loaded", "--model FOLDER", 1),
    # the network
    "a port that is taken": Row(f"{JOIN} --host 127.0.0.1 --port {{taken}}", "port .* is taken", "--port", 1),
    "a host of another machine": Row(f"{JOIN} --host 192.0.2.77", "cannot listen on 192.0.2.77", "--host", 1),
    "peers at no address": Row(f"{JOIN} --peers localhost:4001", "not a multiaddr", "ip4"),
    "peers without an id": Row(PEERS, "/p2p/ID", "ftis-node id"),
    "a peer id that is none": Row(f"{PEERS}/p2p/QmFoo", "not a multiaddr", "ftis-node id"),
    "a peer id of another kind": Row(f"{PEERS}/p2p/{OTHER_KIND}", "bad peer id", "ftis-node id"),
    "peers that are gone": Row(f"{JOIN} --peers {DEAD} --set patience=0", "None of the peers", "--run FILE", 1),
    "nothing to announce": Row(f"{JOIN} --port 4001 --announce nonsense", "is no multiaddr", "192.0.2.7"),
    "announced without a port": Row(f"{JOIN} --announce /ip4/1.2.3.4/tcp/1", "takes any", "--port"),
    "a relay without an id": Row(f"{JOIN} --relay /ip4/1.2.3.4/tcp/1", "peer address", "ftis-node id"),
    "options before net": Row("doctor --json net", "belong to `doctor`", "doctor net --json"),
    "an empty invitation": Row('join --home {tmp}/home ""', "invitation is empty", "variable"),
    "an address in place of an invitation": Row(f"{JOIN} {DEAD}", "is no invitation", "with --peers"),
    "an invitation for a task": Row(f"{JOIN} --task ftis:abc", "--task was given an invitation", "stands alone"),
    "watching nothing": Row("watch --home {tmp}/w", "No swarm is named", "--peers"),
    "JSON without an end": Row("watch --home {tmp}/w --json", "--json is for --for", "--for 60"),
    "watching on a node's home": Row("watch --home {tmp}", "is a node's", "name another", files={"store.sqlite": ""}),
    "an invitation in place of peers": Row("watch --peers ftis:abc", "--peers was given an invitation", "stands alone"),
    **{
        f"nothing after {option}": Row(f'{JOIN} {option} ""', f"{option} is followed by an empty value", "variable")
        for option in ("--peers", "--model", "--name", "--home", "--task", "--set")
    },
    "no home": Row("join --dry-run --home=", "--home= is followed by an empty value", "variable"),
    # the home
    "a home that is a file": Row("join --dry-run --home {tmp}/file", "home .* cannot be used", "--home", 1),
    "a home that is a file, in earnest": Row("join --home {tmp}/file", "home .* cannot be used", "--home", 1),
    "a key that is damaged": Row(f"{JOIN}", "key file .* damaged", "your copy", 1, files={"home/identity.key": "x"}),
    "a home of another run": Row(
        f"{JOIN} --run {{tmp}}/other.toml", "belongs to run", "another --home", run=((GROUP, "group = 7"),)
    ),
    "a home of another model": Row(f"{JOIN} --home {{tmp}}/begun --model tiny-b", "another model", "first start"),
    "asking nobody": Row("status --home {tmp}", "No ftis-node daemon is running", "ftis-node join", 1),
    "asking where nothing is": Row("status --home {tmp}/typo", "There is no home .*typo", "join --home .*typo", 1),
    "the id of a home that is none": Row("id --home {tmp}/typo", "There is no home .*typo", "join --home .*typo", 1),
    "the log of a home that is none": Row("logs --home {tmp}/typo", "There is no home .*typo", "join --home .*typo", 1),
    "the log of a home without one": Row("logs --home {tmp}", "There is no log in", "join --home", 1),
    "the id of a home without one": Row("id --home {tmp}", "no key yet", "that was started"),
    # run files
    "a run file that is no text": Row(CHECK, "not UTF-8", "UTF-8", files={"file": b"\xff\xfe"}),
    "a run file without a run": Row(CHECK, r"no \[run\]", "run new"),
    "a run that is no table": Row(CHECK, "not a table", "line of its own", files={"file": "run = 3"}),
    "a run file too long": Row(CHECK, "has over", "right file", files={"file": "#" * 70_000}),
    "a run file too deep": Row(CHECK, "too deeply", "right file", files={"file": "a = " + "[" * 5_000}),
    "an unknown key": Row(SHOW, "temprature", "temperature", run=(("temperature =", "temprature ="),)),
    "a missing key": Row(SHOW, "`group` is missing", "Add `group", run=((f"{GROUP}\n", ""),)),
    "a wrong value": Row(SHOW, "`group` .* is wrong", "Correct", run=((GROUP, "group = 1"),)),
    "a horizontal run": Row(
        CHANGED, "horizontal", "lab run", run=(('"vertical"', f'"horizontal"\nparts = {RUN.group}'),)
    ),
    "a file that the run names": Row(
        CHANGED, "not a run's to say", "--data", run=((f'task = "{RUN.task}"', 'task = "a/../../x.jsonl"'),)
    ),
    "a model of another tokenizer": Row(CHANGED, "tokenizer", "family", run=((RUN.tokenizer, "0" * 64),)),
    "a run that cannot be": Row(f"{NEW} --temperature 0", "temperature", "Change"),
    "packets too large": Row(f"{NEW} --completion-tokens 100000", "packets", "Change"),
    "a run of no model": Row(f"{NEW} --task {{tmp}}/rows.jsonl", "no --model", "--model qwen", **a_task(GOOD, OTHER)),
    "a run to nowhere": Row("run new -o {tmp}/none/run.toml", "cannot be written", "--output"),
    "a name too long": Row(f"{NEW} --name {'n' * 300}", "hint 'name'", "Shorten"),
    "a misspelt task": Row(f"{NEW} --model tiny-a --task gsm8", "no task", "Did you mean 'gsm8k'"),
    "a test to train on": Row(f"{NEW} --model tiny-a --task math500", "math500 is a test", "eval --task math500"),
    # data
    "data for a task that makes its own": Row(f"{JOIN} --data {{tmp}}/x", "makes its own data", "Leave out"),
    "data that are missing": Row(f"{JOIN} --task {{tmp}}/none.jsonl", "Cannot read", "exists"),
    "data that are not the run's": Row(
        f"{CHANGED} --task {{tmp}}/rows.jsonl",
        "rows.jsonl is not the run's, which is of",
        "same file .* line ends",
        **a_task(*(row.replace("question", "prompt") for row in (GOOD, OTHER))),
        run=((RUN.tokenizer, "{tokenizer}"), (f"vocabulary = {RUN.vocabulary}", "vocabulary = 26"), EOS),
    ),
    "no data": Row(TASK, "is empty", "in every line", **a_task()),
    "one question": Row(TASK, r"only 1 different", "Add rows", **a_task(GOOD, GOOD)),
    "a line that is no JSON": Row(TASK, "rows.jsonl, line 2, is not JSON in U", "Correct", **a_task(GOOD, "no json")),
    "a line that is no object": Row(TASK, "line 1, .*object", "Write", **a_task("[]")),
    "no question": Row(TASK, "no text in", "Add the question", **a_task("{}")),
    "no answer": Row(TASK, "has no `answer`", "Add the answer", **a_task('{"question": "1"}')),
    "an answer that is none": Row(TASK, "answer that is not", "Correct", **a_task('{"question": "1", "answer": []}')),
    "two fields in one file": Row(
        TASK, "where earlier lines have 'question'", "Use one", **a_task(GOOD, '{"prompt": "1", "answer": "2"}')
    ),
    # fit, eval, export, bench, lab, demo
    **{
        f"the command {other}": Row(other, f"no command '{other}'", f"`ftis-node {name}`")
        for other, name in {
            "chat": "ask",
            "sample": "ask",
            "restart": "join",
            "kick": "remove",
            "kill": "stop",
        }.items()
    },
    "held-out data that are missing": Row(f"{EVAL} tiny-a --task gsm8k --eval-data {{tmp}}/no", "Cannot read", "file"),
    "an export of nothing": Row("export --checkpoint nowhere --to {tmp}/o", "There is no checkpoint nowhere", "home"),
    "an export of a model": Row("export --checkpoint tiny-a --to {tmp}/o", "is a model and no", "checkpoint"),
    "an adapter after full training": Row(
        "export --checkpoint {tmp}/begun --adapter --to {tmp}/o", "begun was trained in full", "Leave out --adapter"
    ),
    "a size that is none": Row("fit --model tiny-a --vram 0", "no size", "--vram 24"),
    "a model that no hub gives": Row("fit --model someone/unheard-of --vram 24", "cannot be loaded", "--model", 1),
    "a task without caps": Row("fit --model tiny-a --vram 1 --task x", "caps of 'x'", "--prompt-tokens"),
    "a model for a checkpoint": Row(f"{EVAL} tiny-a --model tiny-b --task arithmetic", "no checkpoint", "--model"),
    "a checkpoint that is missing": Row(f"{EVAL} {{tmp}}/step-00000007 --task arithmetic", "no checkpoint", "home"),
    "a folder of nothing": Row(f"{EVAL} {{tmp}}/e --task arithmetic", "Nor has it a check", ".", files={"e/file": ""}),
    "a home without a checkpoint": Row(
        f"{EVAL} {{tmp}}/home --task arithmetic", "no checkpoint yet", "first step", 1, files={"home/run.toml": ""}
    ),
    "no room for an answer": Row(f"{EVAL} tiny-a --task arithmetic --completion-tokens 100000", "room for", "."),
    "a device in a setting": Row(f"{EVAL} tiny-a --task arithmetic --set device=x", "'x' is no device", "cpu"),
    "verdicts to nowhere": Row(f"{EVAL} tiny-a --task arithmetic --out {{tmp}}/none/x", "cannot be written", "--out"),
    "verdicts over the questions": Row(
        f"{EVAL} tiny-a --task {ONES} --out {ONES}", "holds the questions", "--out", **a_task(GOOD, OTHER)
    ),
    "a page at a port that is taken": Row(f"{JOIN} --set http_port={{taken}}", "page cannot be served", "http_port", 1),
    "an experiment to nowhere": Row("lab run quick", "no place", "--out"),
    "an experiment into a file": Row("lab run quick --out {tmp}/file", "file.* cannot be used: Not a dir", "path", 1),
    "an unknown lab file": Row("lab run qick", "no lab file 'qick'", "quick"),
    "a report of something else": Row("lab report {tmp}", "no manifest", "lab run", files={"manifest.json": "{}"}),
    "verdicts over the data": Row(
        f"{EVAL} tiny-a --task gsm8k --data {ONES} --out {ONES}",
        "holds the questions",
        "--out",
        **a_task('{"question": "1+1", "answer": "#### 2"}'),
    ),
    "a lab file without nodes": Row("lab run {tmp}/x.toml", "wrong at name", "Mend", files={"x.toml": ""}),
    "seeds that are none": Row("lab run quick --dry-run --seeds x", "no numbers", "0,1,2"),
    "seeds that are not there": Row("lab run quick --dry-run --seeds 7 --json", "no seed 7", "0, 1"),
    "a report of nothing": Row("lab report {tmp}", "no manifest", "lab run"),
    "a replay of nothing": Row("lab replay {tmp} --json", "no home of a daemon", "another"),
    "a replay of another time": Row("lab replay {tmp}", "no step log", "begun", 1, files={"metrics.jsonl": "{}\n"}),
    "a replay of what was dropped": Row(
        "lab replay {tmp}",
        "begins with its part 2",
        "disk_gb",
        1,
        files={"metrics.jsonl": "{}\n", "metrics-00000002.jsonl": "{}\n"},
    ),
    "numbers that are none": Row("lab simulate --nodes x", "not a list of numbers", "--nodes 10"),
    "a demo over something else": Row(
        "demo --output {tmp}/dir", "not a demo's", "--output", files={"dir/thesis.txt": "three years of work"}
    ),
    "a demo under a file": Row("demo --output {tmp}/file/x", "cannot be used: Not a dir", "path", 1),
    "a report to nowhere": Row("bugreport --home {tmp}/home --out {tmp}/none/x.gz", "cannot be written", "--out"),
    "a report over a file": Row("bugreport --home {tmp}/home --out {tmp}/file", "exists", "--out"),
}
