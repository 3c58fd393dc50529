"""`magi_attention` and `magi_attn_extensions` as names of this package."""

import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import megatron_magi
from megatron_magi import api, extensions
from megatron_magi.compat.package import WHY_MISSING, why_missing
from megatron_magi.compat.package_names import MODULES
from megatron_magi.testing.spawn import RankError, run_ranks
from tests.compat.execute import execute
from tests.compat.reference_names import EXTENSIONS, NAMES

ROOT = Path(megatron_magi.__file__).parents[1]


def run(script, *paths):
    """A script in a process of its own, which has imported torch alone; with ``paths`` before all others."""
    run_ranks(execute, 1, f"sys.path[:0] = {[str(path) for path in (*paths, ROOT)]!r}\n{textwrap.dedent(script)}")


EVERY_NAME = textwrap.dedent("""
    import importlib, inspect
    from megatron_magi import api, extensions
    from megatron_magi.compat.package_names import MODULES
    for name, names in MODULES.items():
        home = api if name.startswith("magi_attention") else extensions
        module = importlib.import_module(name)
        assert set(module.__all__) <= names and importlib.util.find_spec(name) is not None
        for attribute in names:
            if attribute == "dsink_all_reduce_op":
                assert module.dsink_all_reduce_op is api.comm.dsink_all_reduce_op
            elif f"{name}.{attribute}" in MODULES:
                assert inspect.ismodule(getattr(module, attribute))
            elif attribute in home.__all__:
                assert getattr(module, attribute) is getattr(home, attribute)
            else:
                try:
                    exec(f"from {name} import {attribute}")
                except ImportError as error:
                    assert f"{attribute} of {name} is not in megatron_magi" in str(error), error
                else:
                    raise AssertionError(f"{name}.{attribute}")
    import magi_attention
    assert not hasattr(magi_attention, "nothing")
""")


def test_every_public_name_of_every_module_is_here_or_says_why_not():
    run(f"import megatron_magi\nmegatron_magi.as_magi_attention()\nmegatron_magi.as_magi_attention()\n{EVERY_NAME}")


def test_the_table_has_the_names_of_the_documents():
    for module, names in NAMES.items():
        assert MODULES[module] >= set(names), module
    assert MODULES["magi_attn_extensions"] == set(EXTENSIONS) <= set(extensions.__all__)
    assert set(WHY_MISSING) <= set(MODULES) and all(why_missing(module) for module in MODULES)
    missing = MODULES["magi_attention.api"] - set(api.__all__)
    assert missing == {"DistAttnRuntimeDictManager", "dist_attn_runtime_dict_mgr"}


def test_what_megatron_lite_and_nemo_automodel_import():
    run(
        """
        import megatron_magi
        megatron_magi.as_magi_attention()
        from magi_attention.api import calc_attn, dispatch, magi_attn_flex_key, magi_attn_varlen_key, undispatch
        from magi_attention.api.functools import compute_pad_size
        from magi_attention.common.enum import AttnMaskType, AttnOverlapMode
        from magi_attention.common.ranges import AttnRanges
        from magi_attention.config import DispatchConfig, DistAttnConfig, OverlapConfig
        from magi_attention.meta.solver.dispatch_solver import DispatchConfig, MinHeapDispatchAlg
        from magi_attention.meta.solver.overlap_solver import OverlapConfig, UniformOverlapAlg
        from magi_attn_extensions.fa2_interface_with_sink import fa2_varlen_func_with_sink
        """
    )


@pytest.mark.parametrize("module", ["magi_attention.functional.nothing", "magi_attention.comm.primitive._all2all_v"])
def test_a_module_that_is_not_public_is_refused_by_name(module):
    with pytest.raises(RankError, match=f"ModuleNotFoundError: {module} is no public module of MagiAttention 1.1.1"):
        run(f"import megatron_magi; megatron_magi.as_magi_attention()\nimport {module}")


def test_a_package_that_is_imported_already_is_not_replaced(tmp_path):
    (tmp_path / "magi_attention.py").touch()
    script = "import magi_attention, megatron_magi; megatron_magi.as_magi_attention()"
    with pytest.raises(RankError, match="ImportError: another magi_attention has been imported already, from "):
        run(script, tmp_path)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The alias distribution, built as a wheel and unpacked: it is Python alone."""
    folder = tmp_path_factory.mktemp("alias")
    source = folder / "source"
    for path in (ROOT / "packaging/magi-attention-alias").rglob("*"):
        if path.suffix in (".py", ".toml", ".md") and "build" not in path.relative_to(ROOT).parts:
            copy = source / path.relative_to(ROOT / "packaging/magi-attention-alias")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_the_alias_distribution_provides_every_name_and_says_what_it_is(installed):
    metadata = next(installed.glob("*.dist-info/METADATA")).read_text()
    assert "Name: megatron-magi-as-magi-attention" in metadata and "Summary: NOT MagiAttention" in metadata
    assert f"Version: {megatron_magi.__version__}\n" in metadata
    assert f"Requires-Dist: megatron-magi=={megatron_magi.__version__}\n" in metadata
    run(f"import magi_attention.common.enum, magi_attn_extensions\n{EVERY_NAME}", installed)


@pytest.mark.parametrize("package", ["magi_attention", "magi_attn_extensions"])
def test_the_alias_distribution_is_refused_beside_the_real_one(installed, tmp_path, package):
    real = tmp_path / f"{package}-1.1.1.dist-info"
    real.mkdir()
    (real / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.1.1\n")
    script = f"import {package}.api" if package == "magi_attention" else f"import {package}"
    with pytest.raises(
        RankError, match=f"ImportError: {package} and megatron-magi-as-magi-attention are both installed"
    ):
        run(script, installed, tmp_path)
