"""Padding: how much of a micro-batch is padding, on the lengths of real responses.

    python benchmarks/padding.py --model smollm2 --responses PATH/math_graded_outputs_50.jsonl

The 400 responses to 50 MATH problems, each behind its problem in the model's chat template, are cut
as in training: minibatches of 100 rows, micro-batches of at most 16,384 padded tokens. Beside it
the same without sorting rows by length. Writes benchmarks/padding.jsonl, and exits with 1 where
more than 10 % is padding. docs/smollm2.md says how to make the folder smollm2; any tokenizer works.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402

import common  # noqa: E402
from engines import Response  # noqa: E402

MINIBATCH, TOKENS, BAR = 100, 16_384, 0.10
OUT = ROOT / "benchmarks" / "padding.jsonl"


def read_groups(path, tokenizer):
    """The responses as groups, a problem each, in the order of the file."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    groups = {}
    for row in rows:
        if row["problem"] not in groups:
            ids = common.render_prompt(row["problem"], "{problem}", tokenizer)[1]
            problem = common.Problem(len(groups), row["problem"], ids, row["gold"])
            groups[row["problem"]] = common.Group(problem.index, problem, [], [])
        ids = np.array([*tokenizer(row["response"])["input_ids"], tokenizer.eos_token_id], np.int32)
        response = Response(ids, np.zeros(len(ids), np.float32), True)
        groups[row["problem"]].responses.append(response)
    return list(groups.values())


def padding_frac(pieces, lengths):
    """Share of padding among the tokens of the forwards, for pieces of row indices [rows]."""
    padded = sum(len(rows) * int(lengths[rows].max()) for rows in pieces)
    return 1 - int(lengths[torch.cat(pieces)].sum()) / padded


def unsorted_pieces(minibatch, lengths):
    """Rows as they come, as many as fit under the token budget."""
    pieces, piece = [], []
    for row in minibatch.tolist():
        if piece and (len(piece) + 1) * int(lengths[[*piece, row]].max()) > TOKENS:
            pieces, piece = [*pieces, torch.tensor(piece)], []
        piece.append(row)
    return [*pieces, torch.tensor(piece)]


def measure(path, tokenizer):
    """The result for the responses in the file, as a dictionary."""
    groups = read_groups(path, tokenizer)
    accelerator, args = Accelerator(cpu=True), SimpleNamespace(tokens_per_microbatch=TOKENS)
    batch = common.make_batch(groups, MINIBATCH, tokenizer.pad_token_id or 0, accelerator)
    lengths = batch.prompt_lengths + batch.response_lengths
    cut = [common.microbatches(batch, m, args, accelerator) for m in batch.minibatches]
    pieces = [rows for minibatch in cut for rows, _ in minibatch]
    # make_batch deals a minibatch's rows out by length; the order of the file is that of batch.rows
    in_order = [minibatch[batch.rows[minibatch].argsort()] for minibatch in batch.minibatches]
    plain = [p for minibatch in in_order for p in unsorted_pieces(minibatch, lengths)]
    return {
        "responses": len(lengths),
        "tokens": int(lengths.sum()),
        "shortest": int(lengths.min()),
        "longest": int(lengths.max()),
        "minibatches": len(batch.minibatches),
        "microbatches": len(pieces),
        "padding_frac": round(padding_frac(pieces, lengths), 4),
        "unsorted_microbatches": len(plain),
        "unsorted_padding_frac": round(padding_frac(plain, lengths), 4),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or id whose tokenizer counts")
    parser.add_argument("--responses", required=True, help="jsonl with problem, gold, response")
    arguments = parser.parse_args()
    tokenizer = common.load_tokenizer(arguments.model)
    result = measure(arguments.responses, tokenizer)
    result |= {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/padding.py --model smollm2 --responses "
        + Path(arguments.responses).name,
    }
    print(json.dumps(result))
    OUT.write_text(json.dumps(result) + "\n")
    if result["padding_frac"] > BAR:
        raise SystemExit(f"padding {result['padding_frac']:.1%} is above {BAR:.0%}")


if __name__ == "__main__":
    main()
