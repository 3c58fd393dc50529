"""The table of environment variables: names, what their text means, and what they set. `megatron_magi.envs` reads them.

The names are those of MagiAttention v1.1, so existing launch scripts mean here what they meant there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

PREFIX = "MAGI_ATTENTION_"


class State(Enum):
    """What setting a variable does."""

    USED = "used"
    UNNEEDED = "accepted, changes nothing"
    UNAVAILABLE = "not available yet: any value but the default is an error"


class Kind(Enum):
    """What a value is: ``TOGGLE`` is 0 or 1, ``COUNT`` a whole number."""

    TOGGLE = "0 or 1"
    COUNT = "number"
    CHOICE = "choice"
    TEXT = "text"


@dataclass(frozen=True)
class Variable:
    """One row of the table.

    Attributes:
        name: in the environment.
        kind: how the value is written.
        default: the typed value when it is not set; None is "unset".
        description: what it does, or why it does nothing.
        field: the configuration's field that it sets, as ``part.name``; None for other uses.
        state: see `State`.
        choices: allowed values of a ``CHOICE``.
        choice_values: what each of them sets the field to; itself when empty.
        least: smallest ``COUNT``.
        field_value: what to set the field to when a toggle is 1; True when None.
        off_value: what to set the field to when a toggle with a ``field_value`` is 0; left as it is when None.
        default_text: a default that depends on something else, in words.
    """

    name: str
    kind: Kind
    default: bool | int | str | None
    description: str
    field: str | None = None
    state: State = State.USED
    choices: tuple[str, ...] = ()
    choice_values: tuple[str, ...] = ()
    least: int = 0
    field_value: str | None = None
    off_value: str | None = None
    default_text: str | None = None

    def parse(self, text: str) -> bool | int | str:
        """The typed value of ``text``.

        Raises:
            ValueError: malformed, or the feature is not available; the message names the variable.
        """
        value = self._parse(text.strip())
        if self.state is State.UNAVAILABLE and value != self.default:
            harmless = "" if self.default is None else f" or leave it at {self.show_default()}"
            raise ValueError(f"{self.name}={text}: {self.description} Unset it{harmless}.")
        return value

    def _parse(self, text: str) -> bool | int | str:
        if self.kind is Kind.TOGGLE:
            if text not in ("0", "1"):
                raise ValueError(f"{self.name}: expected 0 or 1, got {text!r}")
            return text == "1"
        if self.kind is Kind.COUNT:
            try:
                count = int(text)
            except ValueError:
                raise ValueError(f"{self.name}: expected a whole number, got {text!r}") from None
            if count < self.least:
                raise ValueError(f"{self.name}: expected at least {self.least}, got {count}")
            return count
        if self.kind is Kind.CHOICE and text not in self.choices:
            raise ValueError(f"{self.name}: expected one of {', '.join(self.choices)}, got {text!r}")
        return text

    def show(self, value: bool | int | str | None) -> str:
        """``value`` as it is written in the environment."""
        if value is None:
            return "unset"
        return str(int(value)) if self.kind is Kind.TOGGLE else str(value)

    def show_default(self) -> str:
        """The default in words."""
        return self.default_text or self.show(self.default)


def _toggle(name: str, description: str, field: str | None = None, **more: Any) -> Variable:
    return Variable(PREFIX + name, Kind.TOGGLE, more.pop("default", False), description, field, **more)


def _unneeded(name: str, description: str, kind: Kind = Kind.TOGGLE, default: Any = False, **more: Any) -> Variable:
    return Variable(name, kind, default, description, state=State.UNNEEDED, **more)


def _sm_margin(which: str) -> Variable:
    return Variable(
        f"{PREFIX}FFA_{which.upper()}_SM_MARGIN",
        Kind.COUNT,
        None,
        f"Streaming multiprocessors that the {which} kernel leaves to communication.",
        f"attend.{which}_sm_margin",
        default_text="4 if CUDA_DEVICE_MAX_CONNECTIONS > 1, else 0",
    )


HIERARCHICAL, NATIVE_COLLECTIVES = PREFIX + "HIERARCHICAL_COMM", PREFIX + "NATIVE_GRPCOLL"
CACHE_SIZE = PREFIX + "DIST_ATTN_RUNTIME_DICT_SIZE"
MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
HIGH_PRECISION = PREFIX + "BACKWARD_HIGH_PRECISION_REDUCE"
OLD_HIGH_PRECISION = PREFIX + "FFA_BACKWARD_HIGH_PRECISION_REDUCE"
_BUILD_JOBS = "90 % of the cores"
_NO_NVCC = "Kernels are compiled by NVRTC, one thread each."
WORKSPACE, VERBOSE, DEBUG = PREFIX + "WORKSPACE_BASE", PREFIX + "BUILD_VERBOSE", PREFIX + "BUILD_DEBUG"
KERNEL_BACKEND, SDPA_BACKEND = PREFIX + "KERNEL_BACKEND", PREFIX + "SDPA_BACKEND"
FA4_BACKEND = PREFIX + "FA4_BACKEND"
NO_CACHE, FORCE_JIT = PREFIX + "NO_BUILD_CACHE", PREFIX + "FORCE_JIT_BUILD"
PROFILE = PREFIX + "PROFILE_MODE"
PREBUILD, PREBUILD_JOBS = PREFIX + "PREBUILD_FFA", PREFIX + "PREBUILD_FFA_JOBS"

SECTIONS: dict[str, tuple[Variable, ...]] = {
    "Correctness": (
        _toggle(
            "BACKWARD_HIGH_PRECISION_REDUCE",
            "Partial dk and dv are sent between ranks in fp32, at twice the bytes.",
            "comm.backward_high_precision_reduce",
        ),
        _toggle(
            "FFA_BACKWARD_HIGH_PRECISION_REDUCE",
            f"The name of {HIGH_PRECISION} before MagiAttention v1.0.4; two different values are an error.",
            "comm.backward_high_precision_reduce",
        ),
        Variable(
            PREFIX + "DSINK_ALL_REDUCE_OP",
            Kind.CHOICE,
            "none",
            "How the gradient of the sink is reduced over the context-parallel ranks inside the operator. Each rank "
            "computes a partial sum; `none` is right if the framework sums parameter gradients over these ranks, as "
            "Megatron and FSDP do, `sum` if nothing does (refused in Megatron's trainer and by "
            "`megatron_magi.hf.context_parallel`); `avg` also divides by the number of ranks.",
            "comm.dsink_all_reduce",
            choices=("none", "sum", "avg"),
        ),
        _unneeded(
            PREFIX + "FORWARD_HIGH_PRECISION_REDUCE",
            "No partial outputs are sent: one rank computes all of a query's output for a head, also where queries "
            "travel (QO_COMM), merges its stages in fp32 and rounds it once.",
        ),
    ),
    "Performance": (
        _toggle(
            "BWD_HIDE_TAIL_REDUCE",
            "The forward keeps the keys of its last remote stage, so that the backward can end with local compute "
            "and hide its last reduction behind it. Costs the memory of that stage.",
            "overlap.hide_tail_reduce",
        ),
        _sm_margin("forward"),
        _sm_margin("backward"),
        Variable(
            MAX_CONNECTIONS,
            Kind.COUNT,
            8,
            "Hardware queues of the CUDA driver. Read only to choose the default of the two margins: with one queue "
            "kernels do not run concurrently, and a margin would be wasted.",
            least=1,
        ),
        Variable(
            CACHE_SIZE,
            Kind.COUNT,
            1000,
            "Number of keys whose plans are kept; the least recently used one is dropped first. Megatron's trainer "
            "does not use this cache.",
            least=1,
        ),
        _toggle(
            "NATIVE_GRPCOLL",
            "1: in group_cast and group_reduce the ranks of one host write into each other's memory; an error if they "
            "cannot. 0: NCCL.",
            "comm.impl",
            default=None,
            field_value="native",
            off_value="all_to_all",
            default_text="1 where NVLink connects the GPUs, else 0",
        ),
        _toggle(
            "HIERARCHICAL_COMM",
            "Communication in two levels: rows that several ranks of a node need are sent there once. 1 is an error "
            "if the ranks that share a node are not given; 0 treats all ranks alike.",
            default=None,
            default_text="1 with --hierarchical-context-parallel-sizes or a two-dimensional mesh",
        ),
        _toggle(
            "QO_COMM",
            "1: queries may be computed by other ranks than those that hold them, with any layout, where the predicted "
            "step is shorter; q, out, lse and their gradients travel. 0: never.",
            "dispatch.queries",
            default=None,
            field_value="travel",
            off_value="home",
            default_text="1 for given layouts, else 0",
        ),
        Variable(
            KERNEL_BACKEND,
            Kind.CHOICE,
            None,
            "Which attention runs: `ffa` the Hopper kernels, `cudnn` those of the cuDNN frontend, `triton` those "
            "in Triton, `sdpa` the dense definition (see SDPA_BACKEND), `sdpa_ol` blocked attention in torch, in any "
            "precision; `fa4` is `cudnn`, see FA4_BACKEND. No choice falls back.",
            "attend.impl",
            choices=("ffa", "cudnn", "triton", "fa4", "sdpa", "sdpa_ol"),
            choice_values=("ffa", "cudnn", "triton", "cudnn", "reference", "torch"),
            default_text="the fastest that takes the call",
        ),
        Variable(
            PREFIX + "PRECISION",
            Kind.TEXT,
            None,
            "Attention in another dtype than that of its tensors is not available yet: convert q, k and v.",
            state=State.UNAVAILABLE,
        ),
        _toggle(
            "FA4_BACKEND",
            "1 selects the backend for Blackwell, which here is `cudnn`; no FlashAttention-4 is needed. It is the "
            f"default there. {KERNEL_BACKEND}=fa4 is the same; with another value of that variable both together are "
            "an error.",
            "attend.impl",
            field_value="cudnn",
        ),
        _toggle(
            "CPP_BACKEND",
            "1 plans in C++, an error if that planner is not built; 0 plans in Python. Plans are equal.",
            "dispatch.planner",
            default=None,
            field_value="native",
            off_value="python",
            default_text="1 if it is built, else 0",
        ),
        _toggle(
            "FLATTEN_HEAD_GROUPS",
            "Queries that travel (QO_COMM) may do so by groups of heads, each to another rank, where the predicted "
            "step is shorter than with whole rows.",
            "dispatch.flatten_head_groups",
        ),
        _unneeded(
            PREFIX + "MIN_CHUNKS_PER_RANK",
            "The planner chooses the chunk size; a given `chunk_size` is not reduced.",
            Kind.COUNT,
            8,
            least=1,
        ),
        _unneeded(PREFIX + "AUTO_RANGE_MERGE", "Plans never hold ranges that could be merged."),
        _unneeded(PREFIX + "CATGQA", "How query heads that share a key head are processed is the kernel's own choice."),
        _unneeded(PREFIX + "FFA_FORWARD_INPLACE_CORRECT", "Partial results are always merged in place."),
    ),
    "Debugging": (
        _toggle("DETERMINISTIC_MODE", "Results are bitwise reproducible.", "attend.deterministic"),
        _toggle(
            "SDPA_BACKEND",
            "Attention by its dense definition in torch, in any precision up to fp64: slow, needs memory for the "
            f"whole matrix, for comparison only. {KERNEL_BACKEND}=sdpa is the same; with another value "
            "of that variable both together are an error.",
            "attend.impl",
            field_value="reference",
        ),
        _toggle(
            "SANITY_CHECK",
            "Each pass of attention looks for NaN and inf in q, k, v, the sink (NaN alone) and the gradient of the "
            "output, also in rows that the mask hides and in padding. It also compares the call with the other ranks'. "
            "An error names tensor, row and rank. Slow. (Masks and arguments are always checked, plans and calls when "
            "they change.)",
            "attend.sanity_check",
        ),
        _toggle(
            "PROFILE_MODE",
            "Passes of attention, this package's kernels and collectives are NVTX ranges and are timed; rank 0 prints "
            "a summary when the process ends, `megatron_magi.profiling.summary()` returns it at any time. Read when "
            "the package is imported. For development: costs host time, and kernels no longer overlap at their ends.",
        ),
        _unneeded(
            PREFIX + "LOG_LEVEL",
            'Messages go to the logger `megatron_magi`: `logging.getLogger("megatron_magi").setLevel("INFO")`.',
            Kind.TEXT,
            None,
        ),
    ),
    "Building": (
        Variable(
            WORKSPACE,
            Kind.TEXT,
            None,
            "Folder that holds the cache of compiled kernels, `.cache/megatron_magi`.",
            default_text="the home directory",
        ),
        _toggle("BUILD_VERBOSE", "Compiler options and the assembler's report are logged for each kernel."),
        _toggle(
            "BUILD_DEBUG",
            "Kernels with line information for profilers and debuggers, which costs no speed; their source is kept "
            "next to them, and the assembler's report is logged.",
        ),
        _toggle(
            "NO_BUILD_CACHE",
            "Each process compiles its kernels and keeps none on disk; those that came with the package are used.",
        ),
        _toggle("FORCE_JIT_BUILD", "Kernels that came with the package are not used."),
        _toggle(
            "PREBUILD_FFA",
            "Building a wheel compiles the common kernels into it if torch, which brings the compiler, is installed "
            "(`pip install --no-build-isolation`); an editable install does not. Other kernels are compiled at first "
            "use.",
            default=True,
        ),
        Variable(
            PREBUILD_JOBS,
            Kind.COUNT,
            None,
            "Number of kernels compiled concurrently while a wheel is built, or before training begins.",
            least=1,
            default_text=_BUILD_JOBS,
        ),
        _unneeded("NVCC_THREADS", _NO_NVCC, Kind.COUNT, 4, least=0),
        _unneeded("MAX_JOBS", f"{_NO_NVCC} See PREBUILD_FFA_JOBS.", Kind.COUNT, None, default_text=_BUILD_JOBS),
        *(
            _unneeded(PREFIX + name, "There is no such extension to build.")
            for name in ("SKIP_FFA_UTILS_BUILD", "SKIP_MAGI_ATTN_EXT_BUILD", "SKIP_MAGI_ATTN_COMM_BUILD")
        ),
        _unneeded(
            PREFIX + "FFA_FA4_CACHE_DIR",
            "FlashAttention-4 is not used, see FA4_BACKEND.",
            Kind.TEXT,
            None,
        ),
        _unneeded(
            PREFIX + "BUILD_COMPUTE_CAPABILITY",
            "There are kernels for compute capability 9.0 only, and compiling them needs no GPU.",
            Kind.TEXT,
            None,
            default_text="that of the GPU",
        ),
        _unneeded(
            PREFIX + "ALLOW_BUILD_WITH_CUDA12", "Kernels are compiled by the NVRTC that torch brings.", Kind.TEXT, None
        ),
        _unneeded("NVSHMEM_DIR", "Native communication does not use NVSHMEM, see NATIVE_GRPCOLL.", Kind.TEXT, None),
    ),
}
"""Every variable, by what it is for."""

VARIABLES: dict[str, Variable] = {v.name: v for section in SECTIONS.values() for v in section}
"""Every variable by name."""
