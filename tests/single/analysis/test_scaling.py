"""The model of a step on several nodes, and what is predicted by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analysis import scaling
from analysis.parts.many_nodes import EPOCHS, forecast
from analysis.parts.ring import LATENCIES, LATENCY, Model, Point, efficiency, fit
from analysis.sweeps.presets import REDUCED
from hvfreeze.comm.reducer import BUCKET_BYTES
from tests.single.analysis.runs_material import carried_out
from tests.single.analysis.test_results import recorded


def points(model: Model, nodes: tuple[int, ...]) -> list[Point]:
    found = []
    for count in nodes:
        for bandwidth in (1e9, 2e8):
            for payload, backward in ((44e6, 0.14), (33e6, 0.05)):
                values = {"work": 0.21, "backward": backward, "payload": payload, "cores": 2}
                point = Point(variant="full", nodes=count, bandwidth=bandwidth, **values)
                found.append(replace(point, seconds=model.step(point)))
    return found


def test_the_scaling_model_is_found_again_from_its_own_steps_and_predicts_a_size_left_out() -> None:
    true = Model(0.8, 2e-9, 0.4)
    model = fit(points(true, (2, 3)))
    assert model.efficiency == pytest.approx(0.8, rel=0.02)
    assert model.copying == pytest.approx(2e-9, rel=0.02)
    for point in points(true, (4,)):
        assert model.step(point) == pytest.approx(point.seconds, rel=0.02)


def test_more_ranks_than_cores_take_longer_and_no_exchange_takes_less_than_none() -> None:
    model = Model(1.0, 0.0, 1.0)
    crowded, fast = points(model, (4,))[0], points(model, (2,))[0]
    assert crowded.crowd == 2.0
    assert model.step(replace(fast, bandwidth=1e15)) == fast.work


def test_many_nodes_pay_for_the_way_of_a_message_around_the_ring() -> None:
    wide = replace(points(Model(1.0, 0.0, 0.0), (2,))[0], bandwidth=1e15, cores=1000, payload=2.0 * BUCKET_BYTES)
    few, many = (Model(1.0, 0.0, 0.0).step(replace(wide, nodes=nodes)) for nodes in (129, 257))
    assert many - few == pytest.approx(2 * 128 * 2 * LATENCY, rel=0.01)


def test_the_left_out_size_is_not_part_of_the_fit(tmp_path: Path, no_files: None, no_training: None) -> None:
    results = carried_out(scaling.EXPERIMENT, replace(REDUCED, seeds=(0,)), tmp_path)
    assert {point.nodes for point in scaling.points_of(results)} == {2, 3, 4}
    assert scaling.LEFT_OUT not in scaling.FIT


def test_256_nodes_are_a_range_over_the_latency_that_is_assumed() -> None:
    results = recorded("scaling")
    model = fit([point for point in scaling.points_of(results) if point.nodes in scaling.FIT])
    full = scaling.predicted(scaling.points_of(results), "full", 256, "10gbit")
    parts = [efficiency(replace(model, latency=latency), full) for latency in LATENCIES]
    assert parts == sorted(parts, reverse=True)
    answer = scaling.answers(results)[0]
    text = " ".join(answer.details)
    assert f"{100 * parts[2]:.0f} % to {100 * parts[0]:.0f} % of ideal throughput" in answer.text
    assert f"{100 * parts[2]:.0f} % to {100 * parts[0]:.0f} % in full" in text
    assert "200 to 0 microseconds" in text and "assumed" in text


SHARES = {
    "samples": 64_000,
    "shares": [
        {"what": "list the images", "seconds": 4.0, "num_bytes": 0},
        {"what": "take what rank 0 has listed", "seconds": 0.0, "num_bytes": 125_000_000},
        {"what": "deal the samples out", "seconds": 1.0, "num_bytes": 8_000},
        {"what": "find its own rows in the cache, 2 views", "seconds": 0.5, "num_bytes": 0},
        {"what": "find everybody's rows in the cache, 2 views", "seconds": 5.0, "num_bytes": 0},
        {"what": "write a checkpoint of a ResNet-18", "seconds": 0.2, "num_bytes": 95_000_000},
        {"what": "vote, 2 criteria, 20 blocks", "seconds": 0.1, "num_bytes": 90_112},
    ],
}


def test_more_nodes_have_less_work_each_and_as_much_beside_it() -> None:
    few, many = (
        forecast(
            Model(1.0, 0.0, 1.0),
            Point(variant="full", nodes=n, bandwidth=1e9, work=0.5, backward=9.0, payload=1.0, cores=n),
            SHARES,
            batch=64,
        )
        for n in (10, 100)
    )
    assert few.work == pytest.approx(EPOCHS * 1000 / 10 * 0.5) == 10 * many.work
    # Nothing is waited for, as the backward pass hides all of it.
    assert few.exchange == many.exchange == (0.0, 0.0)
    # 125 MB over a link of 1 Gbit/s take a second.
    assert few.rest["listing of images"] == (4.0, 4.0) and few.rest["sending and dealing"] == pytest.approx((2.0, 2.0))
    assert few.rest["rows of the cache"] == (5.0, 5.0) and few.rest["checkpoints"] == (2.0, 2.0)
    slowest = EPOCHS * 2 * 99 * max(LATENCIES)
    assert many.rest["votes"] == pytest.approx((1.0, 1.0 + slowest))
    low, high = many.efficiency
    assert high == pytest.approx(50 / (50 + 14)) and low == pytest.approx(50 / (50 + 14 + slowest))


def test_what_breaks_first_is_told_from_the_kept_runs_and_shares() -> None:
    _, first = scaling.answers(recorded("scaling"))
    assert first.question == "What breaks first on many nodes?" and first.text.startswith(
        "The exchange of gradients. On 256"
    )
    assert "listing of images takes the most" in first.details[0]


def test_without_the_shares_nothing_is_said_of_whole_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "shares_of", lambda results: None)
    results = recorded("scaling")
    assert len(scaling.answers(results)) == 1 and len(scaling.tables(results)) == 2
