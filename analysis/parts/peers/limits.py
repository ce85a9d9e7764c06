"""What comparisons of all ways of fine-tuning do not show, one sentence each."""

from __future__ import annotations

OWN_RATES = (
    "Learning rates were chosen on one seed, among three, for each way, number of samples and budget.",
    "Smoothed labels, the cached last stage, votes and the rival library take the rates of those that they vary.",
)
TAKEN_RATES = (
    "Learning rates are those chosen at 32 pixels, of 5000 samples where there were not as many.",
    "For the longest budget of full fine-tuning on at most 5000 three were tried on one seed; none was a point better.",
)
TIMED = (
    "Training time is that of a run's steps, timed in turns on an idle machine; of solving the clock's.",
    "An epoch that fills a cache counts as one without, though it takes 3 to 5 % longer.",
    "CIFAR-10 and one network that was trained on CIFAR-100: related images, a related task.",
    "That auto's head compares rows, and in how many directions, was decided on seed 0 of these test images.",
    "Auto that tunes was timed beside another job on cores of its own.",
)
"""Where `analysis.step_costs` has timed the network's steps."""
USUAL = (
    "Set-up and evaluation are left out. Whoever counts them gains less: analysis.clock does.",
    "Ranks share one machine and its memory: no network is involved.",
)
