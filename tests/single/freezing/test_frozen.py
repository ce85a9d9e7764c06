from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvfreeze.comm.reducer import Reducer
from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.errors import DivergedError, UsageError
from hvfreeze.freezing.cadence import Cadence
from hvfreeze.freezing.freezer import Freezer, freeze_by_vote
from hvfreeze.freezing.frozen_prefix import hold_in_eval, release, release_model, trainable_of
from hvfreeze.model.blocks import cut_into_blocks


def pickled(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    found: nn.Module = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    return found


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy])
def test_a_copy_of_a_model_with_frozen_blocks_holds_its_own_and_can_be_released(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())
    hold_in_eval(model[0])
    again = copied(model)
    again.train()
    assert not again[0].training and again[1].training  # type: ignore[index]
    release(again[0])  # type: ignore[index]
    again.eval()
    again.train()
    assert again[0].training and not model[0].training  # type: ignore[index]


@pytest.mark.parametrize(
    ("before", "asked", "after"),
    [(True, [], True), (False, [], False), (True, [False], False), (False, [True], True), (True, [False, True], True)],
)
def test_a_module_that_is_released_is_in_the_mode_that_its_script_wants(
    before: bool, asked: list[bool], after: bool
) -> None:
    block = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())
    model = nn.Sequential(block, nn.Linear(3, 2))
    model.train(before)
    for _ in range(2):
        for module in block.modules():
            hold_in_eval(module)
    for mode in asked:
        model.train(mode)
    model = copy.deepcopy(model)
    assert not any(module.training for module in model[0].modules())
    for module in model[0].modules():
        release(module)
    assert [module.training for module in model[0].modules()] == [after] * 3


def test_a_state_brings_no_criterion_to_a_freezer_that_has_none() -> None:
    def made(settings: FreezeConfig) -> Freezer:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return freeze_by_vote(model, optimizer, SoloWorld(), steps_per_epoch=4, num_epochs=5, settings=settings)

    freezer = made(FreezeConfig())
    freezer.load_state_dict(made(FreezeConfig(freeze="geometric", shadow="linear")).state_dict())
    assert [freezer.after_step(1.0) for _ in range(12)] == [None] * 12
    assert freezer.state_dict()["tracks"] == {}


@pytest.mark.parametrize(
    ("freeze", "held", "words"),
    [
        ("none", None, ""),
        ("static", (0, 3), ""),
        ("linear", None, "--vote-weight (1,2) has 2 numbers; it must have one for each of the 1 ranks"),
        ("linear", (0, 3), "it must have one for each of the 1 replicas"),
    ],
)
def test_a_list_of_weights_is_counted_where_there_are_votes(
    freeze: str, held: tuple[int, int] | None, words: str
) -> None:
    model, world = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)), SoloWorld()
    settings = FreezeConfig(freeze=freeze, cut=1 if freeze == "static" else None, vote_weight="1,2")

    def opened() -> Freezer:
        return Freezer(
            cut_into_blocks(model),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            reducer=Reducer(world),
            world=world,
            settings=settings,
            cadence=Cadence.of(settings, steps_per_epoch=4, num_epochs=5),
            held=held,
        )

    if words:
        with pytest.raises(UsageError) as refused:
            opened()
        assert words in str(refused.value)
    else:
        opened()


def test_what_its_owner_has_frozen_is_never_released() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    trainable = trainable_of(model)
    model[1].requires_grad_(False)
    release_model(model, trainable)
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, False, True, True, True, True]


def test_whoever_registers_is_told_of_every_move_when_the_prefix_has_changed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezer = freeze_by_vote(
        model, optimizer, SoloWorld(), steps_per_epoch=4, num_epochs=5, settings=FreezeConfig(freeze="geometric")
    )
    seen: list[tuple[int, list[bool], int]] = []

    def note() -> None:
        trained = [parameter.requires_grad for parameter in model.parameters()][::2]
        seen.append((freezer.cut, trained, len(freezer.reducer.carried)))

    freezer.prefix.on_move(note)
    freezer.freeze(2)
    freezer.thaw(1)
    state = freezer.state_dict()
    freezer.thaw(0)
    freezer.load_state_dict(state)
    assert seen == [
        (2, [False, False, True], 2),
        (1, [False, True, True], 4),
        (0, [True, True, True], 6),
        (1, [False, True, True], 4),
    ]
    seen.clear()
    for _ in range(12):
        freezer.after_step(1.0)
    assert [cut for cut, _, _ in seen] == list(freezer.prefix.cuts[-1:]) == [2]


def test_norms_are_computed_before_the_wait_and_again_where_a_step_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting(SoloWorld):
        def wait(self, handle: object) -> None:
            done.append("wait")

    done: list[str] = []
    norm = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda *args, **rest: done.append("norm") or norm(*args, **rest))
    world = Waiting()
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = FreezeConfig(freeze="gradient-norm", interval=2)
    freezer = freeze_by_vote(model, optimizer, world, steps_per_epoch=4, num_epochs=9, settings=settings)
    gradients = []

    def backward(scale: float) -> None:
        freezer.reducer.begin()
        (scale * model(torch.ones(2, 3))).sum().backward()
        gradients.append(model[0].weight.grad.clone())
        freezer.reducer.finish()

    backward(1.0)
    freezer.after_step(0.0)
    assert done == ["wait"], "the interval does not end with this step"
    backward(2.0)  # which its script skips, as where gradients are infinite
    backward(3.0)
    assert done == ["wait", "norm", "wait", "norm", "wait"]
    freezer.after_step(0.0)
    assert len(done) == 5, "norms were computed twice"
    assert freezer._seen.norms[-1][0] == float(norm(sum(gradients), dtype=torch.float64))


class Halted(nn.Sequential):
    """A block whose BatchNorm never trains."""

    def train(self, mode: bool = True) -> Halted:
        super().train(mode)
        self[1].eval()
        return self


@pytest.mark.parametrize("own", ["method", "attribute"])
def test_a_modules_own_train_is_kept_and_decides_its_mode(own: str) -> None:
    kind = Halted if own == "method" else nn.Sequential
    model = nn.Sequential(kind(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 3), nn.Linear(3, 2))
    norm: Any = model[0][1].eval()  # type: ignore[index]
    if own == "attribute":
        norm.train = lambda mode=True: norm
    before = vars(norm).get("train")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezer = freeze_by_vote(model, optimizer, SoloWorld(), steps_per_epoch=4, num_epochs=5)
    for mode in (True, False, True):
        freezer.freeze(1)
        model.train(mode)
        assert not any(module.training for module in model[0].modules())
        freezer.thaw(0)
        assert [module.training for module in model.modules()] == [mode] * 3 + [False] + [mode] * 2
        assert vars(norm).get("train") is before
        model.train()
        assert [module.training for module in model.modules()] == [True] * 3 + [False] + [True] * 2


def test_a_frozen_model_that_an_earlier_version_pickled_can_be_released() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    hold_in_eval(model[0])
    vars(vars(model[0])["train"]).clear()  # it recorded nothing
    model = pickled(model)  # type: ignore[assignment]
    release(model[0])
    assert model[0].training and "train" not in vars(model[0])


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_a_module_that_writes_its_own_buffer_is_named_with_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Counter(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freezer = freeze_by_vote(model, optimizer, SoloWorld(), steps_per_epoch=4, num_epochs=5)
    freezer.freeze(1)
    model(torch.ones(2, 3))
    with pytest.raises(DivergedError, match=r"1\.calls changed.*in evaluation mode.*pass blocks="):
        freezer.after_step(0.0)
    freezer.freeze(1)
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(DivergedError, match=r"0\.weight changed.*before you change a frozen block$"):
        freezer.after_step(0.0)
