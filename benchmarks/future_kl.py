"""Future-KL: fipo.future_kl, linear in T, against the chunked sum of the paper's Listing 1, O(T^2).

    python benchmarks/future_kl.py            # about 3 minutes on 2 cores

Both get 16 rows on two threads. Seconds are medians of five interleaved repeats (ours, chunked,
ours, ...). Peak memory is that of one call in a process of its own, above what stood before the
call. Errors are against a float64 sum over all pairs (t, k), relative to max(1, |value|), at
half-lives 32, 256 and none; at T = 20,480 that takes most of the time. Writes
benchmarks/future_kl.jsonl, one line per length, and exits with 1 where a bar is missed: at 20,480
tokens at least 100x faster, and at every length an error of at most 1e-5.
"""

import argparse
import datetime
import json
import math
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

from fipo import future_kl  # noqa: E402

ROWS, THREADS, REPEATS, CHUNK = 16, 2, 5, 128
LENGTHS = (2_048, 8_192, 20_480)
HALF_LIFE, DUAL_CLIP = 32.0, 10.0
OUT = ROOT / "benchmarks" / "future_kl.jsonl"


def chunked_future_kl(log_ratio, kept, half_life, chunk=CHUNK):
    """The same sum as in the paper's Listing 1: for one chunk of source positions k at a time, a
    [T, chunk] matrix of weights gamma^(k-t), 0 where k < t, times the chunk's log-ratios."""
    gamma = 2 ** (-1 / half_life)
    shift = log_ratio * kept
    total = torch.zeros_like(shift)
    target = torch.arange(shift.shape[1])[:, None]  # t
    for start in range(0, shift.shape[1], chunk):
        source = torch.arange(start, min(start + chunk, shift.shape[1]))  # k
        distance = source - target  # [T, chunk]
        weight = gamma ** distance.clamp(min=0) * (distance >= 0).float()
        total += shift[:, source[0] : source[-1] + 1] @ weight.T
    return total


def exact_future_kl(log_ratio, kept, half_life, block=64):
    """The double sum in float64, for a block of positions t at a time and all k from there on."""
    rate = 0.0 if half_life is None else math.log(2) / half_life
    shift = torch.where(kept, log_ratio, 0.0).double()
    total, length = torch.zeros_like(shift), shift.shape[1]
    for t in range(0, length, block):
        rows = torch.arange(t, min(t + block, length))
        distance = torch.arange(t, length) - rows[:, None]  # k - t, [block, length - t]
        weight = torch.where(distance >= 0, torch.exp(-rate * distance.double()), 0.0)
        total[:, rows] = shift[:, t:] @ weight.T
    return total


def inputs(length):
    """Log-ratios, some of them over the dual clip of 10, a ragged mask, and M of [FIPO Eq. 5]."""
    random = torch.Generator().manual_seed(length)
    log_ratio = 0.3 * torch.randn(ROWS, length, generator=random)
    log_ratio[torch.rand(ROWS, length, generator=random) < 1e-3] = 3.0  # exp(3) = 20
    lengths = torch.randint(length // 2, length + 1, (ROWS, 1), generator=random)
    mask = torch.arange(length) < lengths
    return log_ratio, mask, mask & (log_ratio.exp() <= DUAL_CLIP)


def call(name, log_ratio, mask, kept):
    """One call. The chunked sum gets M ready made; ours makes it."""
    if name == "ours":
        return future_kl(log_ratio, mask, HALF_LIFE, DUAL_CLIP)
    return chunked_future_kl(log_ratio, kept, HALF_LIFE)


def seconds(name, tensors):
    start = time.perf_counter()
    call(name, *tensors)
    return time.perf_counter() - start


def resident(field):
    """VmRSS (now) or VmHWM (peak) of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def peak_of_one_call(name, length):
    """Bytes at the peak of one call above those before it. For a process that does nothing else."""
    torch.set_num_threads(THREADS)
    call(name, *inputs(256))  # threads and libraries are loaded
    tensors = inputs(length)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    call(name, *tensors)
    return resident("VmHWM") - before


def peak_in_a_child(name, length):
    command = [sys.executable, __file__, "--peak", name, str(length)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def errors(length):
    """The largest error of future_kl relative to max(1, |value|), at three half-lives."""
    log_ratio, mask, kept = inputs(length)
    found = {}
    for half_life in (HALF_LIFE, 256.0, None):
        want = exact_future_kl(log_ratio, kept, half_life)
        got = future_kl(log_ratio, mask, half_life, DUAL_CLIP).double()
        error = float(((got - want).abs() / want.abs().clamp(min=1)).max())
        found[str(half_life)] = float(f"{error:.2g}")
    return found


def measure(length):
    torch.set_num_threads(THREADS)
    tensors = inputs(length)
    agree = (call("ours", *tensors) - call("chunked", *tensors)).abs().max()  # and both are warm
    times = [(seconds("ours", tensors), seconds("chunked", tensors)) for _ in range(REPEATS)]
    ours, chunked = (statistics.median(column) for column in zip(*times, strict=True))
    peaks = {name: peak_in_a_child(name, length) for name in ("ours", "chunked")}
    return {
        "tokens": length,
        "rows": ROWS,
        "ours_s": float(f"{ours:.3g}"),
        "chunked_s": float(f"{chunked:.3g}"),
        "times_faster": round(chunked / ours),
        "ours_peak_mb": round(peaks["ours"] / 2**20, 1),
        "chunked_peak_mb": round(peaks["chunked"] / 2**20, 1),
        "relative_error_at_half_life": errors(length),
        "difference_ours_chunked": float(f"{float(agree):.2g}"),
        "repeats": REPEATS,
        "threads": THREADS,
        "machine": "2 CPU cores",
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/future_kl.py",
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="T, tokens")
    parser.add_argument("--out", type=Path, default=OUT, help="jsonl to write")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print(peak_of_one_call(arguments.peak[0], int(arguments.peak[1])))
        return
    results = []
    for length in arguments.lengths:
        results.append(measure(length))
        print(json.dumps(results[-1]), flush=True)
    arguments.out.write_text("".join(json.dumps(line) + "\n" for line in results))
    missed = [r for r in results if max(r["relative_error_at_half_life"].values()) > 1e-5]
    missed += [r for r in results if r["tokens"] >= 20_480 and r["times_faster"] < 100]
    if missed:
        raise SystemExit(f"below the bar: {missed}")


if __name__ == "__main__":
    main()
