"""Log-probabilities and entropies: models.token_logprobs against full logits.

    python benchmarks/logprobs.py      # about 5 minutes on 2 cores; needs 13 GB of free memory

4,096 tokens, hidden size 256, a vocabulary of 151,936, fp32: forward with entropy, then backward
into the hidden states and the output matrix. Every call runs in a process of its own: its seconds,
and its peak memory above what stood before the call. Medians of five interleaved repeats (ours,
full, ours, ...). Writes benchmarks/logprobs.jsonl, and exits with 1 where a bar is missed: at most
1/20 of the memory, and no more time.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Waiting threads sleep: where cores are shared, a thread that spins takes the time of the other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402

from models import token_logprobs  # noqa: E402

TOKENS, HIDDEN, VOCABULARY = 4_096, 256, 151_936
THREADS, REPEATS, TEMPERATURE = 2, 5, 1.0
OUT = ROOT / "benchmarks" / "logprobs.jsonl"


def full_logprobs(hidden, weight, bias, targets, temperature):
    """The plain way: logits of all positions at once."""
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature  # [N, V]
    logprobs = logits.log_softmax(-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


def inputs(tokens, vocabulary):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN).requires_grad_()
    weight = (0.1 * torch.randn(vocabulary, HIDDEN)).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,))


def call(function, tokens, vocabulary):
    """Seconds, peak bytes above those before, and numbers by which the two ways can be compared."""
    hidden, weight, targets = inputs(tokens, vocabulary)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, start = resident("VmRSS"), time.perf_counter()
    logprobs, entropy = function(hidden, weight, None, targets, TEMPERATURE)
    logprobs.sum().backward()
    elapsed = time.perf_counter() - start
    return {
        "s": elapsed,
        "peak": resident("VmHWM") - before,
        "check": [float(x) for x in (logprobs.detach().mean(), entropy.mean(), hidden.grad.norm())]
        + [float(weight.grad.norm())],
    }


def resident(field):
    """VmRSS (now) or VmHWM (peak) of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def in_a_child(name, tokens):
    command = [sys.executable, __file__, "--child", name, "--tokens", str(tokens)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of each of the two")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="positions")
    parser.add_argument("--out", type=Path, default=OUT, help="jsonl to write")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        torch.set_num_threads(THREADS)
        function = token_logprobs if arguments.child == "ours" else full_logprobs
        call(function, 64, 1_000)  # threads and libraries are loaded
        print(json.dumps(call(function, arguments.tokens, VOCABULARY)))
        return
    calls = {"ours": [], "full": []}
    for _ in range(arguments.repeats):
        for name, results in calls.items():
            results.append(in_a_child(name, arguments.tokens))
            print(name, json.dumps(results[-1]), flush=True)
    pairs = zip(calls["ours"][0]["check"], calls["full"][0]["check"], strict=True)
    agreement = max(abs(ours - full) / abs(full) for ours, full in pairs)
    seconds = {name: statistics.median(r["s"] for r in results) for name, results in calls.items()}
    peaks = {name: statistics.median(r["peak"] for r in rs) for name, rs in calls.items()}
    result = {
        "tokens": arguments.tokens,
        "hidden": HIDDEN,
        "vocabulary": VOCABULARY,
        "ours_s": round(seconds["ours"], 1),
        "full_s": round(seconds["full"], 1),
        "times_faster": round(seconds["full"] / seconds["ours"], 2),
        "ours_peak_gb": round(peaks["ours"] / 2**30, 3),
        "full_peak_gb": round(peaks["full"] / 2**30, 2),
        "times_less_memory": round(peaks["full"] / peaks["ours"], 1),
        "largest_relative_difference": float(f"{agreement:.2g}"),
        "repeats": arguments.repeats,
        "threads": THREADS,
        "machine": "2 CPU cores",
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/logprobs.py",
    }
    print(json.dumps(result))
    arguments.out.write_text(json.dumps(result) + "\n")
    if result["times_less_memory"] < 20 or result["times_faster"] < 1 or agreement > 1e-4:
        raise SystemExit("below the bar")


if __name__ == "__main__":
    main()
