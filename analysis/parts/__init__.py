"""Parts of experiments and commands: a model of a step, a training loop, the stages of the demo.

May import `analysis.sweeps`, never a command.
"""
