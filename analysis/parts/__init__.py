"""What a question or a command consists of besides its own module: a model of a step, a loop, the stages of the demo.

May import `analysis.sweeps`, never a command.
"""
