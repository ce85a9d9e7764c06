"""What a script's user is told on rank 0: by the logger `hvfreeze`, on standard error where no logging is set up."""

from __future__ import annotations

import logging

from hvfreeze.comm.world import World

logger = logging.getLogger("hvfreeze")


def tell(world: World, message: str, *arguments: object, level: int = logging.INFO) -> None:
    """Log a line on rank 0. Not a collective.

    Where the script has configured logging, its handlers and levels decide what becomes of the line. Where it has not,
    logging itself would drop what is below a warning, and what is not below INFO, or the logger's own level, goes to
    standard error through a handler of its own.
    """
    if world.rank > 0:
        return
    if logger.hasHandlers():
        logger.log(level, message, *arguments)
    elif level >= (logger.level or logging.INFO):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("hvfreeze: %(message)s"))
        handler.handle(logger.makeRecord(logger.name, level, __file__, 0, message, arguments, None))
