"""The commands of ``magi``, which is short for ``python -m megatron_magi``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_magi import envs
from megatron_magi.explain.arguments import add_arguments as add_explain_arguments
from megatron_magi.variables import SECTIONS, State


def environment_listing(environ: Mapping[str, str] | None = None) -> tuple[str, bool]:
    """The variables with their current values, as text, and whether all values are valid."""
    readings = {reading.variable: reading for reading in envs.readings(environ)}
    wrap = textwrap.TextWrapper(100, initial_indent="    ", subsequent_indent="    ")
    lines = []
    for section, variables in SECTIONS.items():
        lines += [section, "-" * len(section)]
        for variable in variables:
            reading = readings[variable]
            origin = "default" if reading.text is None else "set"
            sets = f", sets {variable.field}" if variable.field else ""
            lines.append(f"{variable.name} = {reading.text or variable.show_default()}  ({origin}{sets})")
            about = variable.description
            if variable.state is State.UNNEEDED:
                about += f" ({variable.state.value})"
            lines += wrap.wrap(about)
            if reading.problem:
                lines += wrap.wrap(f"ERROR: {reading.problem}")
        lines.append("")
    unknown = envs.unknown_names(environ)
    if unknown:
        lines += [f"unknown, ignored: {', '.join(unknown)}", ""]
    return "\n".join(lines), not any(reading.problem for reading in readings.values())


def environment_page() -> str:
    """The page ``docs/environment.md``."""
    lines = [
        "# Environment variables",
        "",
        "For those who set up runs, and look up a variable.",
        "",
        "`python -m megatron_magi env` shows current values. A malformed value, or one for a feature that is not there",
        "yet, is an error that names the variable. Variables that set *nothing* are accepted for launch scripts of",
        "MagiAttention, and have no effect. (This page is made by",
        "`python -m megatron_magi env --markdown > docs/environment.md`.)",
        "",
        "A variable that sets a field of the [configuration](configuration.md#magiconfig) is its default in Megatron's",
        "trainer, in `magi explain` and for keys that are made without a `MagiConfig`. What takes no key does not read",
        "it: `slice_attention`, `flex_flash_attn_func`, `make_plan`, `distributed_attention`, transformers on one",
        "rank.",
    ]
    effect = {
        State.USED: "",
        State.UNNEEDED: "nothing",
        State.UNAVAILABLE: "not available",
    }
    for section, variables in SECTIONS.items():
        lines += ["", f"## {section}", "", "| variable | value | default | sets | what it does |"]
        lines.append("| --- | --- | --- | --- | --- |")
        for v in variables:
            kind = ", ".join(f"`{c}`" for c in v.choices) or v.kind.value
            sets = f"`{v.field}`" if v.field else effect[v.state]
            lines.append(f"| `{v.name}` | {kind} | {v.show_default()} | {sets} | {v.description} |")
    return "\n".join(lines) + "\n"


def build_kernels(folder: Path | None, jobs: int | None, arch: str | None = None) -> str:
    """Compiles the common kernels; needs torch and no GPU.

    Args:
        folder: where to put them; into the cache when None.
        jobs: how many at a time; what the environment says when None.
        arch: an architecture, with the kernels of collectives too: its name, as ``sm_100``, or compute capability, as
            ``10.0``. The kernels for attention on Hopper GPUs alone when None.

    Returns:
        What was done, in words.

    Raises:
        ImportError: torch is not installed.
        OSError: there is no compiler, or the folder cannot be written to.
        RuntimeError: the compiler reports an error.
        ValueError: a variable of the environment is malformed, there is no folder for the cache, or there are no
            kernels for the architecture.
    """
    from megatron_magi.backends.registry import common_kernels
    from megatron_magi.comm.kernel_list import row_kernels
    from megatron_magi.cuda import build as cuda_build
    from megatron_magi.cuda.target import DEFAULT_TARGET, target_named

    target = DEFAULT_TARGET if arch is None else target_named(arch)
    folder = cuda_build.default_cache_dir() if folder is None else folder
    jobs = envs.load_build().prebuild_jobs if jobs is None else jobs
    has_attention = target == DEFAULT_TARGET
    kernels = [*(common_kernels() if has_attention else ()), *(() if arch is None else row_kernels(target))]
    files = cuda_build.compile_into(folder, kernels, jobs, target)
    done = f"{len(files)} kernels for {target} are in {folder}"
    if has_attention:
        return done
    return f"{done}: those of collectives; attention runs there on a backend that compiles when it is first used"


def _env(args: argparse.Namespace) -> int:
    if args.markdown:
        sys.stdout.write(environment_page())
        return 0
    text, valid = environment_listing()
    print(text)
    return 0 if valid else 1


def _build(args: argparse.Namespace) -> int:
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stdout)
    wanted = not args.optional or envs.load_build().prebuild  # malformed variables are errors there too
    try:
        print(
            build_kernels(args.into, args.jobs, args.arch) if wanted else "no kernels are compiled ahead: switched off"
        )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        if not args.optional:
            raise
        print(f"no kernels are compiled ahead, each is when it is first used: {error}")
    return 0


def _doctor(_args: argparse.Namespace) -> int:
    from megatron_magi.doctor import examine

    report = examine()
    print(report.text)
    return 1 if report.problems else 0


def _explain(args: argparse.Namespace) -> int:
    # Not at the top: the other commands run where neither numpy nor torch is installed, as in an isolated build.
    from megatron_magi.explain import command

    try:
        print(command.run(args))
    except ValueError as error:
        # The message says which option is wrong; the usage of all would hide it.
        args.exit(2, f"{args.prog}: error: {error}\n")
    return 0


def _calibrate(_args: argparse.Namespace) -> int:
    """On the GPU of each process that torchrun started, or on the current one."""
    import torch
    import torch.distributed as dist

    from megatron_magi.calibration.measure import calibrate
    from megatron_magi.calibration.rates_file import keep

    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)
    is_first = True
    try:
        if dist.is_torchelastic_launched() and torch.cuda.is_available():
            torch.cuda.set_device(dist.get_node_local_rank())
            dist.init_process_group("nccl")
            is_first = dist.get_node_local_rank() == 0
        rates = calibrate()
        if is_first:
            print(rates.to_json(), end="")  # measured, also where they cannot be kept
            print(f"kept in {keep(rates)}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _count(text: str) -> int:
    """An option that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    prog = "magi" if Path(sys.argv[0]).name == "magi" else "python -m megatron_magi"
    parser = argparse.ArgumentParser(prog=prog, description="Context-parallel attention for Megatron.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    env = commands.add_parser("env", help="environment variables and their current values")
    env.set_defaults(run=_env)
    env.add_argument("--markdown", action="store_true", help="the page of the documentation instead")
    build = commands.add_parser("build", help="compile the common kernels, so that first steps need not")
    build.set_defaults(run=_build)
    build.add_argument("--into", type=Path, metavar="FOLDER", help="folder; that of the cache when not given")
    build.add_argument("--jobs", type=_count, metavar="N", help="kernels at a time; 90 %% of the cores when not given")
    build.add_argument(
        "--arch", metavar="ARCH", help="for this one, as sm_100 or 10.0, with the kernels of collectives; else Hopper's"
    )
    build.add_argument("--optional", action="store_true", help="a step of an installation: failing is no error")
    calibrate = commands.add_parser(
        "calibrate", help="measure the rates of this GPU, and under torchrun of what connects several, and keep them"
    )
    calibrate.set_defaults(run=_calibrate)
    doctor = commands.add_parser(
        "doctor", help="what runs on this machine, which versions, and what is missing; status 1 if anything is"
    )
    doctor.set_defaults(run=_doctor)
    explain = commands.add_parser("explain", help="balance, traffic and predicted time of a mask, with pictures")
    add_explain_arguments(explain)
    explain.set_defaults(run=_explain, prog=explain.prog, exit=explain.exit)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of ``magi`` and ``python -m megatron_magi``; returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        status = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who read it has gone; what is still buffered would raise again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
