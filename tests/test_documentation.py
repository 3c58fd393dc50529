"""The documentation's examples run, and its links lead somewhere."""

import ast
import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch

import megatron_magi
from megatron_magi.mcore.versions import KNOWN_VERSIONS
from megatron_magi.testing.megatron_launch import launch
from tests import megatron_versions

ROOT = Path(megatron_magi.__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md"))]
HF_PAGES = ["docs/hugging_face.md", "docs/rollouts.md"]


def python_blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def run_blocks(rank, num_ranks, page):
    """All blocks of a page in one namespace, as a reader would type them."""
    torch.manual_seed(0)
    names = {"__name__": "example"}
    for block in python_blocks(page):
        exec(compile(block, page, "exec"), names)
    return sorted(names)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("page", [p for p in PAGES if python_blocks(p) and p not in ("docs/masks.md", *HF_PAGES)])
def test_examples_run_on_two_ranks(ranks, page):
    names = ranks(2, run_blocks, page)
    assert set(names[0]) - {"__name__", "__builtins__"}, "no example has run"


def anchors(path):
    """Anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target, _, anchor in re.findall(r"\]\(([^)#:]*)(#([^)]*))?\)", (ROOT / page).read_text()):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_the_site_shows_items_of_lists_as_items(page):
    """python-markdown takes an item right after an indented paragraph for text, unlike GitHub."""
    markdown = pytest.importorskip("markdown", reason="mkdocs is not installed: make setup")
    html = markdown.markdown((ROOT / page).read_text(), extensions=["tables", "fenced_code"])
    paragraphs = re.findall(r"<p>(.*?)</p>", html, flags=re.DOTALL)
    assert [text for text in paragraphs if re.search(r"^[-*] ", text, flags=re.MULTILINE)] == []


def script_of_documents(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_page_of_functions_is_what_its_script_makes():
    pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")
    script = script_of_documents("make_api")
    assert (ROOT / "docs/api.md").read_text() == script.page(), "run: python docs/make_api.py"
    listed = {name for _, _, modules in script.SECTIONS for names in modules.values() for name in names}
    classes = {"AttendConfig", "CommConfig", "CostModel", "DispatchConfig", "MagiConfig", "OverlapConfig", "MaskType"}
    assert set(megatron_magi.__all__) - classes - {"AttnRange", "AttnRanges", "AttnSlice"} <= listed


def test_the_gallery_of_masks_is_what_its_script_makes():
    script = script_of_documents("make_masks")
    assert (ROOT / "docs/masks.md").read_text() == script.page(), "run: python docs/make_masks.py"
    assert {path.stem for path in (ROOT / "docs/images/masks").glob("*.png")} == {e[0] for e in script.ENTRIES}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number, script", [(0, "pretrain_gpt.py"), (1, "pretrain_hybrid.py")])
def test_commands_of_the_page_of_megatron_train(tmp_path, number, script):
    commands = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/megatron.md").read_text(), flags=re.DOTALL)
    assert len(commands) == 2
    words = commands[number].replace("\\\n", " ").split()
    assert words[:6] == [
        "python", "-m", "torch.distributed.run", "--nproc-per-node", "2", f"pretrain_scripts/{script}",
    ]  # fmt: skip
    words = [str(ROOT / word) if word.startswith("configs/") else word.strip('"') for word in words[6:]]
    on_gpus = ["--distributed-backend", "nccl", "--bf16"] if torch.cuda.is_available() else []
    script = str(ROOT / "pretrain_scripts" / script)
    losses = list(launch([*words, *on_gpus], 2, script=script, workdir=tmp_path).losses.values())
    assert len(losses) == 3 and all(math.isfinite(loss) for loss in losses)


def run_pages(rank, num_ranks, pages):
    return [run_blocks(rank, num_ranks, page) for page in pages]


@pytest.mark.ranks(2)
def test_examples_with_transformers_run_on_two_ranks(ranks):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")
    assert all("loss" in names for pages in ranks(2, run_pages, HF_PAGES) for names in pages)


def test_every_builder_is_in_the_gallery():
    from megatron_magi.mask import builders

    page = (ROOT / "docs/masks.md").read_text()
    small = {"cu_seqlens_from_eod", "window_slices"}
    assert [name for name in builders.__all__ if name not in small and f"`{name}`" not in page] == []


def test_every_refused_argument_of_megatron_is_in_the_documents():
    guide = "".join((ROOT / f"docs/megatron_{part}.md").read_text() for part in ("refused", "reference"))
    source = (ROOT / "megatron_magi/mcore/validate.py").read_text()
    refused = set(re.findall(r'"(\w+): ', source)) | {"qk_clip", "log_max_attention_logit", "logits_load_dir"}
    assert len(refused) > 10
    assert [name for name in sorted(refused) if name not in guide] == []


GUIDES = [
    "CONTRIBUTING.md",
    "docs/internals/tour.md",
    *sorted(page for page in PAGES if page.startswith("docs/recipes/")),
]
PLACE = re.compile(r"`([\w./-]+(?:\.(?:py|cu|cuh|cpp|hpp|toml|md)|/))(?::(\w+(?:\.\w+)?))?`")
"""A file or folder, from the root of the repository or of the package, and the name of what is meant in it."""


def names_in(path):
    """Functions, classes, methods (also as Class.method) and variables of a file; if it is not Python, its words."""
    text = path.read_text()
    if path.suffix != ".py":
        return set(re.findall(r"\w+", text))
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("page", GUIDES)
def test_places_in_the_code_that_guides_name_exist(page):
    places = PLACE.findall((ROOT / page).read_text())
    assert len(places) > 3
    missing = []
    for file, name in places:
        path = next((root / file for root in (ROOT, ROOT / "megatron_magi") if (root / file).exists()), None)
        if path is None or (name and name not in names_in(path)):
            missing.append(f"{file}:{name}" if name else file)
    assert missing == []


TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
"""A test, as pytest names it."""


def test_reports_of_wrong_numbers_name_tests_that_are_there():
    rows = re.findall(r"^\| (?!report |---)(.*) \|$", (ROOT / "docs/reported_faults.md").read_text(), re.MULTILINE)
    assert len(rows) > 10
    assert [row for row in rows if not TEST.search(row)] == []
    named = {found for page in PAGES for found in TEST.findall((ROOT / page).read_text())}
    missing = [(file, name) for file, name in named if not (ROOT / file).exists() or name not in names_in(ROOT / file)]
    assert missing == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md"])
def test_a_page_says_first_for_whom_it_is(page):
    title, empty, first = (ROOT / page).read_text().splitlines()[:3]
    assert title.startswith("# ") and empty == ""
    assert first.startswith(("For those ", "For contributors", "For engineers"))


@pytest.mark.parametrize("page", ["performance", "performance_details", "performance_planning"])
def test_tables_of_figures_name_their_results(page):
    """In their part: a file of results, details that name it, or the command. The overview links to parts."""
    _, _overview, *parts = re.split(r"^#+ ", (ROOT / f"docs/{page}.md").read_text(), flags=re.MULTILINE)
    tables = [part for part in parts if "\n| " in part]
    assert len(tables) > 5
    named = re.compile(r"results/|performance_details\.md#|python\s+-m\s+benchmarks")
    assert [part.splitlines()[0] for part in tables if not named.search(part)] == []


def test_what_is_said_of_other_projects_has_sources():
    """Of the tables of docs/features.md: each column's project and version."""
    text = (ROOT / "docs/features.md").read_text()
    compared, sources = re.search(
        r"^## Compared with(.*?)^### Sources(.*?)^(?=\[Migrating)", text, re.S | re.M
    ).groups()
    headers = re.findall(r"^(\| \| megatron_magi .*) \|\n\| ---", compared, re.MULTILINE)
    columns = [column for header in headers for column in header.split(" | ")[2:]]
    assert len(columns) == 7
    for column in columns:
        assert re.search(r"\d[\w.]+", column).group() in sources, column


MOST_WORDS_OF_A_SENTENCE = 50


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/kernel_log.md"])
def test_no_sentence_is_too_long(page):
    """Without code and tables. The log of experiments lists figures."""
    text = re.sub(r"```.*?```|^(?:    |\|).*?$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    paragraphs = re.split(r"\n\s*\n|\n(?=- |\d+\. |#)", text)
    sentences = [s for p in paragraphs for s in re.split(r"(?<=[.:!?])\**\)?\s+(?=[A-Z`*\[(])", " ".join(p.split()))]
    assert [s for s in sentences if len(re.findall(r"\S*\w\S*", s)) > MOST_WORDS_OF_A_SENTENCE] == []


MOST_WORDS, MOST_FIGURES = 900, 40


def test_the_readme_is_read_in_a_minute():
    """Words as ``wc`` counts them; figures stand alone, unlike those in names such as H100, bf16 and 32k."""
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= MOST_WORDS
    text = re.sub(r"\]\([^)]*\)", "]", text)
    prose = re.sub(r"```.*?```|^    \S.*?$|`[^`]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    figures = re.findall(r"(?<![\w.,])\d[\d.,]*(?:e-?\d+)?(?!\w)", prose)
    assert len(figures) <= MOST_FIGURES, figures


def test_versions_of_the_readmes_table_are_those_that_tests_install():
    (table,) = re.findall(r"^## What it runs with$(.*?)(?=^## )", (ROOT / "README.md").read_text(), re.DOTALL | re.M)
    rows = dict(re.findall(r"^\| (\S[^|]*?) \| (.*) \|$", table, re.MULTILINE))
    locked = dict(re.findall(r'name = "(\S+)"\nversion = "(\S+)"', (ROOT / "uv.lock").read_text()))
    assert {f"{name} {'.'.join(locked[name].split('.')[:2])}" for name in ("transformers", "accelerate")} == {
        part for row in rows if row.startswith("transformers") for part in row.split(", ")
    }
    frameworks = {"automodel": "NeMo Automodel", "megatron_bridge": "Megatron Bridge", "trl": "TRL"}
    for path in (ROOT / "tests/frameworks").glob("*.txt"):
        assert f"{frameworks.get(path.stem, path.stem)} {path.read_text().split()[0].split('==')[1]}" in rows
    newest = dict(re.findall(r"^(\S+)==(\d+\.\d+)", (ROOT / "tests/newest.txt").read_text(), re.MULTILINE))
    assert f"; {newest['torch']} on CPUs" in rows[f"torch {'.'.join(locked['torch'].split('.')[:2])}"]
    (cells,) = (cells for row, cells in rows.items() if row.startswith("transformers"))
    assert f"transformers {newest['transformers']} on CPUs" in cells
    (versions,) = (row for row in rows if row.startswith("megatron-core"))
    measured = {path.stem for path in (ROOT / "benchmarks/results/megatron").glob("0.*.json")}
    assert set(re.findall(r"\d[\d.]+\d", versions)) == measured
    assert all("](" in cells for row, cells in rows.items() if "✓" in cells)


def test_the_table_of_versions_is_that_of_their_results():
    results = sorted((ROOT / "benchmarks/results/megatron").glob("*.json"))
    assert {"main", *KNOWN_VERSIONS} == {path.stem for path in results}
    assert megatron_versions.table() in (ROOT / "docs/megatron_versions.md").read_text()
    failed = [(path.stem, cell) for path in results for cell in re.findall(r".*failed.*", path.read_text())]
    assert failed == []


def test_the_readmes_picture_is_drawn(tmp_path, monkeypatch):
    """Zigzag is uneven and sends more than what is needed; the file is that of its script up to matplotlib."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install megatron_magi[demo]")
    script = script_of_documents("make_pictures")
    (_, theirs, their_rows), (_, ours, our_rows) = script.idea()
    assert theirs.stats().balance > 1.2 and ours.stats().balance < 1.05
    assert max(our_rows) < min(their_rows)
    assert our_rows == ours.stats().lower_bound_rows
    monkeypatch.setattr("sys.argv", ["make_pictures.py", str(tmp_path)])
    script.main()
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {"idea.png", "dispatch.png", "tiles.png", "timeline.png"}
    assert all((ROOT / "docs/images" / name).exists() for name in drawn)


def test_the_map_of_the_readme_names_what_exists():
    (part,) = re.findall(
        r"^## Where things are$(.*?)(?=^## )", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.M
    )
    items = re.findall(r"^- (`[^:]*): (.*?)(?=^- |\Z)", part, flags=re.DOTALL | re.MULTILINE)
    assert len(items) == part.count("\n- ") > 12
    missing = []
    for first, second in items:
        names = re.findall(r"`(.*?)`", first)
        roots = [ROOT, ROOT / "megatron_magi"]
        missing += [name for name in names if not any((root / name).exists() for root in roots)]
        folders = [*roots, *(root / name for root in roots for name in names)]
        files = [name for name in re.findall(r"`(.*?)`", second) if re.search(r"[/.]", name)]
        missing += [name for name in files if not any((folder / name).exists() for folder in folders)]
    assert missing == []


def test_words_of_the_glossary_are_in_the_code():
    (glossary,) = re.findall(
        r"^## Glossary$(.*?)(?=^## |\Z)", (ROOT / "docs/design.md").read_text(), flags=re.DOTALL | re.M
    )
    rows = re.findall(r"^\| (`.*?`) \|", glossary, flags=re.MULTILINE)
    words = [word for row in rows for word in re.findall(r"`(.*?)`", row)]
    sources = [path for folder in ("megatron_magi", "csrc") for path in (ROOT / folder).rglob("*")]
    code = "\n".join(p.read_text() for p in sources if p.suffix in (".py", ".cu", ".cuh", ".cpp", ".hpp"))
    known = set(re.findall(r"\w+", code))
    assert len(words) > 30
    assert [word for word in words if word not in known] == []


def test_every_package_says_which_of_its_files_to_read_first():
    silent = []
    for path in sorted((ROOT / "megatron_magi").rglob("*/__init__.py")):
        parts = {other.stem for other in path.parent.glob("*.py")} | {other.name for other in path.parent.glob("*/")}
        said = re.findall(r"`(\w+)`", ast.get_docstring(ast.parse(path.read_text())) or "")
        silent += [] if parts & set(said) else [path.parent.name]
    assert silent == []
