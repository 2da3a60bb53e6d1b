"""Which test reaches an error that no row of `tests.support.mistakes` reaches and whose words no test quotes at length.

By test file, then by file of the product: how each error's words begin, as they stand in the code with … for what is
put in. `tests/test_errors.py` finds the others by itself, and refuses an entry that it has no need of.
"""

from __future__ import annotations

COVERED: dict[str, dict[str, tuple[str, ...]]] = {
    "test_api.py": {"observe/api.py": ("The daemon answered … with",)},
    "test_bench_step.py": {"lab/bench/step.py": ("… cannot be written: ….",)},
    "test_checkpointing.py": {"node/checkpointing.py": ("The LoRA layers under … were trained with …=…,",)},
    "test_checks.py": {
        "config/checks.py": (
            "by_need is false (…), and",
            "… is no device (…).",
            "vram_gb (…) and vram_share",
            "The host … is no IP address",
            "There is no … … (…).",
            "The … cannot be … (…).",
        ),
        "config/settings.py": ("Setting … from … is wrong:",),
        "worker/engine.py": ("The objective cannot be set",),
    },
    "test_condition.py": {"node/assembly.py": ("The home may take … on disk,",)},
    "test_config.py": {
        "config/settings.py": ("There is no profile … (…).",),
        "swarm/addresses.py": ("An announced address names",),
    },
    "test_daemons.py": {"node/assembly.py": ("The --peers are all in another",)},
    "test_doctor.py": {"policy/hub.py": ("The hub has no model …, or", "The hub answers … for ….")},
    "test_engine.py": {"worker/engine.py": ("There is no objective ….", "str(error)")},
    "test_errors_within.py": {
        "cli/detach.py": ("what.removeprefix('error:",),
        "cli/life.py": ("The node does not …: it is",),
        "cli/logs.py": ("The log … cannot be read:",),
        "demo.py": ("Node … ended by itself: …",),
        "export/folder.py": ("… cannot be read: ….",),
        "lab/bench/namespaces.py": ("Network namespaces need root.", "`…` failed: …."),
        "lab/crew.py": ("… cannot be written or read:", "A trial failed: …"),
        "lab/reporting/index.py": ("… cannot be read: ….",),
        "lab/spec.py": ("Cannot read …: ….",),
        "learner/optimiser.py": ("8-bit AdamW needs bitsandbytes.",),
        "observe/plot.py": ("Pictures need matplotlib,",),
        "preflight/bugreport.py": ("… exists already.",),
        "store/home.py": ("The home … cannot be written",),
        "store/packets.py": ("The database … cannot be read:",),
        "swarm/addresses.py": ("There is no free port on ….",),
        "tasks/own.py": ("The task … has nothing to",),
        "worker/client.py": ("fault.what",),
    },
    "test_eval.py": {
        "cli/common.py": ("--set … has no value.",),
        "cli/eval.py": (
            "What … is for is not said.",
            "… is a model and no checkpoint, so --model",
            "… is a model and no checkpoint, so it",
            "… cannot be written: ….",
        ),
        "tasks/__init__.py": ("The task math500 is a test:",),
        "tasks/jsonl.py": ("Cannot read …: ….",),
        "worker/restore.py": ("There is no checkpoint ….", "The checkpoint … does not fit", "str(error)"),
    },
    "test_export.py": {
        "export/folder.py": ("… is there and not empty.", "… cannot be written: …."),
        "export/model.py": ("The checkpoint … does not",),
        "worker/restore.py": ("The checkpoint … cannot be",),
    },
    "test_federation.py": {"lab/participant.py": ("Private rows and averaged",)},
    "test_fit.py": {"cli/fit.py": ("The caps of the task … are", "There is no GPU here to ask")},
    "test_gym.py": {
        "config/run.py": ("The run's task is …, which",),
        "tasks/packaged.py": ("The task is of …, which is", "… ….", "… failed: …"),
    },
    "test_handshake.py": {"node/assembly.py": ("None of the --peers can work",)},
    "test_home.py": {"store/home.py": ("The home … cannot be used:",)},
    "test_hub_tasks.py": {
        "tasks/hub.py": (
            "The dataset … ….",
            "Of the … rows of …, … have",
            "… has … of the name ….",
            "The files of … have …, and",
            "… has …, and the disk has",
            "… ….",
        )
    },
    "test_identity.py": {"swarm/identity.py": ("The key file … cannot be used:",)},
    "test_judge.py": {"tasks/judge.py": ("Judging mathematics needs",)},
    "test_lab_experiment.py": {
        "lab/loading.py": (
            "Cell …: a script that needs",
            "Cell … is horizontal, where",
            "Cell …: a run has no … to",
            "Cell …, node …: …",
        )
    },
    "test_lan.py": {"cli/runs.py": ("There are … runs on the local", "The local network cannot be")},
    "test_life.py": {"observe/api.py": ("refusal['what']",)},
    "test_migration.py": {"store/migrations.py": ("… does not say its schema", "… has schema …, and this version")},
    "test_own_tasks.py": {
        "config/run.py": ("The run's reward rule is …,", "The run judges answers by", "The … of … is not the run's:"),
        "tasks/jsonl.py": ("… has only …, and all would",),
        "tasks/own.py": (
            "The task has no rows.",
            "The template does not contain",
            "The function … returns …,",
            "The function … failed: ….",
            "Row … of the task has no question",
        ),
    },
    "test_packet_store.py": {"store/packets.py": ("The database … cannot be used:",)},
    "test_policy_load.py": {"policy/load.py": ("There is no usable CUDA device.", "… is no device.")},
    "test_private.py": {
        "cli/common.py": ("… is no time.",),
        "cli/invitations.py": (
            "The invitation would have",
            "Nobody is named.",
            "The home … has no run yet.",
        ),
        "node/assembly.py": ("None of the peers takes this",),
        "node/options.py": ("The invitation is to run …,", "The run is open; who may take"),
        "swarm/invitation.py": ("The invitation is of version", "The invitation has expired."),
        "swarm/roster.py": ("The list of members … cannot",),
    },
    "test_replay.py": {
        "lab/replaying/lineage.py": ("The log's line … of step …", "There is no step … on the"),
        "lab/replaying/replay.py": (
            "what",
            "The task of this home is …,",
            "The packet …… in … is damaged….",
            "… cannot be written: ….",
        ),
    },
    "test_run.py": {
        "config/run.py": (
            "…… is wrong: ….",
            "The run file is longer than",
            "The run file is too long with",
            "…… has an unknown key ….",
            "`…` is missing from ….",
        ),
        "config/reading.py": ("The … … is not UTF-8",),
    },
    "test_score.py": {"policy/ready.py": ("LoRA on the output head is",)},
    "test_settings.py": {"config/reading.py": ("The … … cannot be read: ….",)},
    "test_shortage.py": {"worker/shortage.py": ("what",)},
    "test_tasks.py": {"tasks/jsonl.py": ("… is empty.", "…, line …, ….")},
    "test_tokenizer.py": {"tokenizer/chat.py": ("This tokenizer has no end-of-sequence",)},
    "test_tracking.py": {"observe/tracking.py": ("The tracker … is not installed.",)},
    "test_vllm.py": {
        "config/checks.py": ("engine=vllm (…) goes with",),
        "policy/generate/vllm.py": (
            "The log-probs of the vLLM",
            "The vLLM server … takes …",
            "The vLLM server … tells log-probs",
            "The vLLM server … refused",
            "The vLLM server … cannot be",
            "The vLLM server … wants another",
        ),
    },
    "test_watch.py": {
        "cli/watch.py": ("--json is for --for: what", "The home … is a node's, and"),
        "node/observer.py": ("The home … looks at run …,",),
    },
    "test_web.py": {"observe/web.py": ("The page cannot be served",)},
}
