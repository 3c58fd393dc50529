"""The environment, read into typed values. No other module reads ``os.environ``.

A variable (`megatron_magi.variables`) is a default: it fills in a field of `MagiConfig` that the caller left open.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from megatron_magi.config import MagiConfig
from megatron_magi.variables import (
    CACHE_SIZE,
    DEBUG,
    FA4_BACKEND,
    FORCE_JIT,
    HIERARCHICAL,
    HIGH_PRECISION,
    KERNEL_BACKEND,
    MAX_CONNECTIONS,
    NO_CACHE,
    OLD_HIGH_PRECISION,
    PREBUILD,
    PREBUILD_JOBS,
    PREFIX,
    PROFILE,
    SDPA_BACKEND,
    VARIABLES,
    VERBOSE,
    WORKSPACE,
    Variable,
)

TEST_RANKS_PER_GPU = "MAGI_TEST_RANKS_PER_GPU"
"""Of tests alone, hence not in the table; see `megatron_magi.testing.shared_gpus`."""


@dataclass(frozen=True)
class Environment:
    """The values of the environment when it was read.

    Attributes:
        given: the variables that were set, as (name, typed value).
    """

    given: tuple[tuple[str, bool | int | str], ...]

    def value(self, name: str) -> bool | int | str | None:
        """The value of a variable, its default where it was not set.

        Raises:
            KeyError: no such variable.
        """
        variable = VARIABLES[name]
        return dict(self.given).get(name, variable.default)

    @property
    def plan_cache_size(self) -> int:
        """Number of plans to keep."""
        return int(self.value(CACHE_SIZE))

    def ranks_per_node(self, told: int | None, how: str) -> int | None:
        """Neighbours that share a node, see `CommConfig`; None where all ranks are to be alike.

        Args:
            told: by an argument, None where none says it.
            how: it could be told, for the message.

        Raises:
            ValueError: two levels are asked for, and nothing tells the nodes.
        """
        wanted = self.value(HIERARCHICAL)
        if wanted and told is None:
            raise ValueError(f"{HIERARCHICAL}: needs {how} to tell which ranks share a node")
        return None if wanted is False else told

    def default_config(self) -> MagiConfig:
        """The configuration for callers who gave none: defaults, and what the environment says.

        A configuration that a caller does give is used as it is; `dataclasses.replace` on this
        one changes single fields of it.
        """
        return _default_config(self.given)


@cache  # it is asked for with each key
def _default_config(given: tuple[tuple[str, bool | int | str], ...]) -> MagiConfig:
    margin = 4 if int(Environment(given).value(MAX_CONNECTIONS)) > 1 else 0
    config = MagiConfig()
    attend = replace(config.attend, forward_sm_margin=margin, backward_sm_margin=margin)
    config = replace(config, attend=attend)
    for name, value in given:
        variable = VARIABLES[name]
        if variable.field is None:
            continue
        if variable.field_value is not None:
            value = variable.field_value if value else variable.off_value
            if value is None:
                continue
        elif variable.choice_values:
            value = variable.choice_values[variable.choices.index(value)]
        part, field = variable.field.split(".")
        config = replace(config, **{part: replace(getattr(config, part), **{field: value})})
    return config


@dataclass(frozen=True)
class BuildSettings:
    """How kernels are compiled.

    Attributes:
        workspace: folder whose ``.cache`` keeps them; the home directory when None.
        verbose: log options and the assembler's report.
        debug: line information.
        use_cache: read and write the cache.
        force_jit: do not use kernels that came with the package.
        prebuild: compile kernels into a wheel.
        prebuild_jobs: how many at a time.
    """

    workspace: str | None
    verbose: bool
    debug: bool
    use_cache: bool
    force_jit: bool
    prebuild: bool
    prebuild_jobs: int


@dataclass(frozen=True)
class Reading:
    """One variable as it was found: its text, None when not set, and what is wrong with it."""

    variable: Variable
    text: str | None
    problem: str | None


def readings(environ: Mapping[str, str] | None = None) -> list[Reading]:
    """Every variable of the table as it stands in ``os.environ``, or in another mapping."""
    environ = os.environ if environ is None else environ
    return [_reading(variable, environ) for variable in VARIABLES.values()]


def _reading(variable: Variable, environ: Mapping[str, str]) -> Reading:
    text, problem = environ.get(variable.name, "").strip() or None, None
    if text is not None:
        try:
            variable.parse(text)
        except ValueError as error:
            problem = str(error)
    return Reading(variable, text, problem)


def _value(reading: Reading) -> Any:
    """What a reading without a problem says."""
    return reading.variable.default if reading.text is None else reading.variable.parse(reading.text)


def unknown_names(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Names that start with ``MAGI_ATTENTION_`` and are in no table, sorted."""
    environ = os.environ if environ is None else environ
    return tuple(sorted(name for name in environ if name.startswith(PREFIX) and name not in VARIABLES))


def load(environ: Mapping[str, str] | None = None) -> Environment:
    """Reads the environment: ``os.environ``, or another mapping.

    A variable that is set to nothing counts as not set. Unknown names that start with
    ``MAGI_ATTENTION_`` are warned about, once.

    Raises:
        ValueError: a value is malformed, or asks for a feature that is not available yet.
    """
    if environ is None:
        return _loaded()
    # Few of the variables are set, and a look at ``os.environ`` takes time.
    set_here = {name: environ[name] for name in environ if name in VARIABLES or name.startswith(PREFIX)}
    found = [_reading(variable, set_here) for name, variable in VARIABLES.items() if name in set_here]
    problem = next((r.problem for r in found if r.problem), None)
    if problem:
        raise ValueError(problem)
    given = {r.variable.name: r.variable.parse(r.text) for r in found if r.text is not None}
    if len({given[name] for name in (HIGH_PRECISION, OLD_HIGH_PRECISION) if name in given}) > 1:
        raise ValueError(f"{OLD_HIGH_PRECISION}: contradicts {HIGH_PRECISION}, its newer name")
    for name, same in ((SDPA_BACKEND, ("sdpa",)), (FA4_BACKEND, ("fa4", "cudnn"))):
        if given.get(name) and given.get(KERNEL_BACKEND, same[0]) not in same:
            raise ValueError(f"{name}: contradicts {KERNEL_BACKEND}, which newer scripts set")
    if given.get(SDPA_BACKEND) and given.get(FA4_BACKEND):
        raise ValueError(f"{SDPA_BACKEND}: contradicts {FA4_BACKEND}, both choose the attention")
    if unknown := unknown_names(set_here):
        _warn_of(unknown)
    return Environment(tuple(given.items()))


def _loaded() -> Environment:
    """That of ``os.environ``: read again when a variable has changed, as it is asked for with each key."""
    # Names and values as the process has them, compared as a whole: decoding all names takes 60 us.
    present = getattr(os.environ, "_data", None)
    if present is not None:
        for read, known in _last:
            if present == read:
                return known
    before = None if present is None else dict(present)
    found = load(os.environ)
    if before is not None:
        _last[:] = [(before, found)]
    return found


_last: list[tuple[dict, Environment]] = []
"""What `_loaded` has read last, and what it is."""


@cache  # the environment is read in several places, and for each key
def _warn_of(unknown: tuple[str, ...]) -> None:
    warnings.warn(f"unknown environment variables: {', '.join(unknown)}", stacklevel=5)


def profile_mode(environ: Mapping[str, str] | None = None) -> bool:
    """Whether passes, kernels and collectives are timed; other variables are not looked at.

    Raises:
        ValueError: the value is malformed.
    """
    text = (os.environ if environ is None else environ).get(PROFILE, "").strip()
    return bool(VARIABLES[PROFILE].parse(text or "0"))


def local_rank(environ: Mapping[str, str] | None = None) -> int:
    """This process's number on its host, as torchrun sets it (``LOCAL_RANK``); 0 without torchrun.

    Args:
        environ: the variables; ``os.environ`` when None.
    """
    return int((os.environ if environ is None else environ).get("LOCAL_RANK", "0"))


def ranks_per_gpu(environ: Mapping[str, str] | None = None) -> int:
    """How many ranks of tests may share a GPU (`TEST_RANKS_PER_GPU`): 1 where nothing is said.

    Args:
        environ: the variables; ``os.environ`` when None.

    Raises:
        ValueError: it is not a positive number.
    """
    text = (os.environ if environ is None else environ).get(TEST_RANKS_PER_GPU) or "1"
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ValueError(f"{TEST_RANKS_PER_GPU}: expected a positive number, got {text!r}")
    return int(text)


def set_for_megatron() -> Callable[[], object]:
    """Sets what Megatron insists on with tensor or context parallelism, unless it is set.

    CUDA reads it when a process first uses a GPU.

    Returns:
        What takes it back; does nothing where it was set before.
    """
    if MAX_CONNECTIONS in os.environ:
        return lambda: None
    os.environ[MAX_CONNECTIONS] = "1"
    return lambda: os.environ.pop(MAX_CONNECTIONS)


def check_te_attention(environ: Mapping[str, str] | None = None) -> None:
    """Refuses variables that turn some of Transformer Engine's attention kernels off.

    Megatron insists on 1 for all of them, which is no choice, when it builds the model.

    Args:
        environ: the variables; ``os.environ`` when None.

    Raises:
        ValueError: one has another value.
    """
    environ = os.environ if environ is None else environ
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        value = environ.get(name, "1")
        if value != "1":
            raise ValueError(
                f"{name}: {value!r} chooses among Transformer Engine's attention kernels, of which --attention-backend "
                "magi uses none; unset it"
            )


def workspace(environ: Mapping[str, str] | None = None) -> str | None:
    """``workspace`` of `load_build`."""
    return _value(_reading(VARIABLES[WORKSPACE], os.environ if environ is None else environ))


def load_build(environ: Mapping[str, str] | None = None) -> BuildSettings:
    """What the environment says of compiling; other variables are not looked at.

    Raises:
        ValueError: a value is malformed.
    """
    names = (WORKSPACE, VERBOSE, DEBUG, NO_CACHE, FORCE_JIT, PREBUILD, PREBUILD_JOBS)
    environ = os.environ if environ is None else environ
    found = {name: _reading(VARIABLES[name], environ) for name in names}
    problem = next((r.problem for r in found.values() if r.problem), None)
    if problem:
        raise ValueError(problem)
    value = {name: _value(reading) for name, reading in found.items()}
    return BuildSettings(
        workspace=value[WORKSPACE],
        verbose=value[VERBOSE],
        debug=value[DEBUG],
        use_cache=not value[NO_CACHE],
        force_jit=value[FORCE_JIT],
        prebuild=value[PREBUILD],
        prebuild_jobs=value[PREBUILD_JOBS] or math.ceil(0.9 * (os.cpu_count() or 1)),
    )
