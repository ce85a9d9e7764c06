"""Every fault that the program must stand, with the tests that bring it about. A fault without a test fails here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTS = "tests/parallel/test_faults.py::"
RESUMING = "tests/parallel/test_resuming.py::"
STALLS = "tests/parallel/test_stalls.py::"
RANKS = "tests/parallel/test_bad_input_ranks.py::"
CHECKPOINT = "tests/single/training/test_checkpoint.py::"
REFUSED = "tests/single/training/test_refused_checkpoints.py::"
CACHED = "tests/single/prefix/test_cached_program.py::"
DAMAGED = "tests/single/prefix/test_damaged_caches.py::"
CACHE = "tests/single/cache/"
INPUT = "tests/single/test_bad_input.py::"
DIRECTORIES = "tests/single/test_bad_run_directories.py::"
STOPPED = RESUMING + "test_a_run_that_is_stopped_in_every_way_ends_as_the_undisturbed_one"
EVIL = DAMAGED + "test_damaged_and_evil_files_are_named_and_their_rows_computed_anew"
WRONG = REFUSED + "test_the_program_refuses_every_cut_of_a_checkpoint_and_one_of_which_a_setting_differs"
TORTURE = "tests/parallel/test_torture.py::test_a_few_flips_find_nothing_and_what_is_planted_is_found"

MATRIX: dict[str, tuple[str, ...]] = {
    # Ranks that die, stop or stay away.
    "a rank is killed in an epoch: all end within 5 s, the last checkpoint loads": (STOPPED,),
    "rank 0 is killed while it writes a checkpoint: the old or the new one loads": (
        CHECKPOINT + "test_a_save_that_is_killed_anywhere_leaves_the_old_or_the_new_checkpoint",
        "tests/parallel/test_torture.py::test_a_killed_run_comes_to_what_it_would_have_come_to",
    ),
    "a rank is killed while it writes cached rows: no file, or a whole one": (
        CACHE + "test_several_jobs.py::test_a_process_killed_at_any_write_leaves_no_file_or_a_complete_one",
        "tests/parallel/test_torture.py::test_a_killed_run_comes_to_what_it_would_have_come_to",
    ),
    "a rank crashes or leaves without a word": (FAULTS + "test_a_rank_that_dies_ends_the_job",),
    "an exception on a rank whose peers wait in Horovod": (
        FAULTS + "test_an_exception_on_one_rank_is_shown_first_and_ends_ranks_that_wait_or_compute",
    ),
    "an exception on a rank whose peers wait in MPI or compute": (
        FAULTS + "test_an_exception_on_one_rank_is_shown_first_and_ends_ranks_that_wait_or_compute",
        STALLS + "test_a_rank_that_does_not_come_is_named_and_ends_the_job",
    ),
    "a rank is stopped: the job ends at the limit and 10 s, and names it": (
        FAULTS + "test_a_stopped_rank_ends_the_job_at_the_deadline",
        STALLS + "test_a_rank_that_does_not_come_is_named_and_ends_the_job",
        FAULTS + "test_a_rank_that_is_stopped_when_the_run_is_complete_ends_the_job_which_stays_complete",
        STALLS + "test_a_rank_that_is_stopped_when_nobody_is_left_to_notice_is_named_and_ends_the_job",
    ),
    "a rank never comes: named, with what is waited for, at the limit and 10 s": (
        FAULTS + "test_a_rank_that_does_not_come_ends_the_job_at_the_deadline",
    ),
    "ranks with unequal shards make equally many steps": (
        FAULTS + "test_evaluating_less_often_changes_no_bit_of_the_training",
        "tests/single/data/test_shards.py::test_steps_are_equal_and_no_sample_is_met_twice_in_an_epoch",
    ),
    # Leaving and going on.
    "asked to leave, through a launcher too: a checkpoint after the step, code 75": (
        STOPPED,
        "tests/parallel/test_signals.py::test_a_signal_to_a_launchers_process_reaches_the_ranks_or_ends_the_job",
    ),
    "mpirun is terminated: all end within seconds, the last checkpoint loads": (STOPPED,),
    "resumed on as many ranks: the same bits, wherever it was stopped": (
        STOPPED,
        "tests/parallel/test_invariants.py::test_equal_runs_are_equal_and_a_resumed_run_is_the_uninterrupted_one",
    ),
    "resumed on another number of ranks: refused, or by a flag and recorded": (
        STOPPED,
        RESUMING + "test_another_number_of_ranks_goes_on_from_the_same_state_where_that_is_asked_for",
    ),
    # Checkpoints.
    "a bit of a checkpoint flips": (
        CHECKPOINT + "test_a_flipped_bit_anywhere_is_noticed",
        REFUSED + "test_the_program_refuses_a_damaged_checkpoint_and_goes_on_from_the_one_before",
        TORTURE,
    ),
    "a checkpoint is cut short": (WRONG,),
    "a checkpoint of another model or with another setting: refused, and both values told": (
        WRONG,
        REFUSED + "test_the_program_refuses_a_checkpoint_of_another_model",
    ),
    "a checkpoint that holds code": (
        REFUSED + "test_the_program_runs_no_code_that_a_checkpoint_holds",
        INPUT + "test_weights_that_want_to_run_code_are_refused_and_do_not_run",
        "tests/single/test_plain_load.py::test_an_older_torch_loads_no_file",
    ),
    # Cached rows.
    "a bit of a cached row flips": (EVIL, TORTURE),
    "cached rows are swapped": (EVIL, CACHE + "test_integrity.py::test_a_range_copied_over_another_is_refused"),
    "a bit of a cache file's format flips": (
        EVIL,
        CACHE + "test_bit_flips.py::test_no_bit_flip_anywhere_in_a_file_is_used_silently",
    ),
    "a cache file is cut short, or rows of it were never written": (EVIL,),
    "cached rows of weights or statistics that differ in a bit": (
        CACHE + "test_fingerprint.py::test_one_bit_of_a_weight_or_of_a_running_statistic_changes_the_digest",
        CACHED + "test_files_of_the_same_cut_that_are_not_used_are_named_to_the_user",
    ),
    "cached rows of other preprocessing, data, types, blocks or versions": (
        CACHE + "test_fingerprint.py::test_a_file_is_refused_by_the_name_of_each_field_that_differs",
        CACHED + "test_rows_of_a_prefix_that_ends_elsewhere_are_not_read",
    ),
    "a frozen parameter moves": (
        FAULTS + "test_a_frozen_parameter_that_moves_ends_the_job_in_that_step",
        "tests/parallel/test_invariants.py::test_parts_of_a_users_own_loop_keep_replicas_equal_and_frozen_blocks_still",
    ),
    # Disks and folders.
    "the cache's disk is full": (DAMAGED + "test_a_run_goes_on_without_a_cache_that_its_disk_has_no_room_for",),
    "the disk of checkpoints or logs is full": (
        FAULTS + "test_a_full_disk_leaves_the_older_checkpoints",
        FAULTS + "test_an_error_that_only_one_rank_meets_ends_the_job",
    ),
    "a folder that cannot be written": (
        DIRECTORIES + "test_a_run_directory_that_cannot_be_written_is_refused",
        DIRECTORIES + "test_a_read_only_file_system_is_refused",
        CACHED + "test_an_impossible_directory_is_refused_before_training",
    ),
    "two jobs in one cache directory, or in one run directory": (
        "tests/parallel/test_cached_jobs.py::test_two_jobs_share_a_cache_directory",
        "tests/single/training/test_program.py::test_a_job_does_not_enter_a_directory_in_which_another_is_at_work",
    ),
    "cached files vanish while they are used": (
        CACHED + "test_a_directory_that_is_lost_during_training_is_gone_without",
        CACHE + "test_integrity.py::test_a_deleted_file_stays_readable",
    ),
    # Numbers and votes.
    "a loss that is not finite on one rank: all act alike in that step": (
        FAULTS + "test_a_loss_that_is_not_finite_on_one_rank_stops_all_in_the_same_step",
    ),
    "statistics of a vote that are not finite: the vote is void": (
        FAULTS + "test_a_vote_on_statistics_that_are_not_finite_on_one_rank_is_void",
    ),
    "ties, no weight, negative weights": (
        "tests/single/freezing/test_vote.py::test_the_new_cut_is_the_deepest_that_reaches_the_quorum",
        "tests/single/freezing/test_vote.py::test_an_unusable_weight_counts_zero_and_says_why",
        "tests/single/test_properties.py::test_what_must_hold_for_every_value_holds_for_a_few",
    ),
    "a replica differs: found, and the rank named": (
        FAULTS + "test_a_replica_that_differs_in_one_bit_is_found_and_named",
    ),
    "ranks disagree on what is frozen, or on the configuration": (
        FAULTS + "test_ranks_that_freeze_differently_are_refused_before_an_update",
        RANKS + "test_ranks_with_different_arguments_are_refused",
    ),
    "ranks with other code, versions or data": (
        FAULTS + "test_ranks_with_different_versions_are_refused",
        FAULTS + "test_ranks_with_different_sources_are_refused",
        RANKS + "test_ranks_with_different_data_are_refused",
        RANKS + "test_other_pixels_in_files_of_equal_names_and_sizes_are_refused",
    ),
    # Strangers.
    "a cache file that leads elsewhere: links, other files, references": (
        EVIL,
        CACHE + "test_evil_files.py::test_a_file_that_leads_elsewhere_or_holds_anything_unexpected_is_refused",
    ),
    "a cache file that asks for memory, filters or plugins": (
        EVIL,
        CACHE + "test_integrity.py::test_a_huge_sparse_file_is_refused_without_the_memory_that_it_asks_for",
        CACHE + "test_evil_files.py::test_the_hdf5_library_may_load_no_plugins",
    ),
    "a configuration that is wrong, holds code, or names a file elsewhere": (
        INPUT + "test_a_configuration_file_that_makes_no_sense_is_refused",
        "tests/single/config/test_tree.py::test_yaml_that_is_more_than_plain_values_is_refused_at_once",
        "tests/single/test_properties.py::test_what_must_hold_for_every_value_holds_for_a_few",
    ),
    "Horovod is missing or built for another MPI; more ranks than cores": (
        RANKS + "test_horovod_that_cannot_be_imported_is_said_once",
        RANKS + "test_tasks_that_mpi_does_not_connect_do_not_become_separate_runs",
        "tests/single/doctor/test_this_machine.py::test_each_check_tells_problems_from_notes_and_says_what_to_mend",
        "tests/single/launch/test_scripts.py::test_threads_and_yielding_follow_from_ranks_and_cores",
    ),
    "secrets among the variables: in no file, in no output, on no other host": (
        DIRECTORIES + "test_a_run_keeps_its_files_to_its_owner_and_no_secret_in_them",
        "tests/single/launch/test_scripts.py::test_only_named_variables_reach_a_launcher",
    ),
}


def test_there_are_forty_faults_and_each_has_its_tests() -> None:
    assert len(MATRIX) == 40
    assert all(tests and len(set(tests)) == len(tests) for tests in MATRIX.values())


@pytest.mark.parametrize("path", sorted({test.partition("::")[0] for tests in MATRIX.values() for test in tests}))
def test_every_test_of_the_matrix_exists_and_is_run(path: str) -> None:
    """A skip is allowed where a test asks the machine first, as whether a file system may be mounted; not outright."""
    named = {name for tests in MATRIX.values() for file, _, name in (t.partition("::") for t in tests) if file == path}
    tree = ast.parse((ROOT / path).read_text())
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert named <= found.keys(), named - found.keys()
    for name in named:
        marks = [ast.unparse(mark) for mark in found[name].decorator_list]
        assert not [mark for mark in marks if "skip" in mark or "xfail" in mark or "torture" in mark], name
