"""The scripts as texts: copies are copies, siblings differ by their idea, tags have their tests."""

import ast
import difflib
import importlib
import io
import json
import re
import signal
import sys
import tokenize
from dataclasses import replace

import pytest
from conftest import RL_SCRIPTS, ROOT, SCRIPTS

import sft
import tiny

SHARED = ["common", "engines", "eval_only", "models", "runtime"]


def source(name):
    return (ROOT / f"{name}.py").read_text(encoding="utf-8")


def definition(name, function):
    """The text of a function of a script, from def to its last line."""
    text = source(name)
    found = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    assert len(found) == 1, f"{name}.py defines {function} {len(found)} times"
    return ast.get_source_segment(text, found[0])


def assigned(tree, name):
    """The statement at the top level of a module that defines this name."""
    for node in tree.body:
        targets = getattr(node, "targets", [])
        if getattr(node, "name", None) == name or any(
            getattr(target, "id", None) == name for target in targets
        ):
            return node
    raise AssertionError(f"no {name} at the top level")


def without_settings(name):
    """Lines of a script outside its docstring, Args, and all from there to the end of PRESETS."""
    text = source(name)
    tree, lines = ast.parse(text), text.splitlines()
    cut = set(range(1, tree.body[0].end_lineno + 1))
    first, last = assigned(tree, "Args"), assigned(tree, "PRESETS")
    start = min([first.lineno, *(d.lineno for d in first.decorator_list)])
    cut |= set(range(start, last.end_lineno + 1))
    return [line for number, line in enumerate(lines, 1) if number not in cut]


# --------------------------------------------------------------------------------------------------
# Copies and differences
# --------------------------------------------------------------------------------------------------

COPIES = [
    ("dapo", "fipo", "shape_rewards"),
    ("dapo", "fipo", "group_advantages"),
    ("ppo_critic", "rfpo", "policy_loss"),
    ("ppo_critic", "rfpo", "gae"),
    ("ppo_critic", "rfpo", "whiten"),
]


@pytest.mark.parametrize(("parent", "child", "function"), COPIES)
def test_copies_are_word_for_word(parent, child, function):
    assert definition(parent, function) == definition(child, function)


PAIRS = [("dapo", "fipo", 120), ("ppo_critic", "rfpo", 200)]


@pytest.mark.parametrize(("parent", "child", "limit"), PAIRS)
def test_siblings_differ_by_their_idea_and_nothing_else(parent, child, limit):
    diff = difflib.unified_diff(without_settings(parent), without_settings(child), n=0, lineterm="")
    changes = [line for line in list(diff)[2:] if line[0] in "+-"]
    assert len(changes) <= limit, "\n".join([f"{len(changes)} lines, not {limit}:", *changes])


# --------------------------------------------------------------------------------------------------
# Layout and size
# --------------------------------------------------------------------------------------------------

STEPS = [
    "# 1 Rollout",
    "# 2 Reward",
    "# 3 Advantage",
    "# 4 Update",
    "# 5 Evaluate, log, save",
]


@pytest.mark.parametrize("name", RL_SCRIPTS)
def test_five_numbered_comments_in_every_loop(name):
    main = definition(name, "main")
    found = [line.strip() for line in main.splitlines() if re.match(r"\s+# \d", line)]
    assert [line.split(":")[0] for line in found] == STEPS


def test_banners_are_the_same_in_all_rl_scripts():
    banner = re.compile(r"^# =+\n# (.+)\n# =+$", re.MULTILINE)
    banners = {name: banner.findall(source(name)) for name in RL_SCRIPTS}
    assert banners["dapo"] and len({tuple(b) for b in banners.values()}) == 1, banners


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_stay_short(name):
    text = source(name)
    lines = len(text.splitlines())
    after_settings = lines - assigned(ast.parse(text), "PRESETS").end_lineno
    assert lines <= 500
    assert after_settings <= (350 if name == "rfpo" else 250)


def test_common_stays_short():
    assert len(source("common").splitlines()) <= 1200


# --------------------------------------------------------------------------------------------------
# Imports and names
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_imports_no_other_script(name):
    imported = set()
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {(node.module or "").split(".")[0]}
    assert not imported & {*SCRIPTS}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_uses_every_name_that_it_imports_from_common(name):
    tree = ast.parse(source(name))
    imports = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "common"]
    imported = [alias.asname or alias.name for node in imports for alias in node.names]
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert imported and not [name for name in imported if name not in used]
    assert "*" not in imported


ALGORITHM = re.compile(r"(?<![a-z0-9])(grpo|dapo|fipo|ppo|rfpo)(?![a-z0-9])", re.IGNORECASE)
DATA_SET = re.compile(r"\bdapo-math[\w-]*", re.IGNORECASE)  # a name, whatever follows it
ABOUT_DATA = re.compile(r"\b(data|prompts?|rows?|columns?|answers?)\b", re.IGNORECASE)


def algorithm_names(text):
    """(line number, line) of each word that names an algorithm. The data set dapo-math-17k is not
    one, nor is a comment or an error text that says what this data looks like."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        words = DATA_SET.sub("", token.string)
        about_data = token.type == tokenize.COMMENT and ABOUT_DATA.search(words)
        if not about_data:
            for match in ALGORITHM.finditer(words):
                line = token.start[0] + words[: match.start()].count("\n")
                found.append((line, text.splitlines()[line - 1].strip()))
    return found


@pytest.mark.parametrize("name", SHARED)
def test_shared_code_never_names_an_algorithm(name):
    assert algorithm_names(source(name)) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('if name == "dapo":\n    pass\n', True),
        ("def ppo_loss():\n    pass\n", True),
        ("# the GRPO way\n", True),
        ('"""FIPO calls this."""\n', True),
        ('DATA = {"dapo-math-17k": "BytedTsinghua-SIA/DAPO-Math-17k"}\n', False),
        ("# DAPO's prompts are message lists\n", False),
        ("support = opportunity\n", False),
    ],
)
def test_the_check_for_algorithm_names_can_fail(text, named):
    assert bool(algorithm_names(text)) == named


# --------------------------------------------------------------------------------------------------
# Comment tags: every one has a test that its row here names
# --------------------------------------------------------------------------------------------------

TAGS = {
    "FIPO Eq. 3": ["test_eq3_log_ratio_is_new_minus_old", "test_eq3_log_ratio_is_clamped_at_20"],
    "FIPO Eq. 4": ["test_eq4_future_kl_without_decay_is_the_suffix_sum"],
    "FIPO Eq. 5": [
        "test_eq5_filter_leaves_extreme_tokens_out",
        "test_eq5_filter_whatever_the_sign_of_the_advantage",
    ],
    "FIPO Eq. 6": [
        "test_eq6_future_kl_decays",
        "test_eq6_at_20480_tokens_equals_a_float64_double_sum",
    ],
    "FIPO Eq. 7": [
        "test_eq7_weights_are_the_exponential_within_the_interval",
        "test_eq7_no_gradient_flows_through_the_weights",
    ],
    "FIPO Eq. 8": [
        "test_eq8_is_the_ratio_times_the_advantage_between_the_bounds",
        "test_eq8_clip_high",
        "test_eq8_clip_low",
        "test_eq8_weighted_loss_and_gradient",
        "test_eq8_dual_clip_bounds_the_weighted_advantage",
    ],
    "FIPO §2": ["test_group_advantages_divide_by_the_unbiased_std"],
    "FIPO §3.2": ["test_safety_reset_gives_1_where_a_suppressed_token_is_far_off"],
    "FIPO footnote 1": ["test_policy_kl_is_the_sum_of_old_minus_new"],
    "FIPO Fig. 2": ["test_collapse_warns_once_at_three_signals"],
    "FIPO Fig. 3f": ["test_fig3f_accuracy_against_length_by_hand"],
    "FIPO Table 2": ["test_table2_and_table3_dapo_columns", "test_table2_and_table3_fipo_columns"],
    "FIPO Table 3": ["test_table2_and_table3_dapo_columns", "test_table2_and_table3_fipo_columns"],
    "DAPO §3.1": ["test_clip_higher_leaves_room_above_the_symmetric_bound"],
    "DAPO §3.2": ["test_dynamic_sampling_keeps_mixed_groups_until_the_batch_is_full"],
    "DAPO §3.4": ["test_overlong_penalty_grows_over_the_buffer"],
    "RFPO Eq. 1": ["test_eq1_every_prefix_is_fitted_to_the_outcome"],
    "RFPO Eq. 2": [
        "test_eq2_subtracts_the_offset_and_cuts_at_the_threshold",
        "test_eq2_is_a_strict_inequality",
    ],
    "RFPO Algorithm 1": [
        "test_rfpo_algorithm1_advantage_is_the_outcome_minus_the_value",
        "test_algorithm1_without_labels_the_policy_cannot_see_a_verdict",
        "test_with_all_labels_the_reward_is_the_verdict",
    ],
    "RFPO §3.2": ["test_threshold_is_the_quantile_that_rewards_as_many_as_are_right"],
    "RFPO Table 3": ["test_tables_3_4_8_peak_final_last_ten_and_window"],
    "RFPO Table 4": ["test_tables_3_4_8_peak_final_last_ten_and_window"],
    "RFPO Table 8": ["test_tables_3_4_8_peak_final_last_ten_and_window"],
    "RFPO App. C": ["test_app_c_selection_corrected_peak_by_hand"],
    "RFPO Table 6": ["test_presets_follow_table_6", "test_rl_stage_presets_follow_table_6"],
    "RFPO Table 7": [
        "test_table7_ties_at_the_cap_merge_bins",
        "test_table7_offsets_are_the_mean_of_the_deviations_within_each_class",
    ],
    "RFPO Table 10": ["test_table10_row_by_hand"],
    "RFPO Table 11": ["test_table11_prefix_scan_by_hand"],
    "RFPO Table 12": ["test_table12_proxy_cuts_but_keeps_the_verdict"],
    "RFPO Fig. 3a": ["test_fig3_histogram_is_percent_of_a_class"],
    "RFPO Table 14": ["test_table14_restatement_that_rises_to_68_is_stopped_early"],
    "RFPO App. E": [
        "test_app_e5_auto_scale_leaves_no_length_trend",
        "test_app_e_faults_are_all_named",
        "test_trend_is_the_least_squares_slope_per_100_steps_and_its_t",
    ],
    "RFPO App. F": [
        "test_app_f2_continuous_reward_is_the_debiased_score",
        "test_app_f1_threshold_reward_cuts_the_raw_score",
        "test_app_f3_restatements",
    ],
    "RFPO App. A": [
        "test_rfpo_appendix_a_keeps_solutions_that_close_once_and_end_boxed",
        "test_rfpo_appendix_a_cosine_to_a_tenth_after_a_hundredth",
    ],
}
# RELEASE notes, by words that stand in the note.
RELEASES = {
    r"RELEASE: -1": ["test_wrong_reward_is_the_reward_of_a_wrong_answer"],
    r"RELEASE: 4x prompts_per_step": ["test_table2_and_table3_dapo_columns"],
    r"RELEASE: 10\)": ["test_table2_and_table3_dapo_columns"],
    r"exp\(FKL\), 10\) \(RELEASE|RELEASE: no lower bound": [
        "test_eq7_high_none_is_the_releases_rule",
        "test_switch_no_clipping_is_the_releases_rule",
    ],
    r"such token \(RELEASE|RELEASE: more than one such token": [
        "test_switch_drop_dual_clipped_responses"
    ],
    r"RELEASE: clamp\(f, 0.8, 1.0\)": [
        "test_safety_reset_agrees_with_the_releases_clamp_on_the_32b_interval"
    ],
}
PAPERS = "|".join({tag.split()[0] for tag in TAGS})
TAG = re.compile(  # of a paper that has rows, or of any paper at a place in a known form
    rf"\[({PAPERS}|[A-Z][\w-]+(?=\s+(?:Eq\.|§|Tables? \d|Fig\.|App\.|Algorithm \d)))\s+([^\]]*)\]"
)
PART = re.compile(r"Eq\. \d+|§[\d.]*\d|Tables? \d+|Fig\. \w+|footnote \d+|App\. \w+|Algorithm \d+")


def tags_in(text):
    """Every [PAPER place] in a text, one item per place: [FIPO Eq. 4, Eq. 6], [FIPO Tables 2 and 3]
    are two each. A place in no known form stands as it is, so that it has no row."""
    found = []
    for paper, places in TAG.findall(text):
        places = re.sub(r"Tables (\d+) and (\d+)", r"Table \1, Table \2", " ".join(places.split()))
        found += [f"{paper} {place}" for place in PART.findall(places) or [places]]
    return found


def test_names():
    """Of all test functions under tests/, with the files where they stand."""
    names = {}
    for path in (ROOT / "tests").glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                names.setdefault(node.name, set()).add(path.name)
    return names


test_names.__test__ = False
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("*.py"))}


@pytest.mark.parametrize("name", list(TEXTS))
def test_every_equation_tag_has_a_row(name):
    assert not [tag for tag in tags_in(TEXTS[name]) if tag not in TAGS]


def test_every_row_has_its_tag_and_its_tests():
    tags, tests = {tag for text in TEXTS.values() for tag in tags_in(text)}, test_names()
    # The collapse warning may stand where no tag does
    assert not [tag for tag in TAGS if tag not in tags and tag != "FIPO Fig. 2"]
    assert not [test for row in TAGS.values() for test in row if test not in tests]
    for tag, row in TAGS.items():
        if equation := re.search(r"Eq\. (\d+)", tag):
            assert any(f"_eq{equation[1]}_" in test for test in row), tag


@pytest.mark.parametrize("name", list(TEXTS))
def test_every_release_note_has_a_row(name):
    notes = [line for line in TEXTS[name].splitlines() if "RELEASE" in line]
    assert not [n for n in notes if not any(re.search(words, n) for words in RELEASES)]


def test_every_release_row_has_its_note_and_its_tests():
    tests, text = test_names(), "\n".join(TEXTS.values())
    assert not [words for words in RELEASES if not re.search(words, text)]
    assert not [test for row in RELEASES.values() for test in row if test not in tests]


@pytest.mark.parametrize("name", list(TEXTS))
def test_every_deviation_names_the_test_that_pins_it(name):
    tests = test_names()
    for note in re.split(r"DEVIATION:", TEXTS[name])[1:]:
        note = re.split(r'\n\s*#?\s*\n|"""', note)[0]  # up to the end of its paragraph
        named = re.findall(r"(test_\w+\.py)::(test_\w+)", note)
        assert named, f"no test in: {note}"
        for file, test in named:
            assert file in tests.get(test, ()), f"{file}::{test} does not exist"


def test_the_check_for_tags_can_fail():
    assert tags_in("[FIPO Eq. 9]") == ["FIPO Eq. 9"] and "FIPO Eq. 9" not in TAGS
    assert tags_in("# M [FIPO Eq. 4, Eq. 6] and [FIPO Tables 2 and 3]") == [
        "FIPO Eq. 4",
        "FIPO Eq. 6",
        "FIPO Table 2",
        "FIPO Table 3",
    ]
    assert tags_in("[FIPO Eq. 8 with f = 1], [FIPO\n§3.2.2]") == ["FIPO Eq. 8", "FIPO §3.2.2"]
    assert tags_in("[DAPO somewhere]") == ["DAPO somewhere"]
    assert tags_in("[GSPO Eq. 5] of [B, T]") == ["GSPO Eq. 5"]  # a paper without a row


# --------------------------------------------------------------------------------------------------
# Tags whose code stands in a loop, or in sft.py
# --------------------------------------------------------------------------------------------------

# Six responses are one sampling round: 3 prompts x 2. Fewer are an evaluation.
DYNAMIC = [name for name in RL_SCRIPTS if "args.dynamic_sampling" in source(name)]
REWARD = """
def reward(prompts, responses, golds):
    return {verdicts} if len(prompts) == 6 else [0.0] * len(prompts)
"""


@pytest.fixture
def one_step(tmp_path, monkeypatch):
    """Runs one step of a script with an untrained model and the given verdicts of every sampling
    round; returns the line of that step in metrics.jsonl."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(name, verdicts):
        (tmp_path / "reward.py").write_text(REWARD.format(verdicts=verdicts))
        script, problems = importlib.import_module(name), tiny.problems
        monkeypatch.setattr(sys, "argv", [str(ROOT / f"{name}.py")])
        # 9 problems instead of 20,000, and no picture: seconds that this test has no use for
        monkeypatch.setattr(tiny, "problems", lambda split, *_, **__: problems(split, 9, seed=0))
        monkeypatch.setattr(script.Run, "finish", lambda self: None)
        args = replace(
            script.PRESETS["tiny"],
            model="tiny-untrained",
            reward=f"{tmp_path / 'reward.py'}:reward",
            runs_dir=str(tmp_path / "runs"),
            num_steps=1,
            prompts_per_step=2,
            gen_prompts=3,
            group_size=2,
            minibatch_size=2,
            max_gen_batches=4,
            max_response_tokens=8,
            eval_problems=1,
            eval_samples=1,
        )
        script.main(args, "tiny")
        lines = next((tmp_path / "runs").glob("*/metrics.jsonl")).read_text().splitlines()
        return next(m for m in map(json.loads, lines) if m["step"] == 1)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_sampling_keeps_mixed_groups_until_the_batch_is_full(name, one_step):
    # Each round has a group of two right, a mixed one, and one of two wrong answers; 2 mixed ones
    # are needed: 2 rounds, 2 of 6 groups kept, half of whose answers are right.
    metrics = one_step(name, [1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    assert metrics["rollout/gen_batches"] == 2
    assert metrics["rollout/groups_kept_frac"] == pytest.approx(2 / 6)
    assert metrics["reward/accuracy"] == 0.5
    assert metrics["train/updates_per_batch"] == 2


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_sampling_that_never_fills_skips_the_step(name, one_step):
    assert one_step(name, [1.0] * 6)["train/skipped_steps"] == 1


def test_rfpo_appendix_a_keeps_solutions_that_close_once_and_end_boxed():
    assert sft.keep_row("<think> 2 + 2 </think> So \\boxed{4}")
    assert sft.keep_row("<think> 2 + 2 </think> So $\\boxed{4}$\n")
    assert not sft.keep_row("<think> 2 + 2 So \\boxed{4}")  # never closes
    assert not sft.keep_row("<think> </think> </think> \\boxed{4}")  # closes twice
    assert not sft.keep_row("<think> \\boxed{4} </think> So 4")  # boxed only inside
    assert not sft.keep_row("<think> </think> \\boxed{4} is what I think")  # ends otherwise


def test_rfpo_appendix_a_cosine_to_a_tenth_after_a_hundredth():
    # 1,000 steps: 10 of warm-up; halfway between 10 and 1,000 it stands at (1 + 0.1) / 2
    args = replace(sft.PRESETS["tiny"], num_steps=1000, learning_rate=1.0)
    rates = [sft.cosine_learning_rate(step, args) for step in (1, 5, 10, 505, 1000)]
    assert rates == pytest.approx([0.1, 0.5, 1.0, 0.55, 0.1])
    assert args.weight_decay == 0.1
