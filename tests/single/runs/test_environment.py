from __future__ import annotations

from hvfreeze.runs.environment import PACKAGES, describe_environment, facts_of_this_rank


def test_what_ranks_share_is_one_value_and_what_they_do_not_is_a_list() -> None:
    mine = facts_of_this_rank()
    other = {**mine, "host": "elsewhere", "threads": mine["threads"] + 1, "cores": 1}
    found = describe_environment([mine, other, mine])
    assert found["size"] == 3 and found["hosts"] == [mine["host"], "elsewhere", mine["host"]]
    assert found["threads"] == [mine["threads"], mine["threads"] + 1, mine["threads"]]
    assert (found["processor"], found["cores"]) == (mine["processor"], mine["cores"])
    assert set(found["versions"]) == set(PACKAGES)
