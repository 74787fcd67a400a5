"""How fast verifier.py judges, with math-verify alone beside it in the same run.

    python benchmarks/verifier_speed.py            # about 2 minutes on 2 cores
    CLEANREASON_SHARED=path/to/shared python benchmarks/verifier_speed.py

Every number is the median of five interleaved repeats: ours, math-verify, ours, ... Caches are off
in the calling process. Writes benchmarks/verifier_speed.jsonl, one line per measurement.
"""

import json
import logging
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("CLEANREASON_SHARED", ROOT / "../shared"))
sys.path.insert(0, str(ROOT))

import math_verify  # noqa: E402

import verifier  # noqa: E402

REPEATS = 5


def math_verify_alone(texts, golds):
    # Both of its time limits off: they are alarms, which it cannot use off the main thread anyway.
    verdicts = []
    for text, gold in zip(texts, golds, strict=True):
        gold = math_verify.parse(f"${gold}$", parsing_timeout=None)
        answer = math_verify.parse(text, parsing_timeout=None)
        verdicts.append(math_verify.verify(gold, answer, timeout_seconds=None))
    return verdicts


def seconds(function, *args):
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def interleaved(first, second):
    """Medians over REPEATS of two measurements taken in turns."""
    pairs = [(first(), second()) for _ in range(REPEATS)]
    return [statistics.median(column) for column in zip(*pairs, strict=True)]


def plain_rows(count):
    work = "3+4=7 and 2+2=4, so after some more work we find that the total is as follows: "
    texts = [f"{work}\\boxed{{{n % 97}{'.5' * (n % 2)}}}, as asked." for n in range(count)]
    assert max(map(len, texts)) <= 200
    return texts, [f"{n % 89}{'.50' * (n % 2)}" for n in range(count)]


def main():
    logging.disable(logging.WARNING)  # math-verify warns about the missing time limit
    # caches off
    verifier._clean, verifier._read = verifier._clean.__wrapped__, verifier._read.__wrapped__
    results = []

    def record(**values):
        results.append(values)
        print(json.dumps(values), flush=True)

    many, few = plain_rows(20_000), plain_rows(200)
    ours, theirs = interleaved(
        lambda: 20_000 / seconds(verifier.grade, *many),
        lambda: 200 / seconds(math_verify_alone, *few),
    )
    record(what="plain answers, rows/s, one process", ours=round(ours), math_verify=round(theirs))

    short = ([f"3+4=7 2+2=4 \\boxed{{ {n % 9} }}" for n in range(512)], ["4"] * 512)
    ours, theirs = interleaved(
        lambda: 1e3 * seconds(verifier.grade, *short),
        lambda: 1e3 * seconds(math_verify_alone, *short),
    )
    record(what="512 short texts, ms", ours=round(ours, 1), math_verify=round(theirs, 1))

    path = SHARED / "data/math_graded_outputs_50.jsonl"
    if path.exists():
        with open(path, encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        chunks = [rows, rows, rows[: len(rows) // 2]]  # one batch would judge equal pairs once
        columns = [([r["response"] for r in c], [r["gold"] for r in c]) for c in chunks]
        ours, theirs = interleaved(
            lambda: sum(seconds(verifier.grade, *c) for c in columns),
            lambda: sum(seconds(math_verify_alone, *c) for c in columns),
        )
        count = sum(map(len, chunks))
        record(what=f"{count} real responses, s", ours=round(ours, 2), math_verify=round(theirs, 2))
        agree = [
            sum(
                bool(v) == r["graded_correct"]
                for v, r in zip(grader(*columns[0]), rows, strict=True)
            )
            for grader in (verifier.grade, math_verify_alone)
        ]
        record(what="400 real responses, same verdict as their grader",
               ours=agree[0], math_verify=agree[1])  # fmt: skip

    sympy_rows = (
        [f"\\boxed{{(x+{n})^2}}" for n in range(100)],
        [f"x^2+{2 * n}x+{n * n}" for n in range(100)],
    )
    ours, theirs = interleaved(
        lambda: 100 / seconds(verifier.grade, *sympy_rows),
        lambda: 100 / seconds(math_verify_alone, *sympy_rows),
    )
    record(what="polynomials that sympy must judge, rows/s", ours=round(ours),
           math_verify=round(theirs))  # fmt: skip

    cold = {
        "ours": "import verifier; assert verifier.verify(r'\\boxed{(x+1)^2}', 'x^2+2x+1')",
        "math_verify": "from math_verify import parse, verify; "
        "assert verify(parse('$x^2+2x+1$'), parse(r'\\boxed{(x+1)^2}'))",
    }
    ours, theirs = interleaved(
        *(
            lambda code=code: seconds(
                lambda: subprocess.run([sys.executable, "-c", code], cwd=ROOT)
            )
            for code in cold.values()
        )
    )
    record(what="cold start to the first sympy verdict, s", ours=round(ours, 2),
           math_verify=round(theirs, 2))  # fmt: skip

    with open(ROOT / "tests/verifier_cases.jsonl", encoding="utf-8") as lines:
        cases = [json.loads(line) for line in lines]
    right, total = [0, 0], 0
    for case in cases:  # a hostile row would hang it, and it has no multiple choice
        if case["kind"] == "hostile" or case.get("multiple_choice"):
            continue
        total += 1
        right[0] += verifier.verify(case["text"], case["gold"]) == bool(case["want"])
        golds = case["gold"] if isinstance(case["gold"], list) else [case["gold"]]
        right[1] += any(math_verify_alone([case["text"]] * len(golds), golds)) == bool(case["want"])
    record(what=f"our {total} policy cases judged as we want", ours=right[0], math_verify=right[1])

    with open(ROOT / "benchmarks/verifier_speed.jsonl", "w", encoding="utf-8") as out:
        for values in results:
            stamp = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count()}
            out.write(json.dumps({**values, **stamp}) + "\n")


if __name__ == "__main__":
    main()
