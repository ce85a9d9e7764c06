"""The blocks that this rank holds as the ranks are dealt out now, and what trains them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from hvfreeze.chain.blocks import Chain
from hvfreeze.chain.segments import Segment, drop_tensors, tensors_of
from hvfreeze.config.optimizer import OptimizerConfig
from hvfreeze.freezing.freezer import Freezer
from hvfreeze.ranks.mesh import Mesh
from hvfreeze.ranks.world import World
from hvfreeze.strategies.grid.dealing.deal import Deal, next_deal
from hvfreeze.strategies.grid.dealing.moving import belongings_of, move
from hvfreeze.strategies.grid.dealing.state import put_back, state_of
from hvfreeze.strategies.grid.facts import Facts
from hvfreeze.strategies.grid.line.micro_batches import Rows
from hvfreeze.strategies.grid.line.pipeline import Pipeline
from hvfreeze.updates.update import Update


class Place(NamedTuple):
    """Where a rank stands, in lines of some length."""

    mesh: Mesh
    line: World | None
    """Its line, where that has anything to settle among itself."""


OpenFreezer = Callable[[Place, Segment], Freezer]
"""Blocks -> what trains them on this rank, with an optimizer, a reducer and no state."""


class Holding:
    """This rank's blocks. They change hands between epochs, where the front of the chain has frozen.

    Args:
        facts: what all ranks know.
        deal: the run's first.
        places: this rank's, by the length of lines, for all lengths that there can be.
        chain: the model, of which this rank lets go but for its blocks.
        pipelines: this rank's part in its line, in training and in evaluation.
        open_freezer: called with a place and the blocks that this rank holds there.
        settings: how parameters are updated.
        costs: of each block, for when ranks are dealt out anew.
    """

    def __init__(
        self,
        facts: Facts,
        deal: Deal,
        places: Mapping[int, Place],
        chain: Chain,
        pipelines: tuple[Pipeline, Pipeline],
        *,
        open_freezer: OpenFreezer,
        settings: OptimizerConfig,
        costs: Sequence[float],
    ) -> None:
        self.facts, self.chain = facts, chain
        self._places, self._pipelines = places, pipelines
        self._open_freezer, self._settings, self._costs = open_freezer, settings, costs
        self._trained = [parameter for _, parameter in chain.named_parameters() if parameter.requires_grad]
        self.deals: list[Deal] = []
        """That the run has had, the present one last."""
        self._hold([deal], {})

    @property
    def deal(self) -> Deal:
        """How ranks are dealt out now."""
        return self.deals[-1]

    @property
    def mesh(self) -> Mesh:
        """This rank's place now."""
        return self._places[self.deal.parts].mesh

    @property
    def segment(self) -> Segment:
        """The blocks that this rank holds."""
        return self.deal.segments[self.mesh.partition]

    @property
    def lines(self) -> int:
        """How many lines share a replica's samples."""
        return self.facts.parts // self.deal.parts

    @property
    def line(self) -> int:
        """Which of them this rank is in."""
        return self.mesh.replica % self.lines

    @property
    def passes_at_cut(self) -> int:
        """Whole epochs that were trained since the cut has moved; by steps, so that no clock decides what follows."""
        steps, moved = self.freezer.cadence.steps_per_epoch, self.freezer.cut_history[-1].step
        return self.freezer.step // steps - -(-moved // steps)

    def next_deal(self, *, cached: bool) -> Deal | None:
        """Return how ranks are to be dealt out from here on, None where they stay; see `deal.next_deal`."""
        deal = next_deal(
            self.deal,
            cut=self.freezer.cut,
            cached=cached,
            step=self.freezer.step,
            costs=self._costs,
            first=self.facts.parts,
            micro_batches=self.facts.micro_batches,
        )
        # Every rank must have something to train, as at the start.
        fits = deal is not None and all(self.chain.named_parameters(*segment) for segment in deal.segments)
        return deal if fits else None

    def hand_over(self, deal: Deal) -> None:
        """Hold what a new deal says, bit for bit as others held it; what criteria saw of the interval is forgotten.

        Collective: every rank of the world must call this, when running statistics are settled.
        """
        state, parts = state_of(self.freezer, self.segment), self.facts.parts
        before, after = ([each.segments[place % each.parts] for place in range(parts)] for each in (self.deal, deal))
        rank = self.mesh.world.rank
        moved = move(
            self._pipelines[0].wire,
            self.chain,
            belongings_of(state),
            place=rank % parts,
            ranks=range(rank - rank % parts, rank - rank % parts + parts),
            before=before,
            after=after,
        )
        freezer = Freezer.redealt(state["freezer"], restep=lambda step: step)
        reducer = {**state["reducer"], "exponents": moved.pop("exponents")}
        self.put_back([*self.deals, deal], {**state, **moved, "freezer": freezer, "reducer": reducer})

    def put_back(self, deals: list[Deal], state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_of` for this rank's blocks in the last of `deals`. Not a collective."""
        self.freezer.reducer.carry([])
        for parameter in self._trained:
            parameter.requires_grad_(True)
        self._hold(deals, state["tensors"])
        put_back(state, self.freezer, self.segment)

    def state(self) -> dict[str, Any]:
        """Return what `put_back` needs."""
        return state_of(self.freezer, self.segment)

    def _hold(self, deals: list[Deal], tensors: Mapping[str, Tensor]) -> None:
        """Take this rank's blocks, with values from `tensors`, and let go of all others."""
        self.deals = deals
        rows = Rows(self.facts.micro_batches, self.lines, self.line)
        for pipeline in self._pipelines:
            pipeline.stand(self.facts.plan_of(self.deal.segments), self.mesh, rows)
        for name, tensor in tensors_of(self.chain, self.segment):
            if name in tensors:
                tensor.data = tensors[name].detach().clone()
        drop_tensors(self.chain, 0, self.segment[0])
        drop_tensors(self.chain, self.segment[1], len(self.chain.blocks))
        self.freezer = self._open_freezer(self._places[self.deal.parts], self.segment)
        # The norm that --clip-grad speaks of is that of all blocks together, which no rank has alone.
        self.update = Update(self.freezer.optimizer, replace(self._settings, clip_grad=None))
