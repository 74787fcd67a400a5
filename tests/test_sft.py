"""Supervised fine-tuning: which text is trained on, with which loss, for how many steps."""

import json
import math
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import common
import data
import sft
import tiny

ARGS = replace(sft.Args(), max_prompt_tokens=200, max_response_tokens=200, batch_size=1)
MAIN = SimpleNamespace(is_main_process=True)  # all that load_examples asks of an accelerator
THOUGHT = "<think>\n2 + 2 is 4.\n</think>\n\nSo \\boxed{4}"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# --------------------------------------------------------------------------------------------------
# The recipe
# --------------------------------------------------------------------------------------------------


def test_rfpo_appendix_a_preset():
    args = sft.PRESETS["qwen3-4b-base"]
    assert args.model == "Qwen/Qwen3-4B-Base" and args.dataset == "openr1-math-220k"
    assert args.max_prompt_tokens + args.max_response_tokens == 32_768
    assert (args.num_epochs, args.batch_size, args.num_steps) == (3, 16, None)
    assert args.max_rows // args.batch_size == 2_812  # the paper's steps per epoch
    assert (args.learning_rate, args.warmup_frac, args.final_frac) == (2e-5, 0.01, 0.1)
    assert args.weight_decay == 0.1 and args.activation_checkpointing
    assert args.tokens_per_microbatch >= 32_768  # the longest sequence fits into one forward
    assert (args.eval_dataset, args.eval_samples) == ("aime26", 4) and args.eval_problems >= 30


def test_the_tiny_preset_is_900_steps_on_all_rows():
    args = sft.PRESETS["tiny"]
    assert (args.num_steps, args.num_epochs, args.max_rows) == (900, None, None)
    assert (args.batch_size, args.learning_rate) == (64, 3e-3)


@pytest.mark.parametrize(
    "end",
    ["\\boxed{4}", "**\\boxed{4}**", "\\[\n\\boxed{4}\n\\]", "\\(\\boxed{4}\\).", "$\\boxed{4}$"],
)
def test_a_box_may_stand_in_a_formula_or_in_bold(end):
    assert sft.keep_row(f"<think> 2 + 2 </think> So {end}")
    assert not sft.keep_row(f"<think> 2 + 2 </think> So {end} I think")


# --------------------------------------------------------------------------------------------------
# The trained text
# --------------------------------------------------------------------------------------------------

# Of the shape of Qwen3's: reasoning stays only in turns after the last question, so an assistant's
# message that is rendered alone loses it.
QWEN3 = """
{%- set last = namespace(question=messages|length) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- set text = m.content -%}
  {%- if m.role == 'assistant' and loop.index0 < last.question -%}
    {%- set text = text.split('</think>')[-1].lstrip('\n') -%}
  {%- endif -%}
  {{- '<|im_start|>' ~ m.role ~ '\n' ~ text ~ '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
TEMPLATES = {"qwen3": QWEN3, "strips every turn": QWEN3.replace("loop.index0 < last.question", "1")}


@pytest.fixture(params=TEMPLATES)
def chat(request):
    """A tokenizer of single bytes, which gives every text back, with a chat template."""
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(letters, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATES[request.param]
    return tokenizer


FORMS = {
    "text": {"problem": "2+2?", "solution": THOUGHT},
    "generations": {
        "problem": "2+2?",
        "generations": ["<think></think> \\boxed{5}", THOUGHT],
        "correctness_math_verify": [False, True],
        "solution": "It is 4.",
        "messages": [{"role": "user", "content": "2+2?"}],
    },
    "conversation": {
        "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": THOUGHT}]
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_the_trained_text_keeps_its_think_block(form, chat, tmp_path):
    args = replace(ARGS, dataset=write(tmp_path / "rows.jsonl", [FORMS[form]]))
    (example,) = sft.load_examples(args, chat, MAIN)
    question = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert chat.decode(example.problem.prompt_ids) == question
    assert chat.decode(example.responses[0].token_ids) == THOUGHT + "<eos>"


def test_the_chat_template_would_lose_the_think_block(chat):
    """What the test above guards against: its tokenizer's template does strip a message."""
    messages = FORMS["conversation"]["messages"]
    rendered = chat.apply_chat_template(messages[1:], tokenize=False)
    assert rendered == "<|im_start|>assistant\nSo \\boxed{4}<|im_end|>\n"
    followed = [*messages, {"role": "user", "content": "Sure?"}]
    assert "think" not in chat.apply_chat_template(followed, tokenize=False)


def test_earlier_turns_are_the_prompt_and_only_the_last_is_imitated(chat, tmp_path):
    turns = [("system", "Be brief."), ("user", "1+1?"), ("assistant", "2"), ("user", "2+2?")]
    messages = [{"role": r, "content": c} for r, c in [*turns, ("assistant", THOUGHT)]]
    args = replace(ARGS, dataset=write(tmp_path / "rows.jsonl", [{"messages": messages}]))
    (example,) = sft.load_examples(args, chat, MAIN)
    prompt = "".join(f"<|im_start|>{r}\n{c}<|im_end|>\n" for r, c in turns)
    assert chat.decode(example.problem.prompt_ids) == prompt + "<|im_start|>assistant\n"
    assert chat.decode(example.responses[0].token_ids) == THOUGHT + "<eos>"


def test_of_several_generations_the_first_right_and_well_formed_one_is_taken():
    open_ended, other = "<think> 2 + 2 = 4 \\boxed{4}", THOUGHT.replace("So", "Thus")

    def choice(generations, math_verify, llama):
        row = {"correctness_math_verify": math_verify, "correctness_llama": llama}
        return sft.demonstration(row, "2+2?", generations)[1]

    assert choice([THOUGHT, other], [True, True], None) == THOUGHT
    assert choice([THOUGHT, other], [False, True], None) == other
    assert choice([open_ended, other], [True, True], None) == other  # never closes its block
    assert choice([THOUGHT, other], None, [False, True]) == other  # only the judge was asked
    assert choice([THOUGHT, other], [False, False], [True, False]) == THOUGHT
    assert choice([THOUGHT, other], [False, None], [False, False]) is None
    assert choice([THOUGHT, other], None, None) is None
    assert choice([], [], None) is None


def test_openr1_is_loaded_by_name(chat, monkeypatch):
    """No hub can be reached from a test machine; the call into `datasets` is checked instead."""
    import datasets

    calls = []

    def stand_in(path, config=None):
        calls.append((path, config))
        row = FORMS["generations"] | {"answer": "4", "correctness_llama": None}
        return {"train": datasets.Dataset.from_list([row])}

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    args = replace(ARGS, dataset="openr1-math-220k")
    (example,) = sft.load_examples(args, chat, MAIN)
    assert calls == [("open-r1/OpenR1-Math-220k", "default")]
    assert data.BOXED.replace("{problem}", "2+2?") in example.problem.prompt
    assert chat.decode(example.responses[0].token_ids) == THOUGHT + "<eos>"


# --------------------------------------------------------------------------------------------------
# Which rows
# --------------------------------------------------------------------------------------------------


def test_unusable_and_long_rows_are_dropped_with_a_count(chat, tmp_path, capsys):
    rows = [
        {"problem": "right", "solution": THOUGHT},
        {"problem": "no box", "solution": "<think></think> 4"},
        {"problem": "no solution", "solution": None},
        {"problem": None, "solution": THOUGHT},
        {"problem": "long " * 40, "solution": THOUGHT},
        {"problem": "long solution", "solution": "so " * 70 + THOUGHT},
    ]
    args = replace(ARGS, dataset=write(tmp_path / "rows.jsonl", rows))
    examples = sft.load_examples(args, chat, MAIN)
    assert [("right" in e.problem.prompt) for e in examples] == [True]
    assert "6 rows, 3 unusable, 2 too long -> 1 solutions" in capsys.readouterr().out
    longest = len(examples[0].responses[0].token_ids)  # EOS is one of them
    sft.load_examples(replace(args, max_response_tokens=longest), chat, MAIN)
    with pytest.raises(common.UsageError):
        sft.load_examples(replace(args, max_response_tokens=longest - 1), chat, MAIN)


def test_max_rows_draws_usable_rows_by_seed(chat, tmp_path):
    rows = [{"problem": f"<{i}>", "solution": THOUGHT if i % 2 else "4"} for i in range(40)]
    path = write(tmp_path / "rows.jsonl", rows)

    def drawn(max_rows, seed=1):
        args = replace(ARGS, dataset=path, max_rows=max_rows, seed=seed)
        prompts = [e.problem.prompt for e in sft.load_examples(args, chat, MAIN)]
        return [int(p.split("\n<")[1].split(">")[0]) for p in prompts]

    assert drawn(None) == list(range(1, 40, 2))
    assert sorted(drawn(100)) == drawn(None)
    assert len({*drawn(5)}) == 5 and {*drawn(5)} <= {*drawn(None)}
    assert drawn(5) == drawn(5) == drawn(9)[:5]
    assert {*drawn(5)} != {*drawn(5, seed=2)} and {*drawn(5)} != {1, 3, 5, 7, 9}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"problem": "2+2?", "result": THOUGHT}, ["--solution-column", "problem, result"]),
        ({"question_text": "2+2?", "solution": THOUGHT}, ["--prompt-column", "question_text"]),
        ({"problem": "2+2?", "solution": "It is 4."}, ["1 rows, 1 unusable", "--batch-size 1"]),
        ({"problem": "2+2?", "generations": [THOUGHT]}, ["correctness_math_verify"]),
        ({"messages": [{"from": "human", "value": "2+2?"}]}, ["role and content", "from"]),
        ({"messages": [{"role": "user", "content": "2+2?"}]}, ["1 unusable"]),
        ({"messages": [{"role": "assistant", "content": THOUGHT}]}, ["1 unusable"]),
        ({"messages": [{"role": "user", "content": c} for c in ("2+2?", THOUGHT)]}, ["1 unusable"]),
    ],
)
def test_wrong_rows_are_named_in_one_line(row, words, chat, tmp_path):
    args = replace(ARGS, dataset=write(tmp_path / "rows.jsonl", [row]))
    with pytest.raises(common.UsageError) as raised:
        sft.load_examples(args, chat, MAIN)
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"num_epochs": 2}, ["--num-steps 900", "--num-epochs 2", "None"]),
        ({"num_steps": None}, ["--num-steps None", "--num-epochs None"]),
        ({"num_steps": None, "num_epochs": 0}, ["--num-epochs 0"]),
        ({"max_rows": 0}, ["--max-rows 0"]),
        ({"batch_size": 0}, ["--batch-size 0"]),
        ({"activation_checkpointing": True}, ["--activation-checkpointing", "torchrun"]),
    ],
)
def test_wrong_settings_are_named_in_one_line(flags, words):
    with pytest.raises(common.UsageError) as raised:
        sft.main(replace(sft.Args(), **flags), "tiny")
    for word in words:
        assert word in str(raised.value)


# --------------------------------------------------------------------------------------------------
# The loss
# --------------------------------------------------------------------------------------------------


def test_the_loss_is_a_mean_over_tokens_not_over_solutions():
    # 1 + 3 and 5: (1 + 3 + 5) / 3 = 3, where a mean of means would be (2 + 5) / 2 = 3.5
    logprobs = torch.tensor([[-1.0, -3.0], [-5.0, math.nan]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    loss = sft.sft_loss(logprobs, mask, torch.tensor(3))
    assert float(loss.detach()) == 3.0
    loss.backward()
    third = 1 / 3
    assert torch.allclose(logprobs.grad, torch.tensor([[-third, -third], [-third, 0.0]]))


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Runs sft.py on a few rows of the tiny world; returns its folder and its metrics lines."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(sys, "argv", [str(ROOT / "sft.py")])
    monkeypatch.setattr(common.Run, "finish", lambda self: None)  # no picture

    def run(rows, **flags):
        path = write(tmp_path / "rows.jsonl", rows)
        flags = {"eval_dataset": "", "dataset": path, "runs_dir": str(tmp_path / "runs"), **flags}
        sft.main(replace(sft.PRESETS["tiny"], **flags), "tiny")
        folder = max((tmp_path / "runs").iterdir(), key=lambda f: f.stat().st_mtime_ns)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return folder, [json.loads(line) for line in lines]

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("tokens_per_microbatch", [4096, 20, 1])
def test_loss_and_gradient_are_those_of_the_solutions_tokens(train, tokens_per_microbatch):
    """Against plain transformers, where -100 hides the prompt: one forward, or one per row."""
    rows = [
        {"prompt": "1 2 ?", "solution": "<think> </think> \\boxed{ 3 }"},
        {"prompt": "1 2 3 4 0 ?", "solution": "<think> 1+2=3 3+3=1 1+4=0 </think> \\boxed{ 0 }"},
        {"prompt": "4 4 4 ?", "solution": "<think> 4+4=3 3+4=2 </think> \\boxed{ 2 }"},
    ]
    flags = {"batch_size": 3, "num_steps": 1, "tokens_per_microbatch": tokens_per_microbatch}
    _, (step,) = train(rows, **flags)

    tokenizer = tiny.make_tokenizer()
    lm = AutoModelForCausalLM.from_pretrained(tiny.untrained_policy(), dtype=torch.float32)
    total, num_tokens, num_all = torch.zeros(()), 0, 0
    for row in rows:
        prompt, solution = (tokenizer(row[key])["input_ids"] for key in ("prompt", "solution"))
        solution = [*solution, tokenizer.eos_token_id]
        labels = torch.tensor([-100] * len(prompt) + solution)
        logits = lm(torch.tensor([prompt + solution])).logits[0]
        total = total + F.cross_entropy(logits[:-1], labels[1:], reduction="sum")
        num_tokens, num_all = num_tokens + len(solution), num_all + len(prompt + solution)
    loss = total / num_tokens
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in lm.parameters()]).norm()
    assert (num_tokens, num_all) == (6 + 9 + 8, 6 + 9 + 8 + 3 + 6 + 4)
    assert step["tokens"] == num_tokens
    assert step["sft/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert step["optim/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


# --------------------------------------------------------------------------------------------------
# Steps and epochs
# --------------------------------------------------------------------------------------------------


def test_epochs_say_how_many_steps_and_each_leaves_its_model(train):
    rows = tiny.problems("train", 9, seed=0)  # two batches of 4, and one row is left over
    flags = {"batch_size": 4, "num_steps": None, "num_epochs": 3, "learning_rate": 1e-3}
    folder, lines = train(rows, **flags, eval_dataset="tiny", eval_problems=2, eval_samples=1)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["optim/learning_rate"] == pytest.approx(1e-4)
    assert [line["step"] for line in lines if "eval/avg_at_k" in line] == [2, 4, 6]
    assert sorted(f.name for f in folder.glob("epoch-*")) == ["epoch-1", "epoch-2", "epoch-3"]
    weights = [(folder / f"epoch-{n}" / "model.safetensors").read_bytes() for n in (1, 2, 3)]
    assert len({*weights}) == 3
    samples = [json.loads(x) for x in (folder / "samples.jsonl").read_text().splitlines()]
    for first in (1, 3, 5):  # an epoch shows no row twice
        prompts = [s["prompt"] for s in samples if s["step"] in (first, first + 1)]
        assert len(prompts) == len({*prompts}) == 8


def test_an_evaluation_between_epochs_changes_no_weight(train):
    rows = tiny.problems("train", 8, seed=0)
    flags = {"batch_size": 4, "num_steps": 4}
    with_it, _ = train(rows, **flags, eval_dataset="tiny", eval_problems=2)
    without, _ = train(rows, **flags, run_name="without")
    one, two = (f / "epoch-2" / "model.safetensors" for f in (with_it, without))
    assert one != two and one.read_bytes() == two.read_bytes()
