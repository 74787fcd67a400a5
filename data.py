"""data: problems with gold answers, from files, hub ids and the sets known by name; and rewards.

Scripts import these names from common."""

import importlib.util
import inspect
import json
import string
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase

import tiny
import verifier
from runtime import UsageError, eval_settings, require


class Letter(str):
    """A gold that is the letter of an option: its problem is multiple choice."""


@dataclass(frozen=True)
class Problem:
    """One prompt, as text and as the token ids that the model gets, with its gold answer."""

    index: int  # its row in the data set, after filtering
    prompt: str
    prompt_ids: list[int]
    gold: str | Letter | list[str]


@dataclass(frozen=True)
class KnownDataset:
    """Where a data set that we know by name lives, and what its columns are called."""

    path: str
    splits: tuple[str | None, str]  # for training (None: not for training) and for evaluation
    prompt: str | None
    answer: str | None
    config: str | None = None
    template: str = "{problem}"
    keep: tuple[str, Callable[[str], bool]] | None = None  # a column, and which rows it lets pass
    wrong: tuple[str, ...] = ()  # columns of the wrong options of a multiple-choice set
    gated: bool = False


BOXED = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}."
LETTER = BOXED.replace("your final answer", "the letter of the right option")
# What stands around every problem of DAPO-Math-17k and of its authors' AIME-2024.
INSTRUCTION = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n",
    '\n\nRemember to put your answer on its own line after "Answer:".',
)
KNOWN_DATASETS = {
    # DAPO's prompts are message lists that carry their instruction; nothing is added.
    "dapo-math-17k": KnownDataset(
        "BytedTsinghua-SIA/DAPO-Math-17k", ("train",) * 2, "prompt", "reward_model.ground_truth"
    ),
    # Its column `solution` is the final answer; "all" is English and Chinese, as in dapo-math-17k.
    "dapo-math-17k-processed": KnownDataset(
        "open-r1/DAPO-Math-17k-Processed", ("train",) * 2, "prompt", "solution", "all", BOXED
    ),
    "gsm8k": KnownDataset("openai/gsm8k", ("train", "test"), "question", "answer", "main", BOXED),
    "math500": KnownDataset(
        "HuggingFaceH4/MATH-500", ("test",) * 2, "problem", "answer", None, BOXED
    ),
    "aime24": KnownDataset(
        "HuggingFaceH4/aime_2024", ("train",) * 2, "problem", "answer", None, BOXED
    ),
    "aime25": KnownDataset("math-ai/aime25", ("test",) * 2, "problem", "answer", None, BOXED),
    "aime26": KnownDataset("math-ai/aime26", ("test",) * 2, "problem", "answer", None, BOXED),
    # Copies of it hold AMC 2022, too.
    "amc23": KnownDataset(
        "math-ai/amc23",
        ("test",) * 2,
        "question",
        "answer",
        None,
        BOXED,
        keep=("url", lambda url: "2023" in url),
    ),
    # Not for training: its authors ask that no row appears in public, and a run logs its prompts.
    "gpqa-diamond": KnownDataset(
        "Idavidrein/gpqa",
        (None, "train"),
        "Question",
        "Correct Answer",
        "gpqa_diamond",
        LETTER,
        wrong=("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
        gated=True,
    ),
    # Three configurations, whose splits differ between revisions; "default" is the smallest. Golds
    # of the two kinds that do not pass are letters and prose.
    "openr1-math-220k": KnownDataset(
        "open-r1/OpenR1-Math-220k",
        ("train",) * 2,
        "problem",
        "answer",
        "default",
        BOXED,
        keep=("question_type", lambda kind: kind not in ("MCQ", "proof")),
    ),
}
PROMPT_COLUMNS = ("prompt", "problem", "question", "Problem", "Question")
ANSWER_COLUMNS = ("reward_model.ground_truth", "answer", "Answer")


def load_rows(
    dataset: str, split: str, columns: Iterable[str] = ()
) -> tuple[list[dict], KnownDataset]:
    """Rows of a data set, and what we know about its columns; where `columns` all exist, no others.

    `dataset` is "tiny", a known name, a jsonl/json/parquet/arrow file, or a hub id. Of a hub set
    that has one split, that is taken, whatever it is called. Raises UsageError for a file that is
    missing or unreadable, and for a hub id that does not load or lacks the split."""
    known = KNOWN_DATASETS.get(dataset, KnownDataset(dataset, ("train", "test"), None, None))
    if dataset == "tiny":
        return tiny.problems(split, 20_000 if split == "train" else 1_000, seed=0), known
    wanted = known.splits[split == "test"]
    require(
        wanted is not None,
        f"{dataset} is for evaluation only: its authors ask that no row appears in public, and a "
        "training run logs its prompts; name it with --eval-dataset",
    )
    import datasets  # two seconds, which the tiny world does without

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what fails is raised below
    kinds = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
    path = Path(dataset).expanduser()
    is_file = path.exists() or path.suffix in kinds
    if is_file:
        require(not path.is_dir(), f"data set {dataset!r} is a folder; name one file in it")
        require(path.is_file(), f"data set file not found: {dataset}")
        require(path.suffix in kinds, f"{dataset}: unknown file type; use {', '.join(kinds)}")
        require(path.stat().st_size > 0, f"data set {dataset} is empty")
    try:
        if is_file:
            splits = datasets.load_dataset(kinds[path.suffix], data_files={wanted: str(path)})
        else:
            splits = datasets.load_dataset(known.path, known.config)
    except (
        Exception
    ) as error:  # reading fails in many ways; each ends the run here, with its reason
        names = f"it must be a file, a known name (tiny, {', '.join(KNOWN_DATASETS)}), or a hub id"
        if known.gated:
            names = f"accept its terms on hf.co/datasets/{known.path}, then run: hf auth login"
        if is_file:
            names = "one object per row, and in each column values of one type"
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {cause}".splitlines()[0][:200]
        raise UsageError(f"data set {dataset!r} did not load ({reason}); {names}") from error
    taken = wanted if len(splits) > 1 else next(iter(splits))
    require(taken in splits, f"{dataset} has the splits {', '.join(splits)}, and no {wanted!r}")
    if not is_file and PartialState().is_main_process:
        print(f"data {dataset}: split {taken} of {known.path}")
    table = splits[taken]
    require(len(table) > 0, f"data set {dataset} is empty")
    if set(columns) <= set(table.column_names):  # others can be gigabytes: OpenR1's generations
        table = table.select_columns(list(columns) or table.column_names)
    rows, unique = [], {}  # a row that is there a hundred times takes the memory of one
    try:
        for piece in table.with_format("arrow").iter(10_000):
            keyed = ((json.dumps(row, default=str), row) for row in piece.to_pylist())
            rows += [unique.setdefault(key, row) for key, row in keyed]
    except UnicodeDecodeError as error:  # seen only when texts are read
        raise UsageError(f"data set {dataset} is not UTF-8: {error}; convert it") from error
    return rows, known


def column(rows: list[dict], name: str | None, guesses: tuple[str, ...], flag: str) -> list:
    """The values of one column; dotted names reach into structs. Where it does not exist, a
    UsageError lists the columns that do."""
    present = f"the columns are {', '.join(rows[0])}"
    name = name or next((g for g in guesses if g.split(".")[0] in rows[0]), None)
    require(
        name is not None, f"none of {', '.join(guesses)} exists; name one with {flag}; {present}"
    )
    values = rows
    for part in name.split("."):
        found = all(isinstance(value, dict) and part in value for value in values)
        require(found, f"{flag} {name!r} does not exist in every row; {present}")
        values = [value[part] for value in values]
    return values


def gold_text(value) -> str | list[str]:
    """A gold answer as text. GSM8K's worked solutions end in `#### n`; 142.0 is 142; None is empty;
    of a list any entry is right."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return [text for text in map(gold_text, value) if text]
    require(not isinstance(value, dict), f"the gold {value!r} is a struct; use a dotted name")
    text = "" if value is None else str(value)
    return text.rpartition("####")[2].strip()


def shuffle_options(question: str, right: str, wrong: Iterable[str]) -> tuple[str, Letter]:
    """A multiple-choice prompt and the letter of its right option. The order is drawn with a seed
    of the question's own, for with one seed for all the right letter would be the same in all. The
    letter goes by position: another option may have the same text."""
    question, options = question.strip(), [option.strip() for option in (right, *wrong)]
    order = np.random.default_rng(zlib.crc32(question.encode())).permutation(len(options))
    letters = string.ascii_uppercase[: len(options)]
    lines = [f"({letter}) {options[i]}" for letter, i in zip(letters, order, strict=True)]
    return "\n".join([question, "", *lines]), Letter(letters[order.tolist().index(0)])


def is_prompt(value: object) -> bool:
    """Whether it is a text, or a list of messages whose role and content are texts."""
    return isinstance(value, str) or (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(message, dict) for message in value)
        and all(isinstance(m.get(key), str) for m in value for key in ("role", "content"))
    )


def bare_problem(prompt: str | list[dict]) -> str | list[dict]:
    """A text, or the text of a single message, without DAPO's instruction at its two ends, so that
    a template does not contradict it. Longer conversations stay as they are."""
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]["content"]
    if isinstance(prompt, str):
        prompt = prompt.removeprefix(INSTRUCTION[0]).removesuffix(INSTRUCTION[1])
    return prompt


def render_prompt(
    prompt: str | list[dict],
    template: str,
    tokenizer: PreTrainedTokenizerBase,
    chat_template: bool = True,
) -> tuple[str, list[int]]:
    """The text that the model sees and its token ids. Plain text is put into `template`; message
    lists stay as they are. The chat template is used where the tokenizer has one and chat_template
    is true, and a BOS that it writes is not doubled."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": template.replace("{problem}", prompt)}]
    if tokenizer.chat_template is None or not chat_template:
        text = "\n\n".join(message["content"] for message in prompt)
        return text, tokenizer(text)["input_ids"]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return text, tokenizer(text, add_special_tokens=False)["input_ids"]


def load_problems(args, tokenizer) -> tuple[list[Problem], dict[str, list[Problem]]]:
    """Training problems, and the evaluation suites."""
    return load_dataset(args.dataset, "train", args, tokenizer), load_suites(args, tokenizer)


def load_suites(args, tokenizer) -> dict[str, list[Problem]]:
    """The first args.eval_problems problems of each set in args.eval_dataset (names or files,
    separated by commas), by the name of the set or the file."""
    names = [name.strip() for name in args.eval_dataset.split(",")]
    stems = [Path(name).stem for name in names]
    require(
        len({*stems}) == len(stems),
        f"--eval-dataset {args.eval_dataset}: two sets are called {max(stems, key=stems.count)!r}",
    )
    if PartialState().is_main_process:
        print(f"evaluation on {', '.join(stems)}: {eval_settings(args)}")
    return {
        stem: load_dataset(name, "test", args, tokenizer)[: args.eval_problems]
        for stem, name in zip(stems, names, strict=True)
    }


def load_dataset(dataset: str, split: str, args, tokenizer) -> list[Problem]:
    """The problems of a data set, in file order. Repeated prompts, empty golds and prompts over
    args.max_prompt_tokens are dropped, with a count. Raises UsageError where none is left.

    args.prompt_column and answer_column are for sets that we do not know by name;
    args.prompt_template replaces the instruction that the set's prompts carry, or that we add."""
    known = KNOWN_DATASETS.get(dataset)
    needed = (known.prompt, known.answer, *known.wrong) if known else ()
    needed += (known.keep[0],) if known and known.keep else ()
    rows, source = load_rows(dataset, split, {name.split(".")[0] for name in needed})
    counts = [f"rows {len(rows)}"]
    if source.keep:
        name, passes = source.keep
        rows = [row for row in rows if name not in row or passes(row[name])]
        counts.append(f"{len(rows)} by their {name}")
        require(len(rows) > 0, f"{dataset}: no row of {counts[0][5:]} is left by its {name}")
    template = args.prompt_template or source.template
    require("{problem}" in template, f"--prompt-template {template!r} must contain {{problem}}")
    prompt_column = known.prompt if known else args.prompt_column
    answer_column = known.answer if known else args.answer_column
    prompts = column(rows, prompt_column, PROMPT_COLUMNS, "--prompt-column")
    for prompt in prompts:
        if not is_prompt(prompt):  # not require: its text would be made for millions of rows
            shown = f"{dataset}: the prompt {prompt!r:.200} is neither text nor messages"
            raise UsageError(f"{shown} with role and content")
    golds = column(rows, answer_column, ANSWER_COLUMNS, "--answer-column")
    if source.wrong:
        wrong = zip(*(column(rows, name, (), "column") for name in source.wrong), strict=True)
        prompts, golds = zip(*map(shuffle_options, prompts, golds, wrong), strict=True)
    else:
        golds = map(gold_text, golds)
    if template != "{problem}":
        prompts = map(bare_problem, prompts)
    problems = distinct(dataset, prompts, golds)
    judged = [(prompt, gold) for prompt, gold in problems if gold]
    chat = args.chat_template
    rendered = [(*render_prompt(p, template, tokenizer, chat), gold) for p, gold in judged]
    fitting = [row for row in rendered if len(row[1]) <= args.max_prompt_tokens]
    if PartialState().is_main_process:
        counts += [f"{len(problems)} distinct prompts", f"{len(judged)} with a gold"]
        counts += [f"{len(fitting)} of at most {args.max_prompt_tokens} tokens"]
        print(f"data {dataset}: {' -> '.join(counts)}")
    require(len(judged) > 0, f"no row of {dataset} has a gold answer; see --answer-column")
    longest = max(len(ids) for _, ids, _ in rendered)
    require(
        len(fitting) > 0,
        f"no prompt of {dataset} is left; the longest has {longest} tokens, and "
        f"--max-prompt-tokens is {args.max_prompt_tokens}",
    )
    return [Problem(i, *row) for i, row in enumerate(fitting)]


def distinct(dataset: str, prompts: Iterable, golds: Iterable) -> list[tuple]:
    """(prompt, gold) of every prompt that differs from those before it, beyond white space at its
    ends. Says how many come again with another gold; their texts stay out of the log."""
    unique: dict[str, tuple] = {}
    disputed = []
    for i, (prompt, gold) in enumerate(zip(prompts, golds, strict=True)):
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        if unique.setdefault(text.strip(), (prompt, gold))[1] != gold:
            disputed.append(i)
    if disputed and PartialState().is_main_process:
        print(
            f"warning: {dataset}: {len(disputed)} rows repeat a prompt with another gold, and the "
            f"first gold is kept; row {disputed[0]} is one"
        )
    return list(unique.values())


def draw_problems(
    problems: list[Problem], cursor: int, num: int, seed: int
) -> list[tuple[int, Problem]]:
    """The problems at positions cursor, cursor + 1, ... of an endless stream of shuffled epochs,
    as (position, problem) pairs. A pure function: the same seed gives the same order in every
    script and after a resume."""
    drawn, orders = [], {}
    for position in range(cursor, cursor + num):
        epoch, offset = divmod(position, len(problems))
        if epoch not in orders:
            orders[epoch] = np.random.default_rng([seed, epoch]).permutation(len(problems))
        drawn.append((position, problems[orders[epoch][offset]]))
    return drawn


def load_reward(name: str) -> Callable[[list[str], list[str], list[str]], list[float]]:
    """The function `reward(prompts, responses, golds) -> one float in [0, 1] per response`.

    "verifier" is the built-in one; `path.py:function` loads one's own, from the current folder or
    the one of this file."""
    if name == "verifier":
        return lambda prompts, responses, golds: verifier.grade(
            responses, golds, [isinstance(gold, Letter) for gold in golds]
        )
    path, _, function = name.rpartition(":")
    files = [p for p in (Path(path), Path(__file__).parent / path) if p.is_file()]
    require(bool(path), f"--reward {name!r} names no function; use verifier or path.py:function")
    require(bool(files), f"--reward {name!r}: no such file; use verifier or path.py:function")
    spec = importlib.util.spec_from_file_location(files[0].stem, files[0])
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code; whatever it is, the way on is in that file
        raise UsageError(f"--reward {name!r} fails at import: {error!r}") from error
    reward = getattr(module, function, None)
    require(callable(reward), f"--reward {name!r}: {files[0]} has no function {function!r}")
    try:
        inspect.signature(reward).bind("prompts", "responses", "golds")
    except TypeError as error:
        raise UsageError(f"--reward {name!r} gets prompts, responses, golds: {error}") from None
    return reward
