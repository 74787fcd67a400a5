"""README and docs against the code: commands parse, keys and tags have rows, links resolve."""

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields

import pytest
import tyro
from conftest import ROOT, SCRIPTS
from test_siblings import tags_in

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md"))}
PAGES["README.md"] = README


# --------------------------------------------------------------------------------------------------
# Commands
# --------------------------------------------------------------------------------------------------


def commands(text):
    """Every shell command of a page that names a python file: in fences, indented, and in code
    spans. Lines that end in a backslash are joined; comments fall; `a && b` is two commands."""
    code = re.findall(r"^```(?:bash|sh)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    code += re.findall(r"^    (\S.*)$", prose, re.MULTILINE)
    code += re.findall(r"`([^`\n]+)`", prose)
    code += re.findall(r"# .*use it with: (.+)$", text, re.MULTILINE)
    lines = [line for block in code for line in block.replace("\\\n", " ").splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    found = []
    for part in parts:
        try:
            words = shlex.split(part, comments=True)
        except ValueError:  # an apostrophe: not a command
            continue
        if words and words[0] in ("python", "torchrun") and any(w.endswith(".py") for w in words):
            found.append(words)
    return found


def problem_with(words):
    """What is wrong with a command, or None. Nothing is run but argument parsers."""
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    path, rest = ROOT / words[at], words[at + 1 :]
    if not path.exists():
        return f"{words[at]} does not exist"
    if path.stem not in (*SCRIPTS, "critic_report"):  # a tool: its flags stand in its source
        source = path.read_text(encoding="utf-8")
        flags = [w for w in rest if w.startswith("--")]
        own = [flag for flag in flags if f'"{flag}"' in source]
        if "parse_known_args" in source:  # other flags go to the scripts
            known = {f"--{f.name.replace('_', '-')}" for f in fields(script("fipo").Args)}
            own += [flag for flag in flags if flag in known]
        wrong = sorted({*flags} - {*own})
        return f"{words[at]} has no {wrong}" if wrong else None
    module = script(path.stem)
    preset = rest.pop(0) if rest and not rest[0].startswith("-") else "tiny"
    if preset not in module.PRESETS:
        return f"{path.name} has no preset {preset}"
    rest = [word for word in rest if word != "--help"]
    try:
        tyro.cli(module.Args, default=module.PRESETS[preset], args=rest)
    except SystemExit:
        return f"{' '.join(words)} does not parse"
    return None


def script(name):
    return importlib.import_module(name)


COMMANDS = sorted({(page, tuple(words)) for page in PAGES for words in commands(PAGES[page])})


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[" ".join(w) for _, w in COMMANDS])
def test_command_parses(page, words):
    assert problem_with(list(words)) is None


def test_every_script_has_a_command_in_the_readme_and_every_preset_is_named():
    named = {word for words in commands(README) for word in words}
    assert "fipo.py" in named and "torchrun" in named
    for name in SCRIPTS:
        assert f"[{name}.py]({name}.py)" in README
        assert not [p for p in script(name).PRESETS if f"`{p}`" not in README]


@pytest.mark.parametrize(
    "line",
    [
        "python dapo.py qwen2.5-7b-math",  # a preset of fipo.py
        "python fipo.py --half-life 8",
        "python fipo.py --future-kl-half-life no",
        "torchrun --nproc_per_node 8 ppo.py",
        "python benchmarks/tiny_runs.py --scripst fipo",
    ],
)
def test_the_check_of_commands_can_fail(line):
    (words,) = commands(f"```bash\n{line}\n```")
    assert problem_with(words) is not None


def test_commands_are_found_in_fences_indents_spans_and_comments():
    text = (
        "```bash\npython a.py \\\n  --x 1  # why\n```\n\n    torchrun b.py\n\nor `python c.py --y`"
    )
    text += "\n```python\n# use it with: python d.py\n```\n"
    assert [words[1:] for words in commands(text)] == [
        ["a.py", "--x", "1"],
        ["b.py"],
        ["c.py", "--y"],
        ["d.py"],
    ]


def test_every_flag_named_in_the_docs_exists():
    parsed = (*SCRIPTS, "critic_report")
    known = {f"--{f.name.replace('_', '-')}" for n in parsed for f in fields(script(n).Args)}
    tools = [*ROOT.glob("benchmarks/*.py"), ROOT / "pictures.py", ROOT / "verifier.py"]
    known |= {flag for p in tools for flag in re.findall(r'"(--[a-z-]+)"', p.read_text())}
    known |= {"--help", "--nproc-per-node", "--check"}  # of tyro, torchrun, ruff format
    known |= {"--nnodes", "--rdzv-backend", "--rdzv-endpoint"}  # of torchrun
    for page, text in PAGES.items():
        named = {flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}
        unknown = {flag for flag in named - known if flag.replace("--no-", "--") not in known}
        assert not unknown, f"{page}: {sorted(unknown)}"


# --------------------------------------------------------------------------------------------------
# The README's own promises
# --------------------------------------------------------------------------------------------------


def test_first_command_stands_in_the_first_twelve_lines():
    first = "\n".join(README.splitlines()[:12])
    assert "pip install -r requirements.txt && python fipo.py" in first


def test_readme_has_at_most_250_lines():
    assert len(README.splitlines()) <= 250


@pytest.mark.parametrize("name", SCRIPTS)
def test_lines_of_the_scripts_are_as_stated(name):
    (row,) = [line for line in README.splitlines() if line.startswith(f"| [{name}.py]")]
    stated, actual = int(row.split("|")[4]), len((ROOT / f"{name}.py").read_text().splitlines())
    assert abs(stated - actual) <= 0.05 * actual, f"README says {stated}, it has {actual}"
    assert len(row.split("|")[3].split()) <= 12  # the idea in twelve words


def test_the_five_steps_are_those_of_the_loop():
    source = (ROOT / "fipo.py").read_text()
    steps = [s.rstrip(".:") for s in re.findall(r"^ +# \d (\w[\w ,]*)", source, re.MULTILINE)]
    stated = re.findall(r"^\d\. \*\*([\w ,]+?)\.?\*\*", README, re.MULTILINE)
    assert len(steps) == 5 and stated == [step.split(":")[0] for step in steps]


def test_the_reward_of_the_readme_works(tmp_path, monkeypatch):
    from common import load_reward

    (source,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    (tmp_path / "my_reward.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    reward = load_reward("my_reward.py:last_number")
    assert reward(["q"] * 3, ["1, then 12", "12 or 13", "none"], ["12"] * 3) == [1.0, 0.0, 0.0]


def anchors(text):
    """The anchors that a page's headings get on the usual hosts."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).strip().replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", list(PAGES))
def test_internal_links_resolve(page):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    prose = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("https:", "http:")):
            continue
        file, _, anchor = target.partition("#")
        path = folder / file if file else folder / page
        assert path.exists(), f"{page}: {target} does not exist"
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), f"{page}: no {target}"


# --------------------------------------------------------------------------------------------------
# Metrics: the table has every key that is logged, and no other
# --------------------------------------------------------------------------------------------------

METRICS = README.split("\n## Metrics\n")[1].split("\n## ")[0]
FIRST_CELLS = "\n".join(re.findall(r"^\| (`.*?`) \|", METRICS, re.MULTILINE))
TABLE = set(re.findall(r"`([a-z]+(?:/[a-z0-9_]+)?)`", FIRST_CELLS))
SMALL = (
    "--num-steps 2 --prompts-per-step 4 --gen-prompts 8 --group-size 4 --minibatch-size 8 "
    "--eval-problems 8 --eval-every 1"
)
# Logged only in a situation that the short runs do not meet.
RARE = {"train/skipped_steps"}


def keys_of_a_run(name, flags, folder):
    command = [sys.executable, f"{name}.py", "tiny", "--runs-dir", str(folder), *flags.split()]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    (metrics,) = folder.glob("*/metrics.jsonl")
    return {key for line in metrics.read_text().splitlines() for key in json.loads(line)}


@pytest.fixture(scope="session")
def logged_keys(tmp_path_factory):
    """The keys in metrics.jsonl of a short run of every script; about ten seconds each."""
    flags, folders = dict.fromkeys(SCRIPTS, SMALL), {n: tmp_path_factory.mktemp(n) for n in SCRIPTS}
    flags["dapo"] += " --kl-coef 0.01"
    flags["sft"] = "--num-steps 2 --eval-problems 8"
    flags["ppo_critic"] = SMALL.replace("--gen-prompts 8", "--critic-warmup-steps 0")
    flags["ppo_critic"] += " --save-actor-at-step 1 --save-critic-at-step 2 --run-name pair"
    pair = (
        f"--policy {folders['ppo_critic']}/pair/pi_0 --critic {folders['ppo_critic']}/pair/critic"
    )
    flags["rfpo"] = SMALL.replace("--gen-prompts 8", f"{pair} --allow-weak-critic")
    return {n: keys_of_a_run(n, flags[n], folders[n]) for n in SCRIPTS}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_logged_key_is_in_the_readme_table(logged_keys, name):
    assert logged_keys[name] and not logged_keys[name] - TABLE


def test_every_key_of_the_readme_table_is_logged(logged_keys):
    assert not TABLE - set().union(*logged_keys.values()) - RARE


def test_keys_written_in_the_code_are_in_the_readme_table():
    groups = "reward rollout advantage policy fipo value rfpo text sft optim train time memory eval"
    pattern = re.compile(rf"(?:{'|'.join(groups.split())})/[a-z0-9_]+")
    for name in ("common", "metrics", *SCRIPTS):
        tree = ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))
        strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        written = {s for s in strings if isinstance(s, str) and pattern.fullmatch(s)}
        assert not written - TABLE - {"time/"}, f"{name}: {sorted(written - TABLE)}"
    assert not RARE - TABLE


# --------------------------------------------------------------------------------------------------
# Tags: every one in a script has a row in the map of its page, with tests that exist
# --------------------------------------------------------------------------------------------------

WITH_PAGE = [name for name in SCRIPTS if f"{name}.md" in PAGES]


def map_rows(page):
    """The rows of a page's map, as lists of cells."""
    section = page.split("\n## Map\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def missing_rows(source, page):
    """Tags, RELEASE and DEVIATION notes of a source that the map of a page has no row for."""
    firsts = [row[0] for row in map_rows(page)]
    missing = {*tags_in(source)} - {*tags_in("\n".join(firsts))}
    for word in ("RELEASE", "DEVIATION"):
        notes = len(re.findall(rf"{word}:", source))
        rows = [first for first in firsts if first.startswith(word)]
        if (word in source and not rows) or (word == "DEVIATION" and len(rows) < notes):
            missing.add(f"{word}: {notes} notes, {len(rows)} rows")
    return missing


def test_dapo_and_fipo_have_their_pages():
    assert {"dapo", "fipo"} <= {*WITH_PAGE}


@pytest.mark.parametrize("name", WITH_PAGE)
def test_every_tag_has_a_row_in_its_page(name):
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    assert not missing_rows(source, PAGES[f"{name}.md"])


def test_the_check_of_tags_can_fail():
    page = "\n## Map\n\n| tag | test |\n|---|---|\n| [FIPO Eq. 3] | `test_a` |\n\n## Next\n"
    assert missing_rows("# [FIPO Eq. 3]", page) == set()
    assert missing_rows("# [FIPO Eq. 3, Eq. 4]", page) == {"FIPO Eq. 4"}
    assert missing_rows("# RELEASE: so", page) and missing_rows("DEVIATION: so", page)


@pytest.mark.parametrize("name", WITH_PAGE)
def test_the_map_names_tests_and_functions_that_exist(name):
    tests = {}
    for path in ROOT.glob("tests/test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                tests.setdefault(node.name, set()).add(path.name)
    modules = name, "common", "calibration", "metrics"
    source = "\n".join((ROOT / f"{n}.py").read_text(encoding="utf-8") for n in modules)
    for tag, _, _, where, pinned in map_rows(PAGES[f"{name}.md"]):
        named = re.findall(r"`(?:tests/(test_\w+\.py)::)?(test_\w+)`", pinned)
        assert named, f"{tag}: no test"
        for file, test in named:
            file = file or f"test_{name}.py"
            assert file in tests.get(test, ()), f"{tag}: {file}::{test} does not exist"
        for word in re.findall(r"`([A-Za-z_./]+)", where):
            assert re.search(rf"\b{word.split('.')[-1]}\b", source), f"{tag}: no {word}"


@pytest.mark.parametrize("name", WITH_PAGE)
def test_pages_have_the_same_headings(name):
    headings = re.findall(r"^## (.+)$", PAGES[f"{name}.md"], re.MULTILINE)
    wanted = ["Idea", "Map", "Details", "Metrics", "Results", "Deviations", "References"]
    assert [heading for heading in headings if heading in wanted] == wanted


def test_pages_have_a_command_for_every_ablation_flag():
    """Each flag of fipo.py's Algorithm group that dapo.py does not have stands in a command."""
    own = {f.name for f in fields(script("fipo").Args)} - {
        f.name for f in fields(script("dapo").Args)
    }
    used = {w.replace("--no-", "--") for c in commands(PAGES["fipo.md"]) for w in c}
    assert own and not [n for n in own if f"--{n.replace('_', '-')}" not in used]
