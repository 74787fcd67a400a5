"""Loading problems: schemas, traps, templates, the order of the stream."""

import json
import pickle
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest

import common
import dapo
import data
import tiny
import verifier

ARGS = replace(dapo.Args(), max_prompt_tokens=64)


class Words:
    """A stand-in tokenizer: one id per word; no chat template."""

    chat_template = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": list(range(len(text.split())))}


class Chat(Words):
    """One with a chat template that writes its own BOS, and would add a second one."""

    chat_template = "x"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return "<s> " + " ".join(f"[{m['role']}] {m['content']}" for m in messages)

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": (["<s>"] if add_special_tokens else []) + text.split()}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_gsm8k_form(tmp_path):
    rows = [{"question": "How many?", "answer": "2+3=<<2+3=5>>5\n#### 1,205", "idx": 0}]
    problems = common.load_dataset(write(tmp_path / "a.jsonl", rows), "train", ARGS, Words())
    assert [(p.prompt, p.gold) for p in problems] == [("How many?", "1,205")]


def test_dapo_form_is_deduplicated_and_its_messages_stay_as_they_are(tmp_path, capsys):
    def row(text, gold):
        return {
            "data_source": "math_dapo",
            "prompt": [{"content": text, "role": "user"}],
            "reward_model": {"ground_truth": gold, "style": "rule"},
        }

    rows = [row(f"Solve {i}. Answer: $Answer", str(i)) for i in range(3)] * 100
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    problems = common.load_dataset(str(path), "train", ARGS, Words())
    assert [p.gold for p in problems] == ["0", "1", "2"]
    assert problems[0].prompt == "Solve 0. Answer: $Answer"
    assert "rows 300 -> 3 distinct prompts" in capsys.readouterr().out


def test_math500_and_amc_forms(tmp_path):
    rows = [{"problem": "Find x.", "solution": "so", "answer": "\\frac{3}{8}", "level": 3}]
    problems = common.load_dataset(write(tmp_path / "m.jsonl", rows), "train", ARGS, Words())
    assert problems[0].gold == "\\frac{3}{8}"
    rows = [{"id": 0, "question": "Find y.", "answer": 27.0, "url": ""}]
    problems = common.load_dataset(write(tmp_path / "c.jsonl", rows), "train", ARGS, Words())
    assert problems[0].gold == "27"


def test_gold_text():
    assert common.gold_text(142.0) == "142"
    assert common.gold_text(33) == "33"
    assert common.gold_text("025") == "025"
    assert common.gold_text(None) == ""
    assert common.gold_text(0.5) == "0.5"
    assert common.gold_text(["7", 8.0, None, ""]) == ["7", "8"]
    assert common.gold_text([None]) == []  # as good as none


def test_repeats_empty_golds_and_long_prompts_are_dropped_with_a_count(tmp_path, capsys):
    rows = [
        {"problem": "a b", "answer": "1"},
        {"problem": "a b ", "answer": "1"},  # differs in trailing space only
        {"problem": "c", "answer": None},
        {"problem": "d " * 64, "answer": "2"},  # exactly at the limit
        {"problem": "e " * 65, "answer": "3"},
        {"problem": "f", "answer": "4"},
        {"problem": "f", "answer": "5"},  # a second gold: reported
    ]
    problems = common.load_dataset(write(tmp_path / "r.jsonl", rows), "train", ARGS, Words())
    assert [p.gold for p in problems] == ["1", "2", "4"]
    assert [p.index for p in problems] == [0, 1, 2]
    output = capsys.readouterr().out
    assert "rows 7 -> 5 distinct prompts -> 4 with a gold -> 3 of at most 64 tokens" in output
    assert "1 rows repeat a prompt with another gold, and the first gold is kept; row 6" in output


def test_dotted_and_named_columns(tmp_path):
    rows = [{"x": {"text": "hi"}, "y": {"deep": {"gold": "9"}}}]
    path = write(tmp_path / "n.jsonl", rows)
    args = replace(ARGS, prompt_column="x.text", answer_column="y.deep.gold")
    problems = common.load_dataset(path, "train", args, Words())
    assert (problems[0].prompt, problems[0].gold) == ("hi", "9")


def test_templates_and_a_single_bos():
    text, ids = common.render_prompt("2+2?", "Q: {problem}\nA:", Words())
    assert text == "Q: 2+2?\nA:" and len(ids) == 3
    text, ids = common.render_prompt("2+2? {x}", "Q: {problem}", Chat())
    assert text == "<s> [user] Q: 2+2? {x}"
    assert ids.count("<s>") == 1
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    text, _ = common.render_prompt(messages, "Q: {problem}", Chat())
    assert text == "<s> [system] be brief [user] hi"


# --------------------------------------------------------------------------------------------------
# Sets by name. No hub can be reached from a test machine: a folder in the form of the set stands in
# its place, and `datasets` itself reads it.
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Puts a folder with these splits in the place of a set; returns the set's hub id."""
    import datasets

    # The cache goes by the folder's name and configuration, whatever lies in it.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folders, original = {}, datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda path, *a: original(folders[path], *a))

    def make(name, config=None, **splits):
        folder = tmp_path / name
        folder.mkdir()
        for split, rows in splits.items():
            table = pyarrow.Table.from_pylist(rows)
            pyarrow.parquet.write_table(table, folder / f"{split}.parquet")
        if config is not None:  # and a second one, so that the name must be given
            files = "\n".join(f"  - split: {x}\n    path: {x}.parquet" for x in splits)
            entries = [f"- config_name: {c}\n  data_files:\n{files}" for c in (config, "another")]
            lines = ["---", "configs:", *entries, "---", ""]
            (folder / "README.md").write_text("\n".join(lines))
        known = common.KNOWN_DATASETS.get(name)
        path = known.path if known else f"someone/{name}"
        folders[path] = str(folder)
        return path

    return make


def dapo_row(problem, gold, index="a"):
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": problem.join(data.INSTRUCTION), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": gold, "style": "rule"},
        "extra_info": {"index": index},
    }


def test_dapo_math_by_name_is_deduplicated_and_keeps_its_own_instruction(hub, capsys):
    rows = [dapo_row(f"Find {i}.", str(i), f"{i}-{copy}") for copy in range(100) for i in range(3)]
    hub("dapo-math-17k", train=rows)
    problems = common.load_dataset("dapo-math-17k", "train", ARGS, Words())
    assert [p.gold for p in problems] == ["0", "1", "2"]
    assert problems[1].prompt == "Find 1.".join(data.INSTRUCTION)
    assert "boxed" not in problems[1].prompt  # one instruction, not two that contradict
    assert verifier.verify("So it is one.\nAnswer: 1", problems[1].gold)
    assert "data dapo-math-17k: rows 300 -> 3 distinct prompts" in capsys.readouterr().out


def test_a_template_replaces_the_instruction_at_both_ends_and_nothing_else(hub):
    text = 'Remember to put 7 on line 3.\n\nThe last line is "Answer:".'
    hub("dapo-math-17k", train=[dapo_row(text, "7")])
    args = replace(ARGS, prompt_template="Q: {problem}\nA:")
    (problem,) = common.load_dataset("dapo-math-17k", "train", args, Words())
    assert problem.prompt == f"Q: {text}\nA:"
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert data.bare_problem(turns) == turns


def test_one_text_with_two_golds_is_counted_and_not_shown(hub, capsys):
    rows = [dapo_row("Find x.", gold, gold) for gold in ("1", "2", "3")]
    hub("dapo-math-17k", train=[*rows, dapo_row("Find y.", "4")])
    problems = common.load_dataset("dapo-math-17k", "train", ARGS, Words())
    assert [p.gold for p in problems] == ["1", "4"]
    out = capsys.readouterr().out
    assert "2 rows repeat a prompt with another gold" in out and "row 1" in out
    assert "Find x" not in out


@pytest.mark.parametrize("inside", [True, False])
def test_the_processed_copy_has_its_answer_in_solution_and_one_instruction(hub, inside):
    row = dapo_row("What is 3+4?", "7")
    text = row["prompt"][0]["content"] if inside else "What is 3+4?"
    row |= {"prompt": text, "solution": "7", "source_prompt": row["prompt"]}
    hub("dapo-math-17k-processed", config="all", train=[row, row])
    (problem,) = common.load_dataset("dapo-math-17k-processed", "train", ARGS, Words())
    assert problem.gold == "7"
    assert problem.prompt == data.BOXED.replace("{problem}", "What is 3+4?")


def test_without_its_configuration_a_set_fails_and_lists_them(hub):
    folder = hub("some-set", config="all", train=[{"problem": "1?", "answer": "1"}])
    with pytest.raises(common.UsageError, match=r"did not load .*Config name is missing"):
        common.load_dataset(folder, "train", ARGS, Words())


def test_aime_2024_in_dapos_form_loses_its_32_copies(hub):
    rows = [dapo_row(f"Find {i}.", f"0{i}5", f"{i}") for i in range(3) for _ in range(32)]
    folder = hub("AIME-2024", train=rows)  # a hub id: its one split is train, also to evaluate on
    problems = common.load_dataset(folder, "test", ARGS, Words())
    assert [p.gold for p in problems] == ["005", "015", "025"]
    assert verifier.verify("\\boxed{25}", problems[2].gold)


@pytest.mark.parametrize(
    ("name", "column"), [("aime25", "problem"), ("aime26", "problem"), ("amc23", "question")]
)
@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (70, "70", "70"),  # int64, MathArena
        (27.0, "27", "27"),  # float64, AMC
        ("025", "025", "25"),  # AIME's own form
        ("336^\\circ", "336^\\circ", "336"),  # a copy of AIME 2025
        (["7", "8"], ["7", "8"], "8"),  # math-eval
    ],
)
def test_golds_of_every_type(name, column, answer, gold, right, hub):
    hub(name, test=[{"id": "0", column: "Find b.", "answer": answer}])
    (problem,) = common.load_dataset(name, "test", ARGS, Words())
    assert problem.prompt == data.BOXED.replace("{problem}", "Find b.")
    assert problem.gold == gold and verifier.verify(f"\\boxed{{{right}}}", problem.gold)
    assert not verifier.verify("\\boxed{71}", problem.gold)


def test_columns_go_by_other_names_and_an_unknown_set_lists_its_own(tmp_path):
    for i, row in enumerate(
        [
            {"ID": "2024-I-9", "Problem": "Find n.", "Solution": "so", "Answer": 33},
            {"question": "Find n.", "answer": "33"},
            {"problem_idx": 4, "answer": 33, "problem": "Find n."},
        ]
    ):
        path = write(tmp_path / f"{i}.jsonl", [row])
        (problem,) = common.load_dataset(path, "test", ARGS, Words())
        assert (problem.prompt, problem.gold) == ("Find n.", "33")
    path = write(tmp_path / "u.jsonl", [{"task": "Find n.", "answer": "33"}])
    with pytest.raises(common.UsageError, match="--prompt-column; the columns are task, answer"):
        common.load_dataset(path, "test", ARGS, Words())


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_set_with_one_split_is_taken_whatever_it_is_called(split, hub, capsys):
    """aime26 goes by both names, and the log says by which."""
    path = hub("aime26", **{split: [{"problem": "Find b.", "answer": 70}]})
    assert [p.gold for p in common.load_dataset("aime26", "test", ARGS, Words())] == ["70"]
    assert f"data aime26: split {split} of {path}\n" in capsys.readouterr().out


def test_of_several_splits_the_right_one_is_taken_or_all_are_listed(hub):
    rows = {x: [{"question": x, "answer": f"#### {i}"}] for i, x in enumerate(("train", "test"))}
    hub("gsm8k", config="main", **rows)
    for i, split in enumerate(("train", "test")):
        (problem,) = common.load_dataset("gsm8k", split, ARGS, Words())
        assert problem.gold == str(i)
        assert problem.prompt == data.BOXED.replace("{problem}", split)
    row = [{"problem": "Find b.", "answer": ["7"]}]
    folder = hub("math-eval", config="default", aime=row, amc=row)
    with pytest.raises(common.UsageError, match="has the splits aime, amc, and no 'test'"):
        common.load_dataset(folder, "test", ARGS, Words())


def test_amc23_drops_2022_by_its_url_and_counts(hub, capsys):
    url = "https://artofproblemsolving.com/wiki/index.php/{}_AMC_12A_Problems/Problem_1"
    rows = [{"question": f"{i}?", "answer": 1.0, "url": url.format(2022 + i % 2)} for i in range(5)]
    hub("amc23", test=rows)
    problems = common.load_dataset("amc23", "test", ARGS, Words())
    assert [p.prompt[:2] for p in problems] == ["1?", "3?"]
    assert "data amc23: rows 5 -> 2 by their url -> 2 distinct" in capsys.readouterr().out


def gpqa_row(i, right="Na+\n", wrong=("K+", " Li+", "Rb+")):
    row = {"Question": f"Which ion {i}?\n", "Correct Answer": right, "Canary String": "canary"}
    return row | {f"Incorrect Answer {j}": text for j, text in enumerate(wrong, 1)}


def test_gpqa_options_are_shuffled_row_by_row_and_the_letter_goes_by_position(hub):
    hub("gpqa-diamond", config="gpqa_diamond", train=[gpqa_row(i) for i in range(200)])
    problems = common.load_dataset("gpqa-diamond", "test", ARGS, Words())
    letters = [p.gold for p in problems]
    for letter in "ABCD":  # 50 each on average; 5 standard deviations are 31
        assert 19 < letters.count(letter) < 81
    for problem in problems:
        lines = problem.prompt.splitlines()
        assert f"({problem.gold}) Na+" in lines  # stripped
        assert {line[4:] for line in lines if line[:1] == "("} == {"Na+", "K+", "Li+", "Rb+"}
        assert [line[:4] for line in lines if line[:1] == "("] == ["(A) ", "(B) ", "(C) ", "(D) "]
    assert problems[7].prompt.startswith("Which ion 7?\n\n(A)")
    assert "letter of the right option within \\boxed{}" in problems[7].prompt
    again = common.load_dataset("gpqa-diamond", "test", replace(ARGS, seed=9), Words())
    assert again == problems


def test_a_gpqa_option_with_the_right_text_twice_does_not_move_the_letter():
    places = set()
    for i in range(50):
        _, one = data.shuffle_options(f"{i}", "Na+", ["K+", "Li+", "Rb+"])
        _, two = data.shuffle_options(f"{i}", "Na+", ["Na+", "Na+ ", "Rb+"])
        assert one == two
        places.add(one)
    assert places == set("ABCD")


def test_only_a_multiple_choice_gold_is_graded_by_its_letter(hub):
    hub("gpqa-diamond", config="gpqa_diamond", train=[gpqa_row(0)])
    (problem,) = common.load_dataset("gpqa-diamond", "test", ARGS, Words())
    reward, other = common.load_reward("verifier"), "D" if problem.gold == "C" else "C"
    responses = [f"\\boxed{{{x}}}" for x in (f"({problem.gold.lower()})", other)]
    assert reward(["", ""], responses, [problem.gold] * 2) == [1.0, 0.0]
    assert reward(["", ""], responses, [str(problem.gold)] * 2) == [0.0, 0.0]
    # also through the call that every script makes, where golds travel between ranks
    gold = pickle.loads(pickle.dumps(problem.gold))
    assert type(gold) is common.Letter and gold == problem.gold


def test_gpqa_is_not_trained_on_and_says_how_to_get_it(monkeypatch):
    import datasets

    def gated(*_):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'x' is a gated dataset on the Hub.")

    monkeypatch.setattr(datasets, "load_dataset", gated)
    with pytest.raises(common.UsageError, match=r"gated .*accept its terms .*hf auth login"):
        common.load_dataset("gpqa-diamond", "test", ARGS, Words())
    with pytest.raises(common.UsageError, match=r"for evaluation only.*--eval-dataset"):
        common.load_dataset("gpqa-diamond", "train", ARGS, Words())
    with pytest.raises(common.UsageError, match="it must be a file, a known name"):
        common.load_dataset("aime25", "test", ARGS, Words())


@pytest.mark.parametrize("gold", ["1,205", "-1,205", "$1,205", "1205"])
def test_gsm8k_golds_stand_behind_the_marks(gold, hub):
    row = {"question": "How many?", "answer": f"2+3=<<2+3=5>>5 #hash\n#### {gold}"}
    hub("gsm8k", config="main", test=[row], train=[row])
    (problem,) = common.load_dataset("gsm8k", "test", ARGS, Words())
    assert problem.gold == gold
    sign = "-" * gold.startswith("-")
    assert verifier.verify(f"\\boxed{{{sign}1205}}", problem.gold)
    assert not verifier.verify("\\boxed{5}", problem.gold)


def test_openr1_keeps_what_can_be_verified_and_reads_no_generations(hub, monkeypatch, capsys):
    def row(kind, answer, text):
        lists = {"generations": ["<think>"] * 2, "correctness_llama": None, "finish_reasons": None}
        return {"problem": text, "answer": answer, "question_type": kind, **lists}

    kinds = ["math-word-problem", "MCQ", "proof", "math-word-problem", None, "other"]
    answers = ["12", "B", "see solution", "", "5", "6"]
    rows = [row(k, a, f"{i}?") for i, (k, a) in enumerate(zip(kinds, answers, strict=True))]
    hub("openr1-math-220k", config="default", train=rows)
    problems = common.load_dataset("openr1-math-220k", "train", ARGS, Words())
    assert [p.gold for p in problems] == ["12", "5", "6"]
    assert "rows 6 -> 4 by their question_type -> 4 distinct prompts -> 3 with" in (
        capsys.readouterr().out
    )
    seen, _ = common.load_rows("openr1-math-220k", "train", {"problem", "answer"})
    assert {*seen[0]} == {"problem", "answer"}
    everything, _ = common.load_rows("openr1-math-220k", "train")  # as sft.py reads it
    assert everything[0]["generations"] == ["<think>"] * 2
    called = []
    original = data.load_rows
    monkeypatch.setattr(data, "load_rows", lambda *a: called.append(a) or original(*a))
    common.load_dataset("openr1-math-220k", "train", ARGS, Words())
    assert called == [("openr1-math-220k", "train", {"problem", "answer", "question_type"})]


@pytest.mark.parametrize("level", [3, "Level 3"])
@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("\\frac{3}{8}", "0.375", "\\frac{8}{3}"),
        ("[-2,7)", "[-2, 7)", "[-2,7]"),
        (
            "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",
            "\\begin{bmatrix}1\\\\2\\end{bmatrix}",
            "\\begin{pmatrix} 2 \\\\ 1 \\end{pmatrix}",
        ),
        ("\\text{Evelyn}", "evelyn", "Angela"),
        ("60^\\circ", "60", "61"),
        ("\\$18.90", "18.90", "1890"),
        ("4210_{5}", "4210_5", "4210"),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)", "(\\frac{\\pi}{2}, 3)"),
    ],
)
def test_math500_golds_are_latex(gold, right, wrong, level, hub):
    hub("math500", test=[{"problem": "Find.", "solution": "so", "answer": gold, "level": level}])
    (problem,) = common.load_dataset("math500", "test", ARGS, Words())
    assert problem.gold == gold
    assert verifier.verify(f"\\boxed{{{right}}}", problem.gold)
    assert not verifier.verify(f"\\boxed{{{wrong}}}", problem.gold)


def test_every_known_name_is_one_that_the_design_lists():
    paths = {
        "dapo-math-17k": "BytedTsinghua-SIA/DAPO-Math-17k",
        "dapo-math-17k-processed": "open-r1/DAPO-Math-17k-Processed",
        "gsm8k": "openai/gsm8k",
        "math500": "HuggingFaceH4/MATH-500",
        "aime24": "HuggingFaceH4/aime_2024",
        "aime25": "math-ai/aime25",
        "aime26": "math-ai/aime26",
        "amc23": "math-ai/amc23",
        "gpqa-diamond": "Idavidrein/gpqa",
        "openr1-math-220k": "open-r1/OpenR1-Math-220k",
    }
    assert {name: known.path for name, known in common.KNOWN_DATASETS.items()} == paths
    configs = {n: k.config for n, k in common.KNOWN_DATASETS.items() if k.config}
    assert configs == {
        "dapo-math-17k-processed": "all",
        "gpqa-diamond": "gpqa_diamond",
        "gsm8k": "main",
        "openr1-math-220k": "default",
    }
    assert common.KNOWN_DATASETS["aime24"].splits == ("train", "train")


def test_the_stream_is_shuffled_by_seed_and_wraps_into_new_epochs():
    problems = [common.Problem(i, str(i), [i], "0") for i in range(7)]

    def order(cursor, num, seed):
        return [p.index for _, p in common.draw_problems(problems, cursor, num, seed)]

    assert sorted(order(0, 7, 1)) == list(range(7)) == sorted(order(7, 7, 1))
    assert order(0, 7, 1) != order(0, 7, 2)
    assert order(0, 7, 1) != order(7, 7, 1)
    assert order(0, 14, 1) == order(0, 5, 1) + order(5, 9, 1)  # a pure function of the cursor
    assert [n for n, _ in common.draw_problems(problems, 5, 4, 1)] == [5, 6, 7, 8]


def test_tiny_splits_do_not_overlap_and_demonstrations_end_in_a_box():
    train, test = tiny.problems("train", 3000, 0), tiny.problems("test", 500, 0)
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in test}
    assert len({r["prompt"] for r in train}) == 3000
    for row in train[:200]:
        digits = [int(d) for d in row["prompt"].split()[:-1]]
        assert int(row["answer"]) == sum(digits) % 5
        assert row["solution"].endswith(" }") and row["solution"].count("</think>") == 1
    direct = sum(r["solution"].startswith("<think> </think>") for r in train) / 3000
    assert 0.55 < direct < 0.65


def test_tiny_reward_is_the_verifier_with_a_strict_end():
    good = "<think> 3+4=2 </think> \\boxed{ 2 }"
    responses = [good, good + " }", good + " 3", good + " \\boxed{ 2 }", "<think> 3+4=2 </think>"]
    assert tiny.reward([""] * 5, responses, ["2"] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_real_files(shared):
    """The shared real files load with their column maps guessed."""
    args = replace(ARGS, max_prompt_tokens=10_000)
    expected = {
        "gsm8k_test.jsonl": 1319,
        "math500.jsonl": 500,
        "aime24.jsonl": 30,
        "amc23.jsonl": 40,
    }
    for name, count in expected.items():
        assert len(common.load_dataset(str(shared / "data" / name), "test", args, Words())) == count
    path = str(shared / "data" / "dapo_aime_2024.parquet")
    problems = common.load_dataset(path, "test", args, Words())
    assert len(problems) == 30  # of 960 rows
    assert problems[0].gold.isdigit() and "Answer:" in problems[0].prompt
    # the instruction of the real file is the one that a template takes away
    bare = common.load_dataset(path, "test", replace(args, prompt_template="{problem} ?"), Words())
    for problem, whole in zip(bare, problems, strict=True):
        assert whole.prompt == problem.prompt[:-2].join(data.INSTRUCTION)


def test_real_amc_by_name(shared, monkeypatch, hub):
    rows = (shared / "data" / "amc23.jsonl").read_text().splitlines()
    hub("amc23", test=[json.loads(row) for row in rows])
    args = replace(ARGS, max_prompt_tokens=10_000)
    assert len(common.load_dataset("amc23", "test", args, Words())) == 40


def test_an_unknown_reward_function_is_named(tmp_path):
    (tmp_path / "r.py").write_text("def f(p, r, g):\n    return []\n")
    with pytest.raises(common.UsageError, match="'g'"):
        common.load_reward(f"{tmp_path / 'r.py'}:g")
