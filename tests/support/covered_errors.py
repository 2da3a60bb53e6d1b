"""Where errors are reached that no row of `tests.support.mistakes` reaches.

By test, then by file: the first words of each error, as they stand in the code with … for what is put in. A new error
without a row and without an entry here fails `tests/test_errors.py`.
"""

from __future__ import annotations

COVERED: dict[str, dict[str, tuple[str, ...]]] = {
    "test_vllm.py::test_it_is_refused_by_the_name_of_what_is_missing": {
        "policy/generate/vllm.py": (
            "The vLLM server … refused to sample",
            "The vLLM server … tells log-probs before the temperature.",
            "The vLLM server … takes … tokens",
            "The vLLM server … cannot be used",
            "The vLLM server … has the model …, whose tokenizer is another.",
            "The log-probs of the vLLM server … are off",
        ),
    },
    "test_vllm.py::test_a_key_goes_with_every_question": {
        "policy/generate/vllm.py": ("The vLLM server … wants another key.",),
    },
    "test_vllm.py::test_what_is_no_address_is_refused": {
        "policy/generate/vllm.py": ("… is no address of a server.",),
    },
    "test_vllm.py::test_off_this_machine_it_needs_a_key": {
        "policy/generate/vllm.py": ("The vLLM server … is not on this machine",),
    },
    "test_vllm.py::test_it_goes_with_one_device": {
        "config/checks.py": ("engine=vllm (…) goes with one device",),
    },
    "test_devices.py::test_devices_that_cannot_train_together_are_refused": {
        "config/checks.py": ("… (…) cannot train together.",),
    },
    "test_devices.py::test_what_shards_do_not_go_with_is_refused": {
        "config/checks.py": ("sharded (…) does not go with ….",),
    },
    "test_bench_train.py::test_a_model_that_does_not_fit_is_refused_before_it_is_made": {
        "lab/bench/model.py": ("… does not fit: by the plan it takes … of ….",),
    },
    "test_devices.py::test_one_device_is_nothing_to_compare": {
        "cli/bench.py": ("One device is nothing to compare.",),
    },
    "test_federation.py::test_nodes_in_processes_of_their_own_cannot_average": {
        "lab/participant.py": ("Private rows and averaged weights need all nodes in one process.",),
    },
    "test_settings.py::test_a_running_node_changes_what_it_can_and_nothing_else": {
        "config/settings.py": ("… cannot be changed while the node runs.",),
    },
    "test_life.py::test_a_node_that_is_to_finish_before_it_has_anything_to_lose_ends_at_once": {
        "node/daemon.py": ("The node is still starting.",),
    },
    "test_life.py::test_a_node_in_the_background_is_paused_resumed_and_finished": {
        "observe/api.py": ("refusal['what']",),
    },
    "test_private.py::test_what_the_commands_refuse": {
        "cli/common.py": ("… is no time.",),
        "cli/invitations.py": (
            "This node may not invite to its private run.",
            "This node cannot remove that member",
            "The invitation would have no address",
            "Nobody is named.",
            "The home … has no run yet.",
        ),
    },
    "test_private.py::test_members_are_listed_with_who_invited_them": {
        "cli/invitations.py": ("No member calls itself …", "… members call themselves …"),
    },
    "test_private.py::test_an_invitation_to_an_open_run_is_no_ticket": {
        "cli/invitations.py": ("The run is open: it has no members.",),
    },
    "test_private.py::test_what_join_refuses": {
        "cli/invitations.py": ("… is no invitation, and no file that holds one.",),
        "cli/join.py": ("--private begins a run, and peers have one.",),
        "node/options.py": ("The invitation is to run …", "The run is open"),
    },
    "test_private.py::test_daemons_an_invitation_and_a_removal": {
        "node/assembly.py": (
            "This node is no member of its private run",
            "None of the peers takes this node into the private run",
        ),
    },
    "test_private.py::test_a_damaged_list_of_members_says_what_to_do": {
        "swarm/roster.py": ("The list of members … cannot be read",),
    },
    "test_private.py::test_row_49_what_is_no_invitation": {
        "swarm/invitation.py": (
            "The invitation is of version …",
            "The invitation was changed on its way",
            "The invitation has expired.",
            "An invitation begins with ftis:",
            "That is no invitation, or not a whole one.",
        ),
    },
    "test_lan.py::test_runs_lists_what_there_is": {
        "cli/runs.py": ("The local network cannot be asked from …",),
    },
    "test_lan.py::test_join_takes_the_only_run_and_asks_for_a_choice_among_several": {
        "cli/runs.py": ("There are … runs on the local network", "Run … is here, but …."),
    },
    "test_watch.py::test_what_watch_refuses": {
        "cli/watch.py": ("--json is for --for", "The home … is a node's", "No swarm is named."),
    },
    "test_watch.py::test_an_observer_of_a_private_run_has_to_be_a_member": {
        "node/observer.py": ("The home … looks at run …, the invitation is to another.",),
    },
    "test_nf4.py::test_what_cannot_be_quantised_is_refused": {
        "config/checks.py": ("NF4 (…) is for frozen weights, and full training (…) has none.",),
        "policy/nf4.py": ("… has no linear modules for NF4.", "NF4 needs bitsandbytes."),
    },
    "test_fit.py::test_four_bits_are_for_frozen_weights": {
        "cli/fit.py": ("NF4 is for frozen weights, and full training has none.",),
    },
    "test_checkpointing.py::test_layers_go_on_beside_the_weights_that_they_were_trained_beside": {
        "node/checkpointing.py": ("The LoRA layers under … were trained with quantisation=….",),
    },
    "test_checkpointing.py::test_a_home_keeps_its_lora_layers_and_refuses_others_by_name": {
        "node/checkpointing.py": ("The LoRA layers under … were trained with …=…, not ….",),
    },
    "test_bench_step.py::test_a_trace_that_cannot_be_written_is_told_before_the_steps": {
        "lab/bench/step.py": ("… cannot be written: ….",),
    },
    "test_preflight.py::test_ten_lines_that_cannot_be_used_are_told_and_how_many_more": {
        "tasks/jsonl.py": ("… has … lines that cannot be used:",),
    },
    "test_shortage.py::test_the_higher_limit_that_is_named_is_enough": {
        "worker/shortage.py": ("what",),
    },
    "test_snapshot.py::test_a_full_disk_is_a_persons_business_and_another_fault_is_not": {
        "worker/engine.py": ("There is no room for a checkpoint in …",),
    },
    "test_errors_within.py::test_waiting_for_a_pause_ends_when_something_else_was_asked_for": {
        "cli/life.py": ("The node does not …: it is ….",),
    },
    "test_api.py::test_a_daemon_that_does_not_answer_is_not_waited_for_for_ever": {
        "observe/api.py": ("The daemon on this home did not answer within … s.",),
    },
    "test_api.py::test_a_daemon_that_is_starting_is_waited_for": {
        "cli/asking.py": ("The daemon on … is starting, or ending, and does not answer.",),
    },
    "test_api.py::test_what_another_version_answers_is_read_as_far_as_it_can_be": {
        "observe/answers.py": ("The daemon's answer cannot be read: ….",),
    },
    "test_api.py::test_reading_never_acts": {
        "observe/api.py": ("The daemon answered … with … ….",),
    },
    "test_checks.py::test_a_choice_that_is_none_is_answered_with_the_nearest": {
        "config/settings.py": ("Setting … from … is wrong: … (got …).",),
    },
    "test_checks.py::test_a_number_is_refused_early_exactly_where_the_objective_refuses_it": {
        "config/checks.py": ("The … cannot be … (…).",),
        "worker/engine.py": ("The objective cannot be set up: ….",),
    },
    "test_checks.py::test_each_name_is_taken_and_a_misspelt_one_is_answered_with_the_nearest": {
        "config/checks.py": ("There is no … … (…).",),
    },
    "test_checks.py::test_what_contradicts_is_told_with_where_it_came_from": {
        "config/checks.py": (
            "LoRA layers (…) have nowhere to go, for lora_targets is empty (…).",
            "Packets alone may take … MB (…), but the home no more than … GB (…).",
            "Peers (…) and the page (…) cannot both have the port ….",
            "The host … is no IP address (…).",
            "The http_host … is neither an IP address nor a name (…).",
            "announce (…) tells others where to dial, but listen is false (…).",
            "by_need is false (…), and … (…) takes only answers",
            "own_share = 0 (…) generates nothing, so no row is needed",
            "own_share = 0 (…) generates nothing, and … (…) learns from own samples",
            "own_share = 0 (…) generates nothing, and … (…) measures others' samples",
            "vram_gb (…) and vram_share (…) both limit the memory.",
            "… is no device (…).",
        ),
    },
    "test_condition.py::test_a_limit_on_disk_leaves_packets_and_steps_what_checkpoints_and_logs_do_not_need": {
        "node/assembly.py": ("The home may take … on disk, but checkpoints, packets and logs need",),
    },
    "test_config.py::test_a_file_that_is_not_sound_is_told_with_its_remedy": {
        "policy/names.py": ("There is no model …: no such folder, alias or built-in model.",),
        "config/settings.py": (
            "There is no profile … (…).",
            "Unknown setting … in ….",
        ),
        "swarm/addresses.py": (
            "An announced address names a port, but this node takes any.",
            "The peer address … is not a multiaddr that ends in /p2p/ID.",
        ),
    },
    "test_config.py::test_the_same_mistakes_end_a_join_before_anything_starts": {
        "config/settings.py": ("The environment variable … is no setting.",),
    },
    "test_daemons.py::test_a_home_that_trained_alone_does_not_join_another_run_by_mistake": {
        "node/assembly.py": ("The --peers are all in another run than the home …, which belongs to r",),
    },
    "test_doctor.py::test_a_hub_that_does_not_give_the_model": {
        "policy/hub.py": (
            "The hub answers … for ….",
            "The hub does not give … to …: it is gated, private, or does not exist.",
            "The hub has no model …, or none with a ….",
        ),
    },
    "test_handshake.py::test_a_home_whose_peers_all_speak_another_protocol_says_so_and_not_that_their_run_differs": {
        "node/assembly.py": ("None of the --peers can work with this node: ….",),
    },
    "test_engine.py::test_a_misspelt_objective_names_the_nearest": {
        "worker/engine.py": ("There is no objective ….",),
    },
    "test_context.py::test_a_row_longer_than_the_runs_cap_is_named_with_its_length": {
        "fit/context.py": ("… is a prompt of … tokens, and the run allows …….",),
    },
    "test_context.py::test_a_strangers_run_that_no_prompt_could_fit_is_refused_before_the_weights_are_loaded": {
        "fit/context.py": ("The run has completions of up to … tokens, but … ….",),
    },
    "test_engine.py::test_another_models_checkpoint_is_refused": {
        "worker/engine.py": ("str(error)",),
    },
    "test_errors_within.py::test_8_bits_need_a_library": {
        "learner/optimiser.py": ("8-bit AdamW needs bitsandbytes.",),
    },
    "test_errors_within.py::test_a_checkpoint_of_nothing_and_one_that_goes_away": {
        "worker/restore.py": ("The checkpoint … does not say of which model it is.",),
    },
    "test_errors_within.py::test_a_compute_process_that_only_fails_is_given_up": {
        "node/compute.py": ("The compute process failed … times in a row, at last with: …",),
    },
    "test_errors_within.py::test_a_daemon_that_does_not_start_says_why_or_where": {
        "cli/detach.py": (
            "The daemon ended while it was starting (exit code …).",
            "what.removeprefix('error: ')",
        ),
    },
    "test_errors_within.py::test_a_demo_whose_node_ends_says_its_last_words": {
        "demo.py": ("Node … ended by itself: …",),
    },
    "test_descriptors.py::test_row_33_a_limit_too_low_to_start_with_is_not_called_a_full_disk": {
        "store/home.py": ("The node needs more open files than the … that it may have.",),
    },
    "test_errors_within.py::test_a_device_that_torch_has_and_a_node_does_not": {
        "policy/load.py": ("A node cannot train on the device ….",),
    },
    "test_errors_within.py::test_a_file_that_an_experiment_names_is_missing": {
        "lab/spec.py": ("Cannot read …: ….",),
    },
    "test_errors_within.py::test_a_folder_that_may_not_be_read": {
        "export/folder.py": ("… cannot be read: ….",),
    },
    "test_errors_within.py::test_a_full_disk_ends_the_daemon_with_what_to_do": {
        "store/home.py": ("The home … cannot be written or read: ….",),
    },
    "test_errors_within.py::test_a_log_that_is_none": {
        "cli/logs.py": ("The log … cannot be read: ….",),
    },
    "test_errors_within.py::test_a_home_that_was_removed_is_not_called_full": {
        "store/home.py": ("The home … was removed while the node ran.",),
    },
    "test_errors_within.py::test_pictures_need_matplotlib": {
        "observe/plot.py": ("Pictures need matplotlib, which is not installed.",),
    },
    "test_errors_within.py::test_a_machine_without_ports": {
        "swarm/addresses.py": ("There is no free port on ….",),
    },
    "test_errors_within.py::test_a_model_without_checkpointing_and_one_that_is_random_in_training": {
        "policy/load.py": ("… has no gradient checkpointing.",),
        "policy/ready.py": ("… has a dropout that cannot be switched off.",),
    },
    "test_errors_within.py::test_a_network_daemon_that_does_not_start_says_why": {
        "swarm/wire/p2pd.py": ("The network daemon p2pd did not start: …",),
    },
    "test_errors_within.py::test_a_node_without_a_page_says_so": {
        "cli/local.py": ("The node on this home serves no page.",),
    },
    "test_errors_within.py::test_a_question_without_a_token": {
        "fit/context.py": ("… has no token in the tokenizer of …….",),
    },
    "test_errors_within.py::test_a_report_replaces_no_file": {
        "preflight/bugreport.py": ("… exists already.",),
    },
    "test_errors_within.py::test_a_task_in_python_has_rows_and_a_source_file": {
        "tasks/own.py": (
            "The code of the task … has no source file that others could be compare",
            "The task … has nothing to train on.",
        ),
    },
    "test_errors_within.py::test_an_index_needs_a_page_with_a_place": {
        "lab/reporting/index.py": (
            "… cannot be read: ….",
            "… has no place for the claims.",
        ),
    },
    "test_errors_within.py::test_errors_come_through_the_pipe_as_they_were": {
        "worker/client.py": ("fault.what",),
    },
    "test_errors_within.py::test_network_namespaces_that_cannot_be_had": {
        "lab/bench/namespaces.py": (
            "Network namespaces need root.",
            "`…` failed: ….",
        ),
    },
    "test_errors_within.py::test_one_key_is_one_node": {
        "swarm/twin.py": ("Another node with the key of … is running somewhere: ….",),
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
        "worker/restore.py": ("The checkpoint … does not fit …: they differ in ….",),
    },
    "test_eval.py::test_a_damaged_checkpoint_is_passed_over_and_stays_where_it_is": {
        "worker/restore.py": (
            "Every checkpoint under … is damaged.",
            "str(error)",
        ),
    },
    "test_eval.py::test_a_mistake_is_told_in_two_sentences": {
        "cli/common.py": ("--set … has no value.",),
        "cli/eval.py": (
            "… cannot be written: ….",
            "… is a model and no checkpoint, so --model says nothing.",
        ),
        "fit/context.py": ("… is a prompt of … tokens and a completion may have …, but",),
        "tasks/__init__.py": ("There is no task ….",),
        "tasks/jsonl.py": ("Cannot read …: ….",),
        "worker/restore.py": (
            "The folder … holds neither a model nor a checkpoint.",
            "The home … has no checkpoint yet.",
            "There is no checkpoint ….",
        ),
    },
    "test_eval.py::test_it_is_compared_with_what_a_person_names_and_shown_harmlessly": {
        "cli/eval.py": (
            "What … is for is not said.",
            "… is a model and no checkpoint, so it has no base model.",
        ),
    },
    "test_eval.py::test_nothing_is_trained_on_a_test": {
        "tasks/__init__.py": ("The task math500 is a test: it has nothing to train on, and its verdic",),
    },
    "test_export.py::test_a_checkpoint_that_is_removed_meanwhile_says_try_again": {
        "worker/restore.py": ("The checkpoint … cannot be read any more: ….",),
    },
    "test_export.py::test_a_folder_is_replaced_only_if_it_is_told_to_and_a_model": {
        "export/folder.py": (
            "… does not look like a model, so it is not replaced.",
            "… holds the checkpoint itself, or lies in it.",
            "… is there and not empty.",
        ),
    },
    "test_export.py::test_a_folder_with_more_than_a_model_is_not_replaced": {
        "export/folder.py": ("… holds …, which is no part of a model, so it is not replaced.",),
    },
    "test_export.py::test_the_base_model_is_not_replaced": {
        "export/folder.py": ("… holds the base model of the checkpoint.",),
    },
    "test_export.py::test_layers_that_hold_no_numbers_are_not_merged": {
        "export/model.py": ("The LoRA layers of … cannot be merged: ….",),
    },
    "test_export.py::test_mistakes_are_told_before_anything_is_written": {
        "cli/export.py": ("… is a model and no checkpoint: there is nothing trained in it to expo",),
        "export/folder.py": (
            "… cannot be written: ….",
            "… is there and is not a directory.",
        ),
        "export/model.py": (
            "The checkpoint … does not fit …: they differ in ….",
            "… is of a model that was trained in full, so there is no adapter.",
        ),
    },
    "test_fit.py::test_mistakes_are_told_with_their_remedy": {
        "cli/fit.py": (
            "The caps of the task … are not known here.",
            "There is no GPU here to ask for its memory.",
        ),
        "policy/load.py": ("The model … (…) cannot be loaded: …",),
    },
    "test_home.py::test_a_second_daemon_on_the_home_is_told_so": {
        "store/home.py": ("Another ftis-node daemon is running on the home ….",),
    },
    "test_home.py::test_a_home_that_cannot_be_made_says_so": {
        "store/home.py": ("The home … cannot be used: ….",),
    },
    "test_identity.py::test_a_key_that_cannot_be_written_is_told": {
        "swarm/identity.py": ("The key file … cannot be used: ….",),
    },
    "test_judge.py::test_a_process_that_cannot_start_is_an_error": {
        "tasks/judge.py": ("The process that judges answers by … did not start.",),
    },
    "test_judge.py::test_rules_that_need_a_process_are_not_scored_without_one": {
        "tasks/rewards.py": ("The reward rule … needs a process of its own.",),
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
            "Cell …: a script that needs no time never ends.",
        ),
    },
    "test_lab_report.py::test_a_directory_without_results_is_an_error_that_says_what_to_do": {
        "lab/reporting/results.py": ("No trial of … has finished.",),
    },
    "test_lab_trial.py::test_models_of_different_tokenizers_share_no_trial": {
        "lab/participant.py": ("Node … shares no run with the first node. …",),
    },
    "test_logs.py::test_without_a_log_it_says_what_to_do": {
        "cli/logs.py": ("There is no log in ….",),
    },
    "test_optimiser.py::test_an_optimiser_that_cannot_be_saved_is_refused_before_the_model_is_loaded": {
        "worker/planning.py": ("The optimiser … cannot be used here: …",),
    },
    "test_own_tasks.py::test_a_run_of_strangers_gets_no_code_and_no_parser_that_the_owner_did_not_name": {
        "config/run.py": (
            "The run judges answers by the rule …, which ….",
            "The run's reward rule is …, not ….",
            "The run's task is Python code, …, which is imported only if you name i",
        ),
    },
    "test_own_tasks.py::test_code_that_cannot_be_used_is_told": {
        "tasks/own.py": (
            "The function … failed: ….",
            "The function … returns …, not a Task.",
            "The module … (…) has no function ….",
            "The module … cannot be imported: ….",
            "The task … cannot be a run's name of a Python function.",
            "There is no Python module …, neither in … nor installed.",
        ),
    },
    "test_own_tasks.py::test_a_reward_whose_process_does_not_start_is_an_error": {
        "tasks/own.py": ("The process that runs the reward function of … was not ready within",),
    },
    "test_own_tasks.py::test_code_that_nobody_here_named_is_not_imported": {
        "tasks/own.py": ("The task … is Python code, which is imported only if the owner of this",),
    },
    "test_own_tasks.py::test_make_task_holds_out_and_checks": {
        "tasks/jsonl.py": ("… has only …, and all would be held out, for tests",),
        "tasks/own.py": (
            "A reward cannot take … seconds.",
            "Row … of the task has an answer that is not ….",
            "Row … of the task has no question that is a text.",
            "The task has no rows.",
            "The template does not contain {question} exactly once.",
        ),
    },
    "test_own_tasks.py::test_nodes_whose_code_differs_are_told": {
        "config/run.py": ("The … of … is not the run's: …, not ….",),
    },
    "test_own_tasks.py::test_other_tasks_keep_their_rule": {
        "tasks/__init__.py": ("The task … has the reward rule …, not ….",),
    },
    "test_packet_store.py::test_a_damaged_database_says_what_to_do": {
        "store/packets.py": ("The database … cannot be used: ….",),
    },
    "test_policy_load.py::test_a_device_that_is_none_is_refused": {
        "policy/load.py": ("… is no device.",),
    },
    "test_policy_load.py::test_a_folder_without_a_model_is_refused": {
        "policy/names.py": ("The folder … holds no model (config.json is missing).",),
    },
    "test_dry_run.py::test_what_a_start_refuses_the_dry_run_refuses_in_the_same_words": {
        "policy/load.py": (
            "The model … (…) has no tokenizer.",
            "The weights of … lack ……, and would be random there.",
            "… has … embedding rows for the … token ids of its tokenizer.",
        ),
    },
    "test_policy_load.py::test_a_model_that_changes_its_logits_after_the_head_is_refused": {
        "policy/load.py": ("… transforms its logits after the head (…), which scoring does not kno",),
    },
    "test_policy_load.py::test_lora_on_modules_that_the_model_does_not_have_is_refused": {
        "policy/load.py": ("LoRA cannot be added to …: …",),
    },
    "test_policy_load.py::test_without_cuda_auto_is_the_cpu_and_cuda_is_refused": {
        "policy/load.py": ("There is no usable CUDA device.",),
    },
    "test_replay.py::test_a_daemons_training_comes_out_again_bit_for_bit": {
        "lab/replaying/replay.py": ("A daemon is running on the home ….",),
    },
    "test_replay.py::test_a_log_that_cannot_be_followed_says_where": {
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
    "test_replay.py::test_a_task_in_python_is_replayed_by_whoever_names_it": {
        "lab/replaying/replay.py": ("The task of this home is …, not ….",),
    },
    "test_replay.py::test_it_ends_at_the_step_that_was_asked_for": {
        "lab/replaying/lineage.py": ("There is no step … on the way to this home's weights.",),
    },
    "test_replay.py::test_what_is_not_what_it_was_is_refused": {
        "lab/replaying/replay.py": (
            "The data or the code of …, or the tokenizer of …, are not what they were.",
            "… cannot be written: ….",
            "… is of another run than the log.",
        ),
    },
    "test_run.py::test_a_key_that_quotes_a_line_number_does_not_decide_which_line_is_named": {
        "config/run.py": ("Line … of the run file is not TOML: ….",),
    },
    "test_run.py::test_a_missing_key_is_named": {
        "config/run.py": ("`…` is missing from ….",),
    },
    "test_run.py::test_a_run_file_that_peers_could_not_read_is_refused": {
        "config/run.py": ("The run file is too long with its characters escaped.",),
    },
    "test_run.py::test_a_run_whose_packets_would_be_too_large_is_refused": {
        "config/run.py": ("…… is wrong: ….",),
    },
    "test_run.py::test_an_unknown_key_cannot_write_to_the_terminal": {
        "config/run.py": ("…… has an unknown key ….",),
    },
    "test_run.py::test_an_unreadable_run_file_is_a_usage_error": {
        "config/run.py": (
            "The run file … cannot be read: ….",
            "The run file … is not UTF-8 text.",
        ),
    },
    "test_run.py::test_any_text_is_a_run_file_or_a_usage_error": {
        "config/run.py": ("The run file has no [run] table.",),
    },
    "test_run.py::test_rubbish_is_a_usage_error": {
        "config/run.py": (
            "In the run file, … is not a table.",
            "The run file is longer than … characters.",
            "The run file nests too deeply.",
        ),
    },
    "test_checkpointing.py::test_if_going_back_does_not_help_the_node_says_so": {
        "node/checkpointing.py": ("The training gives no finite numbers any more, and older checkpoints d",),
    },
    "test_score.py::test_a_model_that_cannot_be_scored_is_refused_with_a_sentence": {
        "policy/ready.py": ("… cannot be scored: …", "LoRA on the output head is not supported."),
    },
    "test_ready.py::test_a_model_that_changes_its_logits_after_the_head_is_refused_in_bf16_too": {
        "policy/ready.py": ("… changes its logits in a way that scoring does not know.",),
    },
    "test_settings.py::test_a_file_that_cannot_be_read_is_refused": {
        "config/settings.py": (
            "The … … cannot be read: ….",
            "The … … is not valid TOML: ….",
            "The … … nests too deeply.",
        ),
    },
    "test_tasks.py::test_a_file_that_cannot_be_used_says_where": {
        "tasks/jsonl.py": (
            "… is empty.",
            "…, line …, ….",
        ),
    },
    "test_tasks.py::test_a_wrong_download_is_refused_and_leaves_nothing": {
        "tasks/download.py": ("Cannot download … (…).",),
    },
    "test_tasks.py::test_arithmetic_takes_no_files": {
        "tasks/__init__.py": ("The task … makes its own data.",),
    },
    "test_tasks.py::test_training_and_evaluation_use_the_same_field": {
        "tasks/jsonl.py": ("… has the field … but … has ….",),
    },
    "test_tokenizer.py::test_a_tokenizer_that_cannot_be_read_is_refused": {
        "tokenizer/fingerprint.py": ("This model has only a slow tokenizer.",),
    },
    "test_tokenizer.py::test_a_tokenizer_without_an_end_is_refused": {
        "tokenizer/chat.py": ("This tokenizer has no end-of-sequence token.",),
    },
    "test_chat.py::test_a_run_of_one_tokenizer_has_one_chat_and_others_are_refused": {
        "tokenizer/chat.py": ("The run's questions are put in a chat of digest",),
    },
    "test_episodes.py::test_a_run_of_another_number_of_turns_and_one_of_any_tokenizer_are_refused": {
        "config/run.py": ("Episodes of … have up to … turns", "An episode of … has up to … turns"),
    },
    "test_episodes.py::test_a_template_without_a_text_between_answers_is_no_chat_for_episodes": {
        "tokenizer/chat.py": ("This model's chat template has no fixed text between",),
    },
    "test_chat.py::test_a_template_that_cannot_be_used_is_told_and_auto_goes_on_in_plain_text": {
        "tokenizer/chat.py": ("This model cannot be asked in a chat",),
    },
    "test_gym.py::test_a_machine_without_a_jail_is_told_by_the_dry_run_and_by_the_judge": {
        "tasks/judge.py": ("What … judges is run, and nothing can lock it in here.",),
    },
    "test_gym.py::test_a_name_that_is_none_is_refused_before_rows_are_made": {
        "tasks/packaged.py": ("… ….",),
    },
    "test_gym.py::test_without_the_package_the_extra_is_named": {
        "tasks/packaged.py": ("The task is of …, which is not installed.",),
    },
    "test_gym.py::test_rows_that_take_too_long_or_fail_are_told": {
        "tasks/packaged.py": ("The rows of …:… are not made within … s.", "… failed"),
    },
    "test_gym.py::test_a_task_of_one_row_has_nothing_to_hold_out": {
        "tasks/packaged.py": ("The task … has no questions beside those to train on.",),
    },
    "test_gym.py::test_a_strangers_run_makes_nobody_run_scorers": {
        "config/run.py": ("The run's task is …, which ….",),
    },
    "test_export.py::test_nothing_is_uploaded_without_a_yes": {
        "cli/export.py": ("--public and --yes are for --to-hub.", "Nobody can be asked whether to upload."),
    },
    "test_export.py::test_a_failed_upload_leaves_the_folder_and_says_how_to_go_on": {
        "export/upload.py": ("… was written, but not uploaded to …: …",),
    },
    "test_tracking.py::test_a_library_that_is_missing_is_named_before_anything_starts": {
        "observe/tracking.py": ("The tracker … is not installed.",),
    },
    "test_hub_tasks.py::test_columns_have_options_and_are_part_of_the_name": {
        "tasks/hub.py": ("--question and --answer name columns",),
    },
    "test_hub_tasks.py::test_what_cannot_be_used_is_told": {
        "tasks/hub.py": (
            "… names no dataset of a hub.",
            "… has … of the name ….",
            "The dataset … ….",
            "…:… has no column ….",
            "Line … of … of … is no JSON object.",
            "… of … cannot be read: ….",
            "… has no rows with a text in ….",
        ),
    },
    "test_hub_tasks.py::test_what_is_too_large_is_refused_before_it_is_downloaded": {
        "tasks/hub.py": ("The files of … have", "… has …, and the disk has … left.", "… has more than … rows."),
    },
    "test_hub_tasks.py::test_rows_without_an_answer_under_the_rule_are_left_out_if_they_are_few": {
        "tasks/hub.py": ("Of the … rows of …",),
    },
    "test_hub_tasks.py::test_without_a_hub_or_pyarrow_it_says_so": {
        "tasks/hub.py": ("… is in Parquet, which needs pyarrow.",),
    },
    "test_config.py::test_a_new_run_for_models_of_any_tokenizer": {
        "cli/run.py": ("--any-tokenizer and --model contradict one another.",),
    },
    "test_text_run.py::test_a_tokenizer_that_cannot_write_the_task_is_told": {
        "config/run.py": ("… can take no part in a run of any tokenizer: ….",),
    },
    "test_text_run.py::test_a_prompt_longer_than_the_run_allows_is_refused": {
        "fit/context.py": ("… is a prompt of … bytes, and the run allows ….",),
    },
    "test_tokenizer_codec.py::test_a_tokenizer_without_an_end_of_its_own_has_no_codec": {
        "tokenizer/codec.py": ("This tokenizer names no end-of-sequence token as its own.",),
    },
    "test_migration.py::test_a_home_of_another_version_or_of_none_is_left_as_it_is": {
        "store/migrations.py": (
            "… has schema …, and this version of ftis-node knows … to ….",
            "… does not say its schema (…): it is damaged.",
        ),
    },
    "test_web.py::test_a_port_that_is_taken_is_told_with_what_to_do": {
        "observe/web.py": ("The page cannot be served at … port …: ….",),
    },
    "test_rewards.py::test_an_unknown_rule_is_a_usage_error": {
        "tasks/rewards.py": ("There is no reward rule ….",),
    },
}
