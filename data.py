"""data: problems with gold answers, from files, hub ids and the sets known by name; and rewards.

Scripts import these names from common."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase

import tiny
import verifier
from runtime import UsageError, require


@dataclass(frozen=True)
class Problem:
    """One prompt, as text and as the token ids that the model gets, with its gold answer."""

    index: int  # its row in the data set, after filtering
    prompt: str
    prompt_ids: list[int]
    gold: str | list[str]


@dataclass(frozen=True)
class KnownDataset:
    """Where a data set that we know by name lives, and what its columns are called."""

    path: str
    splits: tuple[str, str]  # for training and for evaluation
    prompt: str | None
    answer: str | None
    config: str | None = None
    template: str = "{problem}"


BOXED = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}."
KNOWN_DATASETS = {
    # DAPO's prompts are message lists that carry their instruction; nothing is added.
    "dapo-math-17k": KnownDataset(
        "BytedTsinghua-SIA/DAPO-Math-17k", ("train",) * 2, "prompt", "reward_model.ground_truth"
    ),
    "gsm8k": KnownDataset("openai/gsm8k", ("train", "test"), "question", "answer", "main", BOXED),
    "math500": KnownDataset(
        "HuggingFaceH4/MATH-500", ("test",) * 2, "problem", "answer", None, BOXED
    ),
    "aime24": KnownDataset(
        "HuggingFaceH4/aime_2024", ("train",) * 2, "problem", "answer", None, BOXED
    ),
    "aime25": KnownDataset("math-ai/aime25", ("test",) * 2, "problem", "answer", None, BOXED),
    # "all": copies of this set differ in the name of their one split
    "aime26": KnownDataset("math-ai/aime26", ("all",) * 2, "problem", "answer", None, BOXED),
    "amc23": KnownDataset("math-ai/amc23", ("test",) * 2, "question", "answer", None, BOXED),
    "openr1-math-220k": KnownDataset(
        "open-r1/OpenR1-Math-220k", ("train",) * 2, "problem", "answer", "default", BOXED
    ),
}
PROMPT_COLUMNS = ("prompt", "problem", "question", "Problem", "Question")
ANSWER_COLUMNS = ("reward_model.ground_truth", "answer", "Answer")


def load_rows(dataset: str, split: str) -> tuple[list[dict], KnownDataset]:
    """Rows of a data set, and what we know about its columns.

    `dataset` is "tiny", a known name, a jsonl/json/parquet/arrow file, or a hub id. Raises
    UsageError for a file that is missing or unreadable and for a hub id that does not load."""
    known = KNOWN_DATASETS.get(dataset, KnownDataset(dataset, ("train", "test"), None, None))
    if dataset == "tiny":
        return tiny.problems(split, 20_000 if split == "train" else 1_000, seed=0), known
    import datasets  # two seconds, which the tiny world does without

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what fails is raised below
    kinds = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
    path = Path(dataset).expanduser()
    is_file = path.exists() or path.suffix in kinds
    if is_file:
        require(path.is_file(), f"data set file not found: {dataset}")
        require(path.suffix in kinds, f"{dataset}: unknown file type; use {', '.join(kinds)}")
        require(path.stat().st_size > 0, f"data set {dataset} is empty")
    try:
        if is_file:
            table = datasets.load_dataset(kinds[path.suffix], data_files=str(path), split="train")
        else:
            table = datasets.load_dataset(
                known.path, known.config, split=known.splits[split == "test"]
            )
    except (
        Exception
    ) as error:  # reading fails in many ways; each ends the run here, with its reason
        names = f"a file, a known name (tiny, {', '.join(KNOWN_DATASETS)}), or a hub id"
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {cause}".splitlines()[0][:200]
        raise UsageError(
            f"data set {dataset!r} did not load ({reason}); it must be {names}"
        ) from error
    require(len(table) > 0, f"data set {dataset} is empty")
    return table.to_list(), known


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
        return [gold_text(entry) for entry in value]
    require(not isinstance(value, dict), f"the gold {value!r} is a struct; use a dotted name")
    text = "" if value is None else str(value)
    return text.rpartition("####")[2].strip()


def render_prompt(
    prompt: str | list[dict], template: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[int]]:
    """The text that the model sees and its token ids. Plain text is put into `template`; message
    lists stay as they are. The chat template is used where the tokenizer has one, and a BOS that
    it writes is not doubled."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": template.replace("{problem}", prompt)}]
    if tokenizer.chat_template is None:
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
    return {
        Path(name).stem: load_dataset(name, "test", args, tokenizer)[: args.eval_problems]
        for name in names
    }


def load_dataset(dataset: str, split: str, args, tokenizer) -> list[Problem]:
    """The problems of a data set, in file order. Repeated prompts, empty golds and prompts over
    args.max_prompt_tokens are dropped, with a count. Raises UsageError where none is left.

    args.prompt_column and answer_column are for sets that we do not know by name."""
    rows, known = load_rows(dataset, split)
    named = dataset in KNOWN_DATASETS
    template = args.prompt_template or known.template
    require("{problem}" in template, f"--prompt-template {template!r} must contain {{problem}}")
    prompt_column = known.prompt if named else args.prompt_column
    answer_column = known.answer if named else args.answer_column
    prompts = column(rows, prompt_column, PROMPT_COLUMNS, "--prompt-column")
    golds = column(rows, answer_column, ANSWER_COLUMNS, "--answer-column")
    unique: dict[str, tuple] = {}
    for prompt, gold in zip(prompts, map(gold_text, golds), strict=True):
        require(isinstance(prompt, str | list), f"{dataset}: the prompt {prompt!r} is no text")
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        first = unique.setdefault(text.strip(), (prompt, gold))[1]
        if first != gold and PartialState().is_main_process:
            print(f"warning: two golds for one prompt, the first is kept: {text[:80]!r}")
    judged = [(prompt, gold) for prompt, gold in unique.values() if gold]
    rendered = [(*render_prompt(prompt, template, tokenizer), gold) for prompt, gold in judged]
    fitting = [row for row in rendered if len(row[1]) <= args.max_prompt_tokens]
    if PartialState().is_main_process:
        print(
            f"data {dataset}: {len(rows)} rows -> {len(unique)} distinct prompts -> {len(judged)} "
            f"with a gold -> {len(fitting)} of at most {args.max_prompt_tokens} tokens"
        )
    require(len(judged) > 0, f"no row of {dataset} has a gold answer; see --answer-column")
    longest = max(len(ids) for _, ids, _ in rendered)
    require(
        len(fitting) > 0,
        f"no prompt of {dataset} is left; the longest has {longest} tokens, and "
        f"--max-prompt-tokens is {args.max_prompt_tokens}",
    )
    return [Problem(i, *row) for i, row in enumerate(fitting)]


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
        return lambda prompts, responses, golds: verifier.grade(responses, golds)
    path, _, function = name.rpartition(":")
    files = [p for p in (Path(path), Path(__file__).parent / path) if p.is_file()]
    require(bool(files), f"--reward {name!r}: no such file; use verifier or path.py:function")
    spec = importlib.util.spec_from_file_location(files[0].stem, files[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    require(hasattr(module, function), f"--reward {name!r}: {files[0]} has no {function!r}")
    return getattr(module, function)
