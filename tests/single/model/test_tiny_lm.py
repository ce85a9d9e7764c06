from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from hvfreeze.comm.reducer import Reducer
from hvfreeze.comm.world import SoloWorld
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.errors import UsageError
from hvfreeze.freezing.cadence import Cadence
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.model.blocks import Chain, cut_into_blocks
from hvfreeze.model.model_sources import build_model
from hvfreeze.model.tiny_lm import EMBEDDING, TinyLM
from hvfreeze.model.weights import head_layers, load_weights

CHARACTERS, CONTEXT = 11, 12


@pytest.fixture
def model() -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(CHARACTERS, context=CONTEXT, layers=2)


def test_a_position_depends_on_what_stands_before_it_alone(model: TinyLM) -> None:
    codes = torch.randint(CHARACTERS, (3, CONTEXT))
    other = codes.clone()
    other[:, 7:] = (other[:, 7:] + 1) % CHARACTERS
    logits, changed = model(codes), model(other)
    assert logits.shape == (3, CHARACTERS, CONTEXT)
    assert torch.equal(logits[..., :7], changed[..., :7])
    assert not torch.equal(logits[..., 7], changed[..., 7])
    torch.testing.assert_close(model(codes[:, :5]), logits[..., :5])


def test_both_ends_share_one_matrix(model: TinyLM) -> None:
    codes = torch.zeros(1, CONTEXT, dtype=torch.int64)
    before = model(codes)
    with torch.no_grad():
        model.embedding.weight[5] += 1
    assert not torch.equal(model(codes)[:, 5], before[:, 5]), "row 5 is output 5"
    assert not any(isinstance(module, nn.Linear) and module.out_features == CHARACTERS for module in model.modules())


def test_its_blocks_are_its_forward_pass_and_say_what_they_share(model: TinyLM) -> None:
    chain = cut_into_blocks(model)
    assert [block.name for block in chain.blocks] == ["stem", "layers.0", "layers.1", "head"]
    assert chain.tied == (EMBEDDING,) and EMBEDDING in chain.blocks[0].parameter_names
    chain.verify(torch.randint(CHARACTERS, (2, CONTEXT)))
    assert len(chain.named_parameters()) == len(list(model.parameters()))


def test_what_a_chain_shares_must_be_in_its_first_block(model: TinyLM) -> None:
    parts = [("stem", model.embedding), ("layers", model.layers), ("head", [model.norm, model.output])]
    assert Chain.from_modules(model, parts, tied=[EMBEDDING]).tied == (EMBEDDING,)
    with pytest.raises(UsageError, match=r"tied \(norm.weight\) must name parameters of the first block, stem"):
        Chain.from_modules(model, parts, tied=["norm.weight"])


def test_nothing_is_frozen_that_the_head_goes_on_training(model: TinyLM) -> None:
    chain = cut_into_blocks(model)
    cadence = Cadence.of(FreezeConfig(), steps_per_epoch=2, num_epochs=2)
    for settings in (FreezeConfig(freeze="static", cut=1), FreezeConfig(freeze="linear")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        world = SoloWorld()
        with pytest.raises(UsageError, match=rf"--freeze \({settings.freeze}\) must be none: .* share {EMBEDDING}"):
            Freezer(chain, optimizer=optimizer, reducer=Reducer(world), world=world, settings=settings, cadence=cadence)
        free = replace(chain, tied=())
        Freezer(free, optimizer=optimizer, reducer=Reducer(world), world=world, settings=settings, cadence=cadence)


def test_weights_of_other_characters_leave_the_embedding_as_it_started(model: TinyLM) -> None:
    assert head_layers(model) == ["embedding"]
    torch.manual_seed(1)
    other = build_model("tiny-lm", num_classes=CHARACTERS + 2, image_size=CONTEXT).model
    state = TinyLM(CHARACTERS, context=CONTEXT).state_dict()
    before = other.get_parameter(EMBEDDING).clone()
    notes = load_weights(other, state, source="file")
    assert "embedding is initialised at random: the weights have 11 classes, the model 13" in notes[0]
    assert torch.equal(other.get_parameter(EMBEDDING), before)
    assert torch.equal(other.get_parameter("norm.weight"), state["norm.weight"])
