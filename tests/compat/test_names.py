"""Every public name of MagiAttention v1.1 is here, or docs/migration.md says what replaces it."""

import inspect
import re
from pathlib import Path

import pytest

import megatron_magi
from megatron_magi import api
from tests.compat.reference_names import AUTOMODEL, AUTOMODEL_METHODS, EXTENSIONS, MEMBERS, METHODS, NAMES

PAGE = (Path(megatron_magi.__file__).parents[1] / "docs/migration.md").read_text()
ALL_NAMES = [(module, name) for module, names in NAMES.items() for name in names]
ALL_METHODS = [(owner, name) for owner, names in METHODS.items() for name in names]


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def cells(text, column):
    """One column of all tables of a section, without their heads."""
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [row[column] for row in rows if row[0].strip(" -") not in ("", "there", "module")]


def quoted(texts):
    return {name for text in texts for name in re.findall(r"`([^`]+)`", text)}


HERE = quoted(cells(section("Names that are here"), 1))
REPLACED = quoted(cells(section("Names that are replaced"), 0))
METHODS_REPLACED = quoted(cells(section("Methods and attributes"), 0))


def with_new_imports(text):
    """As the command of the page changes it."""
    rules = re.findall(r" -e 's/(.*)/(.*)/'", PAGE)
    assert len(rules) == 5
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


def takes(function, expected):
    """Whether ``function`` can be called with the arguments of ``expected``, by the same positions and names."""
    by_position, _, by_name = expected.partition("*")
    parameters = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    count = len(by_position.split())
    return parameters[:count] == by_position.split() and set(by_name.split()) <= set(parameters[count:])


@pytest.mark.parametrize("module, name", ALL_NAMES)
def test_a_name_is_here_with_its_arguments_or_the_page_says_what_replaces_it(module, name):
    if name not in api.__all__:
        assert name in REPLACED
        return
    assert name in HERE and name not in REPLACED and hasattr(api, name)
    expected = NAMES[module][name]
    if expected is not None:
        versions = expected if isinstance(expected, tuple) else (expected,)
        assert any(takes(getattr(api, name), version) for version in versions)


@pytest.mark.parametrize("owner, name", ALL_METHODS)
def test_a_method_is_here_with_its_arguments_or_the_page_says_what_replaces_it(owner, name):
    if not hasattr(getattr(api, owner), name) and name not in getattr(getattr(api, owner), "__dataclass_fields__", ()):
        assert f"{owner}.{name}" in METHODS_REPLACED
        return
    assert f"{owner}.{name}" not in METHODS_REPLACED
    expected = METHODS[owner][name]
    if expected is not None:
        assert takes(getattr(getattr(api, owner), name), expected)


@pytest.mark.parametrize("name", MEMBERS)
def test_enumerations_have_the_members_and_values_of_the_reference(name):
    assert {member.name: member.value for member in getattr(api, name)} == MEMBERS[name]


def test_the_page_promises_no_name_that_is_not_here():
    assert set(api.__all__) >= HERE


def test_an_import_line_needs_only_another_module():
    """The command of the page, on lines such as the documents of MagiAttention have."""
    lines = """
from magi_attention.api import calc_attn, compute_pad_size, dispatch, magi_attn_flex_key, roll, undispatch
from magi_attention.api import magi_attn_varlen_key, make_varlen_key_for_new_mask_after_dispatch
from magi_attention.api import DistAttnConfig, get_most_recent_key, get_position_ids, squash_batch_dim
from magi_attention.api import flex_flash_attn_func, infer_varlen_mask_from_batch
from magi_attention.api.functools import apply_padding, compute_pad_size, pad_at_dim, unpad_at_dim
from magi_attention.common import AttnForwardMeta, AttnRange, AttnRanges, AttnRectangle, AttnRectangles, RangeError
from magi_attention.common.enum import AttnMaskType, AttnOverlapMode, OverlapAlgType
from magi_attention.config import DispatchConfig, DistAttnConfig, MinHeapDispatchAlg, OverlapConfig, UniformOverlapAlg
from magi_attention.dist_attn_runtime_mgr import DistAttnRuntimeKey
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.functional.utils import correct_attn_lse_with_sink, correct_attn_out_lse_with_sink
from magi_attention.utils import clearup_dist_env, setup_dist_env
"""
    changed = with_new_imports(lines)
    assert "magi_attention" not in changed
    names = {}
    exec(changed, names)
    assert names["calc_attn"] is api.calc_attn and names["AttnRange"] is api.AttnRange
    for line in ("import magi_attention.api as magi", "if True:\n    import magi_attention.common as magi"):
        exec(with_new_imports(line), names)
        assert names.pop("magi") is api
    exec(with_new_imports("try:\n    import magi_attention\nexcept ImportError:\n    magi_attention = None"), names)
    assert names["magi_attention"] is api


def test_every_extension_is_here_with_its_arguments_or_the_page_says_so():
    from megatron_magi import extensions

    promised = quoted(cells(section("Extensions"), 1))
    assert promised == set(extensions.__all__) - {"Kernel"}
    for name, expected in EXTENSIONS.items():
        assert takes(getattr(extensions, name), expected), name
    changed = with_new_imports("from magi_attn_extensions import fa2_func_with_sink\n")
    changed += with_new_imports("from magi_attn_extensions.fa4_interface_with_sink import fa4_func_with_sink\n")
    names = {}
    exec(changed, names)
    assert names["fa4_func_with_sink"] is extensions.fa4_func_with_sink


def test_every_name_of_nemo_automodel_is_here_with_its_arguments_or_the_page_says_what_replaces_it():
    rows = list(zip(*(cells(section("NeMo Automodel"), column) for column in (0, 1)), strict=True))
    here, replaced = quoted([rows[0][0]]), quoted(there for there, _ in rows[1:])
    assert here | replaced == set(AUTOMODEL) and not here & replaced
    pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")
    from megatron_magi.hf import automodel

    assert here == set(automodel.__all__) - {"MagiAttnFunc"}
    for name in here:
        owner = getattr(automodel, name)
        if AUTOMODEL[name] is not None:
            assert takes(owner, AUTOMODEL[name]), name
        for method, expected in AUTOMODEL_METHODS.get(name, {}).items():
            assert hasattr(owner, method) and (expected is None or takes(getattr(owner, method), expected)), method
    names = {}
    for module in ("magi_attn_utils", "context_parallel.magi"):
        line = f"from nemo_automodel.components.distributed.{module} import MagiState, setup_magi"
        exec(with_new_imports(line), names)
    assert names["setup_magi"] is automodel.setup_magi
