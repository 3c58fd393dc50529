import ast
import dataclasses
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_magi
from megatron_magi import envs, variables
from megatron_magi.__main__ import environment_listing, environment_page
from megatron_magi.config import MagiConfig

ROOT = Path(megatron_magi.__file__).parents[1]
PREFIX = "MAGI_ATTENTION_"

# Every name of the reference documentation, v1.1 and v1.0.3.
KNOWN = {
    "FORWARD_HIGH_PRECISION_REDUCE",
    "BACKWARD_HIGH_PRECISION_REDUCE",
    "DSINK_ALL_REDUCE_OP",
    "FA4_BACKEND",
    "NATIVE_GRPCOLL",
    "QO_COMM",
    "FLATTEN_HEAD_GROUPS",
    "AUTO_RANGE_MERGE",
    "CATGQA",
    "BWD_HIDE_TAIL_REDUCE",
    "FFA_FORWARD_SM_MARGIN",
    "FFA_BACKWARD_SM_MARGIN",
    "CPP_BACKEND",
    "HIERARCHICAL_COMM",
    "DIST_ATTN_RUNTIME_DICT_SIZE",
    "SANITY_CHECK",
    "SDPA_BACKEND",
    "DETERMINISTIC_MODE",
    "PROFILE_MODE",
    "WORKSPACE_BASE",
    "BUILD_VERBOSE",
    "BUILD_DEBUG",
    "NO_BUILD_CACHE",
    "FORCE_JIT_BUILD",
    "PREBUILD_FFA_JOBS",
    "PREBUILD_FFA",
    "SKIP_FFA_UTILS_BUILD",
    "SKIP_MAGI_ATTN_EXT_BUILD",
    "SKIP_MAGI_ATTN_COMM_BUILD",
    "FFA_FA4_CACHE_DIR",
    "BUILD_COMPUTE_CAPABILITY",
    "FFA_FORWARD_INPLACE_CORRECT",
    "FFA_BACKWARD_HIGH_PRECISION_REDUCE",
    # Those that v1.1.1 reads, in its documents or not.
    "ALLOW_BUILD_WITH_CUDA12",
    "KERNEL_BACKEND",
    "LOG_LEVEL",
    "MIN_CHUNKS_PER_RANK",
    "PRECISION",
}


def config_of(**variables) -> MagiConfig:
    """The default configuration with these variables set, the prefix left out."""
    return envs.load({PREFIX + name: value for name, value in variables.items()}).default_config()


def with_margin(config: MagiConfig, margin: int) -> MagiConfig:
    attend = dataclasses.replace(config.attend, forward_sm_margin=margin, backward_sm_margin=margin)
    return dataclasses.replace(config, attend=attend)


def test_every_documented_name_is_in_the_table_and_no_other():
    others = {"CUDA_DEVICE_MAX_CONNECTIONS", "NVCC_THREADS", "MAX_JOBS", "NVSHMEM_DIR"}
    assert set(variables.VARIABLES) == {PREFIX + name for name in KNOWN} | others
    assert len(variables.VARIABLES) == sum(len(section) for section in variables.SECTIONS.values())


def test_an_empty_environment_gives_the_defaults_of_the_configuration():
    assert envs.load({}).default_config() == with_margin(MagiConfig(), 4)
    assert envs.load({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}).default_config() == MagiConfig()
    assert envs.load({PREFIX + "DETERMINISTIC_MODE": " "}) == envs.load({})


KERNEL_BACKENDS = {
    "ffa": "ffa",
    "cudnn": "cudnn",
    "triton": "triton",
    "fa4": "cudnn",
    "sdpa": "reference",
    "sdpa_ol": "torch",
}


@pytest.mark.parametrize(
    "name, text, part, field, value",
    [
        ("DETERMINISTIC_MODE", "1", "attend", "deterministic", True),
        ("SANITY_CHECK", "1", "attend", "sanity_check", True),
        ("SDPA_BACKEND", "1", "attend", "impl", "reference"),
        ("SDPA_BACKEND", "0", "attend", "impl", "auto"),
        *(("KERNEL_BACKEND", text, "attend", "impl", impl) for text, impl in KERNEL_BACKENDS.items()),
        ("FA4_BACKEND", "1", "attend", "impl", "cudnn"),
        ("FA4_BACKEND", "0", "attend", "impl", "auto"),
        ("FFA_FORWARD_SM_MARGIN", "0", "attend", "forward_sm_margin", 0),
        ("FFA_BACKWARD_SM_MARGIN", "12", "attend", "backward_sm_margin", 12),
        ("BACKWARD_HIGH_PRECISION_REDUCE", "1", "comm", "backward_high_precision_reduce", True),
        ("FFA_BACKWARD_HIGH_PRECISION_REDUCE", "1", "comm", "backward_high_precision_reduce", True),
        ("DSINK_ALL_REDUCE_OP", "avg", "comm", "dsink_all_reduce", "avg"),
        ("BWD_HIDE_TAIL_REDUCE", "1", "overlap", "hide_tail_reduce", True),
        ("NATIVE_GRPCOLL", "1", "comm", "impl", "native"),
        ("NATIVE_GRPCOLL", "0", "comm", "impl", "all_to_all"),
        ("CPP_BACKEND", "1", "dispatch", "planner", "native"),
        ("CPP_BACKEND", "0", "dispatch", "planner", "python"),
        ("QO_COMM", "1", "dispatch", "queries", "travel"),
        ("QO_COMM", "0", "dispatch", "queries", "home"),
    ],
)
def test_a_variable_sets_its_field_and_nothing_else(name, text, part, field, value):
    default = envs.load({}).default_config()
    expected = dataclasses.replace(default, **{part: dataclasses.replace(getattr(default, part), **{field: value})})
    assert config_of(**{name: text}) == expected


def test_every_field_in_the_table_exists():
    for variable in variables.VARIABLES.values():
        if variable.field is not None:
            part, field = variable.field.split(".")
            assert hasattr(getattr(MagiConfig(), part), field)


def test_another_precision_than_that_of_the_tensors_is_refused():
    with pytest.raises(ValueError, match=rf"^{PREFIX}PRECISION=fp64: .* not available yet: convert.*\. Unset it\.$"):
        config_of(PRECISION="fp64")


@pytest.mark.parametrize(("text", "told", "nodes"), [("", 4, 4), ("", None, None), ("0", 4, None), ("1", 4, 4)])
def test_nodes_are_told_apart_where_something_tells_them_unless_that_is_refused(text, told, nodes):
    assert envs.load({PREFIX + "HIERARCHICAL_COMM": text}).ranks_per_node(told, "a mesh") == nodes


def test_two_levels_without_nodes_are_an_error():
    with pytest.raises(ValueError, match=f"{PREFIX}HIERARCHICAL_COMM: needs a mesh to tell"):
        envs.load({PREFIX + "HIERARCHICAL_COMM": "1"}).ranks_per_node(None, "a mesh")


def test_the_settings_of_compiling_are_read_alone():
    cores = math.ceil(0.9 * os.cpu_count())
    assert envs.load_build({}) == envs.BuildSettings(None, False, False, True, False, True, cores)
    values = {"WORKSPACE_BASE": "/scratch", "PREBUILD_FFA": "0", "PREBUILD_FFA_JOBS": "3"}
    values |= dict.fromkeys(("BUILD_VERBOSE", "BUILD_DEBUG", "NO_BUILD_CACHE", "FORCE_JIT_BUILD"), "1")
    # What is wrong elsewhere is not a matter of compiling.
    environ = {PREFIX + name: value for name, value in values.items()} | {PREFIX + "PRECISION": "fp64"}
    assert envs.load_build(environ) == envs.BuildSettings("/scratch", True, True, False, True, False, 3)
    with pytest.raises(ValueError, match=f"{PREFIX}NO_BUILD_CACHE: expected 0 or 1, got 'yes'"):
        envs.load_build({PREFIX + "NO_BUILD_CACHE": "yes"})


def test_what_is_not_needed_is_accepted_and_changes_nothing():
    values = {variables.Kind.TOGGLE: "1", variables.Kind.COUNT: "3", variables.Kind.TEXT: "/somewhere"}
    unneeded = [v for v in variables.VARIABLES.values() if v.state is variables.State.UNNEEDED]
    environment = envs.load({v.name: values[v.kind] for v in unneeded})
    assert len(environment.given) == len(unneeded) > 10
    assert environment.default_config() == envs.load({}).default_config()


@pytest.mark.parametrize(
    "name, text",
    [
        (PREFIX + "DETERMINISTIC_MODE", "true"),
        (PREFIX + "DETERMINISTIC_MODE", "2"),
        (PREFIX + "FFA_FORWARD_SM_MARGIN", "four"),
        (PREFIX + "FFA_FORWARD_SM_MARGIN", "-1"),
        (PREFIX + "DIST_ATTN_RUNTIME_DICT_SIZE", "0"),
        (PREFIX + "DSINK_ALL_REDUCE_OP", "max"),
        (PREFIX + "CATGQA", "on"),
        (PREFIX + "KERNEL_BACKEND", "fa9"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "0"),
        ("MAX_JOBS", "all"),
    ],
)
def test_a_malformed_value_is_an_error_that_names_the_variable(name, text):
    with pytest.raises(ValueError, match=f"^{name}: expected .*{text}"):
        envs.load({name: text})


def test_the_old_and_the_new_name_of_one_variable_must_agree():
    both = {"BACKWARD_HIGH_PRECISION_REDUCE": "1", "FFA_BACKWARD_HIGH_PRECISION_REDUCE": "1"}
    assert config_of(**both).comm.backward_high_precision_reduce
    with pytest.raises(ValueError, match="FFA_BACKWARD_HIGH_PRECISION_REDUCE: contradicts"):
        config_of(**both | {"FFA_BACKWARD_HIGH_PRECISION_REDUCE": "0"})


def test_two_variables_that_choose_the_attention_must_agree():
    assert config_of(SDPA_BACKEND="1", KERNEL_BACKEND="sdpa").attend.impl == "reference"
    assert config_of(SDPA_BACKEND="0", KERNEL_BACKEND="ffa").attend.impl == "ffa"
    with pytest.raises(ValueError, match="SDPA_BACKEND: contradicts MAGI_ATTENTION_KERNEL_BACKEND"):
        config_of(SDPA_BACKEND="1", KERNEL_BACKEND="ffa")
    for same in ("fa4", "cudnn"):
        assert config_of(FA4_BACKEND="1", KERNEL_BACKEND=same).attend.impl == "cudnn"
    with pytest.raises(ValueError, match="FA4_BACKEND: contradicts MAGI_ATTENTION_KERNEL_BACKEND"):
        config_of(FA4_BACKEND="1", KERNEL_BACKEND="ffa")
    with pytest.raises(ValueError, match="SDPA_BACKEND: contradicts MAGI_ATTENTION_FA4_BACKEND"):
        config_of(FA4_BACKEND="1", SDPA_BACKEND="1")


def test_typed_values_and_defaults_can_be_read_by_name():
    environment = envs.load({PREFIX + "DIST_ATTN_RUNTIME_DICT_SIZE": "7", "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert environment.plan_cache_size == 7
    assert environment.value("CUDA_DEVICE_MAX_CONNECTIONS") == 1
    assert environment.value(PREFIX + "PREBUILD_FFA") is True
    assert envs.load({}).plan_cache_size == 1000
    assert hash(environment) != hash(envs.load({}))
    with pytest.raises(KeyError):
        environment.value("PATH")


def test_a_misspelt_name_is_warned_about_once():
    envs._warn_of.cache_clear()
    with pytest.warns(UserWarning, match="MAGI_ATTENTION_DETERMINISTIC$") as found:
        assert envs.load({PREFIX + "DETERMINISTIC": "1", "PATH": "/bin"}) == envs.load({PREFIX + "DETERMINISTIC": "1"})
    assert len(found) == 1


def test_the_process_environment_is_read_when_load_is_called(monkeypatch):
    monkeypatch.setenv(PREFIX + "DETERMINISTIC_MODE", "1")
    assert envs.load().default_config().attend.deterministic


def test_the_listing_shows_values_and_errors():
    text, valid = environment_listing({PREFIX + "DETERMINISTIC_MODE": "1", PREFIX + "ODD": "1"})
    assert valid
    assert "MAGI_ATTENTION_DETERMINISTIC_MODE = 1  (set, sets attend.deterministic)" in text
    assert "CUDA_DEVICE_MAX_CONNECTIONS = 8  (default)" in text
    assert "unknown, ignored: MAGI_ATTENTION_ODD" in text
    text, valid = environment_listing({PREFIX + "PRECISION": "fp64"})
    assert not valid
    assert "ERROR: MAGI_ATTENTION_PRECISION=fp64" in text


def test_the_documentation_is_current():
    page = (ROOT / "docs" / "environment.md").read_text()
    assert page == environment_page(), "run: python -m megatron_magi env --markdown > docs/environment.md"


def test_the_command_prints_every_variable():
    result = subprocess.run(
        [sys.executable, "-m", "megatron_magi", "env"], capture_output=True, text=True, timeout=900, check=True
    )
    assert all(name in result.stdout for name in variables.VARIABLES)


def test_the_command_ends_quietly_when_its_reader_has_gone():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "megatron_magi", "env"]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=900)
    os.close(write)
    assert (result.returncode, result.stderr) == (1, "")


def test_what_megatron_wants_is_set_and_can_be_taken_back(monkeypatch):
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, "8")
    envs.set_for_megatron()()
    assert os.environ[name] == "8"
    monkeypatch.delenv(name)
    take_back = envs.set_for_megatron()
    assert os.environ[name] == "1"
    take_back()
    assert name not in os.environ


def test_no_other_module_of_the_product_touches_the_environment():
    package = ROOT / "megatron_magi"
    # Launchers set variables for their child processes.
    launchers = ("testing", "demo")
    users = set()
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] in launchers:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
                users.add(path.name)
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                users.update(path.name for name in node.names if "env" in name.name)
    assert users == {"envs.py"}


def test_the_environment_is_read_again_when_it_changes(monkeypatch):
    name = PREFIX + "DIST_ATTN_RUNTIME_DICT_SIZE"
    monkeypatch.delenv(name, raising=False)
    default = envs.load().plan_cache_size
    for size in (default + 1, default + 2):
        monkeypatch.setenv(name, str(size))
        assert envs.load().plan_cache_size == size == envs.load().plan_cache_size
    monkeypatch.setenv(name, "none")
    for _ in range(2):
        with pytest.raises(ValueError, match=name):
            envs.load()
    monkeypatch.delenv(name)
    assert envs.load().plan_cache_size == default


def test_the_workspace_is_that_of_the_build_settings():
    for environ in ({}, {PREFIX + "WORKSPACE_BASE": " /scratch "}, {PREFIX + "WORKSPACE_BASE": " "}):
        assert envs.workspace(environ) == envs.load_build(environ).workspace


def test_a_configuration_is_sent_without_its_hash_which_differs_between_processes():
    config = MagiConfig()
    assert hash(config) == hash(MagiConfig()) and config == MagiConfig()
    sent = pickle.loads(pickle.dumps(config))
    assert sent == config and vars(sent).keys() == {field.name for field in dataclasses.fields(config)}
