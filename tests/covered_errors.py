"""Where errors are reached that no row of `tests.test_errors` reaches.

By test, then by file: the first words of each error, as they stand in the code with … for what is put in. A new error
without a row and without an entry here fails `tests/test_errors.py`.
"""

from __future__ import annotations

COVERED: dict[str, dict[str, tuple[str, ...]]] = {
    "test_api.py::test_a_daemon_that_does_not_answer_is_not_waited_for_for_ever": {
        "observe/api.py": ("The daemon on this home did not answer within … s.",),
    },
    "test_api.py::test_reading_never_acts": {
        "observe/api.py": ("The daemon answered … with … ….",),
    },
    "test_daemons.py::test_a_home_that_trained_alone_does_not_join_another_run_by_mistake": {
        "node.py": ("The --peers are all in another run than the home …, which belongs to r",),
    },
    "test_doctor.py::test_a_hub_that_does_not_give_the_model": {
        "policy/hub.py": (
            "The hub answers … for ….",
            "The hub does not give … to …: it is gated, private, or does not exist.",
            "The hub has no model …, or none with a ….",
        ),
    },
    "test_engine.py::test_a_run_whose_prompt_cap_is_too_small_is_refused": {
        "worker/engine.py": ("A prompt has … tokens, the run allows ….",),
    },
    "test_engine.py::test_another_models_checkpoint_is_refused": {
        "worker/engine.py": ("str(error)",),
    },
    "test_errors.py::test_a_home_in_use_loses_nothing": {
        "dry_run.py": ("Another ftis-node daemon is running on the home ….",),
    },
    "test_errors_within.py::test_8_bits_need_a_gpu_and_a_library": {
        "learner/optimiser.py": (
            "8-bit AdamW needs a CUDA device.",
            "8-bit AdamW needs bitsandbytes.",
        ),
    },
    "test_errors_within.py::test_a_checkpoint_of_nothing_and_one_that_goes_away": {
        "trained.py": (
            "The checkpoint … cannot be read: ….",
            "The checkpoint … does not say of which model it is.",
        ),
    },
    "test_errors_within.py::test_a_compute_process_that_only_fails_is_given_up": {
        "node.py": ("The compute process failed … times in a row, at last with: …",),
    },
    "test_errors_within.py::test_a_demo_whose_node_ends_says_its_last_words": {
        "demo.py": ("Node … ended by itself: …",),
    },
    "test_errors_within.py::test_a_file_that_an_experiment_names_is_missing": {
        "lab/spec.py": ("Cannot read …: ….",),
    },
    "test_errors_within.py::test_a_full_disk_ends_the_daemon_with_what_to_do": {
        "node.py": ("The home … cannot be written or read: ….",),
    },
    "test_errors_within.py::test_a_machine_without_ports": {
        "swarm/addresses.py": ("There is no free port on ….",),
    },
    "test_errors_within.py::test_a_model_without_checkpointing_and_one_that_is_random_in_training": {
        "policy/load.py": ("… has no gradient checkpointing.",),
        "policy/ready.py": ("… has a dropout that cannot be switched off.",),
    },
    "test_errors_within.py::test_a_network_daemon_that_does_not_start_says_why": {
        "swarm/p2pd.py": ("The network daemon p2pd did not start: …",),
    },
    "test_errors_within.py::test_a_question_without_a_token": {
        "evaluation.py": ("The tokenizer of … makes no token of a prompt of ….",),
    },
    "test_errors_within.py::test_a_report_replaces_no_file": {
        "doctor/bugreport.py": ("… exists already.",),
    },
    "test_errors_within.py::test_an_index_needs_a_page_with_a_place": {
        "lab/reporting/index.py": (
            "… cannot be read: ….",
            "… has no place for the claims.",
        ),
    },
    "test_errors_within.py::test_errors_come_through_the_pipe_as_they_were": {
        "worker/client.py": ("error['what']",),
    },
    "test_errors_within.py::test_network_namespaces_that_cannot_be_had": {
        "lab/bench/namespaces.py": (
            "Network namespaces need root.",
            "`…` failed: ….",
        ),
    },
    "test_errors_within.py::test_one_key_is_one_node": {
        "node.py": ("Another node with the key of … is running somewhere: ….",),
    },
    "test_errors_within.py::test_packets_that_cannot_be_read": {
        "store/packets.py": ("The database … cannot be read: ….",),
    },
    "test_errors_within.py::test_what_ends_a_trial_is_told_with_what_to_do": {
        "lab/crew.py": (
            "A process of the lab ended by itself: killed, or out of memory.",
            "A trial failed: …",
            "… cannot be written or read: ….",
        ),
    },
    "test_eval.py::test_a_checkpoint_of_another_model": {
        "trained.py": ("The checkpoint … does not fit …: they differ in ….",),
    },
    "test_eval.py::test_a_damaged_checkpoint_is_passed_over_and_stays_where_it_is": {
        "trained.py": (
            "Every checkpoint under … is damaged.",
            "str(error)",
        ),
    },
    "test_eval.py::test_a_mistake_is_told_in_two_sentences": {
        "evaluation.py": ("… has room for … tokens, but the longest prompt has … and a completion",),
    },
    "test_home.py::test_a_second_daemon_on_the_home_is_told_so": {
        "store/home.py": ("Another ftis-node daemon is running on the home ….",),
    },
    "test_identity.py::test_a_key_that_cannot_be_written_is_told": {
        "swarm/identity.py": ("The key file … cannot be used: ….",),
    },
    "test_judge.py::test_a_process_that_cannot_start_is_an_error": {
        "tasks/judge.py": ("The process that runs math-verify did not start.",),
    },
    "test_judge.py::test_no_run_can_have_the_rule": {
        "tasks/rewards.py": (
            "The reward rule … is for a node's own evaluation, and no run can have ",
            "There is no reward rule ….",
        ),
    },
    "test_judge.py::test_without_math_verify_a_person_is_told_what_to_install": {
        "tasks/judge.py": ("Judging mathematics needs math-verify, which is not installed.",),
    },
    "test_lab_experiment.py::test_what_a_lab_file_cannot_mean_is_told_with_its_place": {
        "lab/loading.py": (
            "Cell … compares objectives but sets parts of them.",
            "Cell … has no node that learns.",
            "Cell … is horizontal, where each of two or more nodes makes its part o",
            "Cell …, node …: …",
            "Cell …, node …: … is not a setting here.",
            "Cell …: a run has no … to be set here.",
            "Cell …: a script has no pace of its own.",
        ),
    },
    "test_lab_report.py::test_a_directory_without_results_is_an_error_that_says_what_to_do": {
        "lab/reporting/results.py": ("No trial of … has finished.",),
    },
    "test_lab_trial.py::test_models_of_different_tokenizers_share_no_trial": {
        "lab/participant.py": ("Node … shares no run with the first node. …",),
    },
    "test_packet_store.py::test_a_damaged_database_says_what_to_do": {
        "store/packets.py": ("The database … cannot be used: ….",),
    },
    "test_packet_store.py::test_a_database_of_a_newer_version_says_what_to_do": {
        "store/packets.py": ("The database … has schema …, this version knows ….",),
    },
    "test_policy_load.py::test_a_model_that_changes_its_logits_after_the_head_is_refused": {
        "policy/load.py": ("… transforms its logits after the head (…), which scoring does not kno",),
    },
    "test_policy_load.py::test_a_model_with_fewer_rows_than_its_tokenizer_has_ids_is_refused": {
        "policy/load.py": ("… has … embedding rows for the … token ids of its tokenizer.",),
    },
    "test_policy_load.py::test_lora_on_modules_that_the_model_does_not_have_is_refused": {
        "policy/load.py": ("LoRA cannot be added to …: …",),
    },
    "test_replay.py::test_a_daemons_training_comes_out_again_bit_for_bit": {
        "lab/replaying/replay.py": ("A daemon is running on the home ….",),
    },
    "test_replay.py::test_a_log_that_lacks_a_step_or_is_damaged_says_where": {
        "lab/replaying/lineage.py": (
            "The log has no line for step ….",
            "The log's line … of step … cannot be used (…).",
        ),
    },
    "test_replay.py::test_a_packet_that_was_altered_is_not_trained_on": {
        "lab/replaying/replay.py": ("The packet …… in … is damaged….",),
    },
    "test_replay.py::test_a_packet_that_was_evicted_ends_the_replay_before_its_step": {
        "lab/replaying/replay.py": ("what",),
    },
    "test_replay.py::test_it_ends_at_the_step_that_was_asked_for": {
        "lab/replaying/lineage.py": ("There is no step … on the way to this home's weights.",),
    },
    "test_replay.py::test_what_is_not_what_it_was_is_refused": {
        "lab/replaying/replay.py": (
            "The data of … or the tokenizer of … are not what they were.",
            "… cannot be written: ….",
            "… is of another run than the log.",
        ),
    },
    "test_run.py::test_a_run_file_that_peers_could_not_read_is_refused": {
        "run.py": ("The run file is too long with its characters escaped.",),
    },
    "test_saving.py::test_if_going_back_does_not_help_the_node_says_so": {
        "saving.py": ("The training gives no finite numbers any more, and older checkpoints d",),
    },
    "test_score.py::test_a_model_that_cannot_take_the_probe_is_refused_with_a_sentence": {
        "policy/ready.py": ("… cannot be scored: …",),
    },
    "test_score.py::test_a_model_that_changes_its_logits_after_the_head_is_refused": {
        "policy/ready.py": ("… changes its logits in a way that scoring does not know.",),
    },
    "test_score.py::test_lora_on_the_head_is_refused": {
        "policy/ready.py": ("LoRA on the output head is not supported.",),
    },
    "test_tasks.py::test_a_wrong_download_is_refused_and_leaves_nothing": {
        "tasks/download.py": ("Cannot download … (…).",),
    },
    "test_tasks.py::test_training_and_evaluation_use_the_same_field": {
        "tasks/jsonl.py": ("… has the field … but … has ….",),
    },
    "test_tokenizer.py::test_a_tokenizer_that_cannot_be_read_is_refused": {
        "policy/tokenizer.py": ("This model has only a slow tokenizer.",),
    },
    "test_tokenizer.py::test_a_tokenizer_without_an_end_is_refused": {
        "policy/tokenizer.py": ("This tokenizer has no end-of-sequence token.",),
    },
}
