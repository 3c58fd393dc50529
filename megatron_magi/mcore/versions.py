"""Which Megatron this package was read against and tested with."""

from __future__ import annotations

from importlib import metadata

KNOWN_VERSIONS = ("0.19.2",)


def check_version(found: str | None = None) -> None:
    """Refuses versions of megatron-core whose seams are unknown. Imports nothing.

    Args:
        found: the version; that of the installed package when None. What follows a ``+`` is ignored.

    Raises:
        ValueError: the version is not one of `KNOWN_VERSIONS`, or there is no megatron-core.
    """
    advice = f"known: {', '.join(KNOWN_VERSIONS)}; install megatron-core=={KNOWN_VERSIONS[-1]}"
    if found is None:
        try:
            found = metadata.version("megatron-core")
        except metadata.PackageNotFoundError:
            raise ValueError(f"megatron-core: not installed, {advice}") from None
    if found.partition("+")[0] not in KNOWN_VERSIONS:
        raise ValueError(f"megatron-core: version {found} is not known to megatron_magi, {advice}")
