"""How many files this process may open: by default often 1024, which connections soon go beyond."""

import resource


def raise_open_files(wanted: int) -> int | None:
    """Raises this process's own limit towards a number, as far as the hard limit lets it.

    Returns:
        The hard limit; None where there is none.
    """
    own, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    reached = wanted if most == unlimited else min(wanted, most)
    if own != unlimited and own < reached:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reached, most))
    return None if most == unlimited else most
