"""A log per rank, of what its modules say."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOG_FOLDER = "logs"
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextmanager
def rank_log(folder: Path, rank: int) -> Iterator[None]:
    """Writes what the modules log, warnings included, to `logs/rank_N.log` of the run.

    Of the first rank warnings are shown on standard error as well.
    """
    path = folder / LOG_FOLDER / f"rank_{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter(_LOG_FORMAT))
    shown = logging.StreamHandler()
    shown.setLevel(logging.WARNING if rank == 0 else logging.CRITICAL)
    own, warnings = logging.getLogger("lightrft"), logging.getLogger("py.warnings")
    level = own.level
    own.setLevel(logging.DEBUG)
    for logger, handler in ((own, file), (own, shown), (warnings, file)):
        logger.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    except BaseException as error:
        where = (own.name, logging.INFO, __file__, 0, "the run ended here", ())
        file.handle(own.makeRecord(*where, (type(error), error, error.__traceback__)))
        raise
    finally:
        logging.captureWarnings(False)
        own.setLevel(level)
        for logger, handler in ((own, file), (own, shown), (warnings, file)):
            logger.removeHandler(handler)
        file.close()
