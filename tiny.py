"""tiny: the built-in world. A tokenizer, a model shape and problems with a checkable answer.

Every script runs here when it is called without arguments: no network, no GPU, no data set. It is a
small size of the real path, not a branch beside it: the same tokenizer calls, rollout engines,
verifier, losses, checkpoints and evaluation as for a 32B model.

The task is a running sum modulo 5. A prompt lists 5 to 8 digits; a response may think one equation
at a time, or answer at once:

    prompt              3 4 2 0 1 ?
    thinks              <think> 3+4=2 2+2=4 4+0=4 4+1=0 </think> \\boxed{ 0 } <eos>
    answers at once     <think> </think> \\boxed{ 0 } <eos>

The demonstrations behind the base policy answer at once six times in ten, where a model of this
size can only guess, and err in 12 % of their steps. So the base policy is right on about a third of
the problems, and RL can raise that by thinking more often and by erring less: longer responses,
higher reward. A wrong equation is an ordinary word: nothing but arithmetic marks it.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from verifier import grade

MODULUS = 5
MIN_ITEMS, MAX_ITEMS = 5, 8
DIRECT_FRACTION = 0.6  # share of demonstrations that answer at once
STEP_ERROR = (
    0.12  # share of demonstrated steps whose result is wrong (the chain carries on from it)
)
HELD_OUT = 10  # one problem in HELD_OUT, chosen by a hash of its text, is never trained on


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer: words are separated by spaces, and decoding puts the spaces back."""
    digits = [str(d) for d in range(MODULUS)]
    equations = [f"{a}+{b}={c}" for a in digits for b in digits for c in digits]
    words = ["<pad>", "<eos>", "?", "<think>", "</think>", "\\boxed{", "}", *digits, *equations]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


def make_config() -> Qwen3Config:
    """A Qwen3 of about 0.17 M parameters. head_dim is 32 because vLLM's CPU kernel refuses 16;
    initializer_range is 0.1, not 0.02, because so small a model then learns much faster."""
    tokenizer = make_tokenizer()
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=192,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def is_held_out(prompt: str) -> bool:
    """Whether a problem is for evaluation only; decided by its text, so splits never overlap."""
    return zlib.crc32(prompt.encode()) % HELD_OUT == 0


def problems(split: str, num: int, seed: int) -> list[dict]:
    """`num` distinct problems of a split, "train" or "test": {"prompt", "answer", "solution"} rows.
    The solution is one demonstration; only sft.py reads it."""
    rng = np.random.default_rng([seed, split == "test"])
    rows: dict[str, dict] = {}
    while len(rows) < num:
        digits = rng.integers(MODULUS, size=rng.integers(MIN_ITEMS, MAX_ITEMS + 1)).tolist()
        prompt = " ".join(map(str, digits)) + " ?"
        if prompt in rows or is_held_out(prompt) != (split == "test"):
            continue
        answer = str(sum(digits) % MODULUS)
        rows[prompt] = {
            "prompt": prompt,
            "answer": answer,
            "solution": demonstration(digits, rng),
        }
    return list(rows.values())


def demonstration(digits: list[int], rng: np.random.Generator) -> str:
    """A response to imitate: an answer at once (DIRECT_FRACTION), or a chain with errors."""
    if rng.random() < DIRECT_FRACTION:
        return f"<think> </think> \\boxed{{ {sum(digits) % MODULUS} }}"
    total, steps = digits[0], []
    for digit in digits[1:]:
        result = (total + digit) % MODULUS
        if rng.random() < STEP_ERROR:
            result = (result + rng.integers(1, MODULUS)) % MODULUS
        steps.append(f"{total}+{digit}={result}")
        total = result
    return f"<think> {' '.join(steps)} </think> \\boxed{{ {total} }}"


def reward(prompts: list[str], responses: list[str], golds: list[str]) -> list[float]:
    """The verifier's verdict, where nothing follows the one box. Without this rule a policy can
    learn to append junk after a right answer, and no curve would show it."""
    verdicts = grade(responses, golds)
    return [
        v * r.rstrip().endswith("}") * (r.count("}") == 1)
        for v, r in zip(verdicts, responses, strict=True)
    ]


CACHE = Path(__file__).resolve().parent / ".cache"


def untrained_policy() -> str:
    """The folder of a model with random weights, made on first use; sft.py starts from it."""
    return _cached("untrained", _initialize)


def base_policy() -> str:
    """The folder of the base policy, made by `sft.py tiny` on first use (about a minute).

    It is cached under a hash of its recipe, so that a changed world never meets an old policy."""
    return _cached("base", _train)


def newest_pair(runs_dir: str = "runs") -> Path:
    """The folder of the newest `ppo_critic.py tiny` run that left both a policy and a critic."""
    critics = Path(runs_dir).glob("ppo_critic-tiny-*/critic/config.json")
    runs = [c.parents[1] for c in critics if (c.parents[1] / "pi_0/config.json").exists()]
    if not runs:
        where = Path(runs_dir).resolve()
        raise FileNotFoundError(
            f"no policy and critic in {where}/ppo_critic-tiny-*; make them with: python "
            "ppo_critic.py (--resume where that was interrupted), or name the folders, as those "
            "under another --runs-dir"
        )
    return max(runs, key=lambda run: (run / "critic/config.json").stat().st_mtime)


def _cached(name: str, make: Callable[[Path], None]) -> str:
    here = CACHE.parent
    recipe = b"".join((here / file).read_bytes() for file in ("tiny.py", "sft.py"))
    folder = CACHE / f"{name}-{hashlib.sha256(recipe).hexdigest()[:12]}"
    CACHE.mkdir(exist_ok=True)
    while os.environ.get("LOCAL_RANK", "0") != "0" and not folder.exists():
        time.sleep(0.2)  # transformers writes weights on rank 0 only
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other runs wait here
        if not folder.exists():
            make(folder)
    return str(folder)


def _initialize(folder: Path) -> None:
    torch.manual_seed(0)
    partial = folder.with_suffix(".partial")
    AutoModelForCausalLM.from_config(make_config()).save_pretrained(partial)
    make_tokenizer().save_pretrained(partial)
    partial.rename(folder)


def _train(folder: Path) -> None:
    print("making the base policy with sft.py (once, about a minute)", flush=True)
    script = CACHE.parent / "sft.py"
    flags = ["--export", str(folder), "--runs-dir", str(CACHE / "runs")]
    # A process of its own: the variables of torchrun would make it wait for other ranks.
    torchrun = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    env = {key: value for key, value in os.environ.items() if key not in torchrun}
    done = subprocess.run([sys.executable, str(script), "tiny", *flags], env=env, check=False)
    if done.returncode != 0 or not folder.exists():
        raise SystemExit(f"sft.py did not make the base policy (exit code {done.returncode})")
    print("the base policy is ready", flush=True)
