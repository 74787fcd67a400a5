"""Loading problems: schemas, traps, templates, the order of the stream."""

import json
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
    assert "300 rows -> 3 distinct prompts" in capsys.readouterr().out


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
    assert common.gold_text(["7", 8.0]) == ["7", "8"]


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
    assert "7 rows -> 5 distinct prompts -> 4 with a gold -> 3 of at most 64 tokens" in output
    assert "two golds" in output


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


def test_a_known_name_calls_the_hub_with_its_split_and_config(monkeypatch, base_policy):
    """No hub can be reached from a test machine; the call into `datasets` is checked instead."""
    import datasets

    calls = []

    def stand_in(path, config=None, *, split):
        calls.append((path, config, split))
        return datasets.Dataset.from_list([{"question": "1?", "answer": "#### 1"}])

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    problems = common.load_dataset("gsm8k", "train", ARGS, Words())
    assert calls == [("openai/gsm8k", "main", "train")]
    assert problems[0].prompt == data.BOXED.replace("{problem}", "1?")
    common.load_dataset("someone/something", "test", ARGS, Words())
    assert calls[1] == ("someone/something", None, "test")


@pytest.mark.parametrize(
    ("name", "path", "split", "column"),
    [
        ("aime25", "math-ai/aime25", "test", "problem"),
        ("aime26", "math-ai/aime26", "all", "problem"),
        ("amc23", "math-ai/amc23", "test", "question"),
    ],
)
@pytest.mark.parametrize(("answer", "gold"), [(70, "70"), (27.0, "27"), ("025", "025")])
def test_evaluation_sets_by_name(name, path, split, column, answer, gold, monkeypatch):
    import datasets

    calls = []

    def stand_in(path, config=None, *, split):
        calls.append((path, config, split))
        return datasets.Dataset.from_list([{"id": "0", column: "Find b.", "answer": answer}])

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    (problem,) = common.load_dataset(name, "test", ARGS, Words())
    assert calls == [(path, None, split)]
    assert problem.prompt == data.BOXED.replace("{problem}", "Find b.")
    assert problem.gold == gold and verifier.verify(f"\\boxed{{{int(answer)}}}", gold)


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_split_all_takes_a_set_whatever_its_one_split_is_called(split, tmp_path, monkeypatch):
    """aime26 goes by both names; `datasets` itself is asked, with a folder in place of the hub."""
    write(tmp_path / f"{split}.jsonl", [{"problem": "Find b.", "answer": 70}])
    known = replace(common.KNOWN_DATASETS["aime26"], path=str(tmp_path))
    monkeypatch.setitem(common.KNOWN_DATASETS, "aime26", known)
    assert [p.gold for p in common.load_dataset("aime26", "test", ARGS, Words())] == ["70"]


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
    path = shared / "data" / "dapo_aime_2024.parquet"
    problems = common.load_dataset(str(path), "test", args, Words())
    assert len(problems) == 30  # of 960 rows
    assert problems[0].gold.isdigit() and "Answer:" in problems[0].prompt


def test_an_unknown_reward_function_is_named(tmp_path):
    (tmp_path / "r.py").write_text("def f(p, r, g):\n    return []\n")
    with pytest.raises(common.UsageError, match="'g'"):
        common.load_reward(f"{tmp_path / 'r.py'}:g")
