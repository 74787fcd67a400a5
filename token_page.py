"""token_page: what an update made of every token, as a page of its own; RL scripts end with it.

python token_page.py runs/fipo-tiny-seed1      draws runs/fipo-tiny-seed1/tokens.html again

The numbers are those of the loop: Run.log_tokens writes them to tokens.jsonl, a line per response.
The page needs no network. What is shown can stand in its address: tokens.html#step=20&response=2
&quantity=influence&scale=run&token=7 (responses of a step and tokens count from 1).
"""

import argparse
import html
import json
import math
from pathlib import Path

# Read here, so that a copy of the scripts without it fails at start.
PAGE = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
NUM_GROUPS, MAX_TOKENS = 2, 10_000  # groups per step, two responses of each; tokens per response
NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # as JavaScript reads them

# name: (title, neutral value or None, what it says), first what the page shows when it opens.
QUANTITIES = {
    "weighted_advantage": (
        "advantage x influence",
        0,
        "What enters the loss. Above 0 the update makes the token more likely, below 0 less.",
    ),
    "value": (
        "value",
        None,
        "The critic's estimate of the reward, read after this token.",
    ),
    "advantage": (
        "advantage",
        0,
        "Above 0 the update makes the token more likely, below 0 less.",
    ),
    "influence": (
        "influence weight",
        1,
        "The factor on the advantage. Above 1 the token counts more, below 1 less. It is 1 "
        "where no update has been made on the batch yet.",
    ),
    "value_change": (
        "value change",
        0,
        "The value after this token minus the value before it.",
    ),
    "log_ratio": (
        "log-ratio",
        0,
        "log pi_theta - log pi_old, nats. Above 0 the updates before this one made the token more "
        "likely. It is 0 where no update has been made on the batch yet.",
    ),
    "entropy": (
        "entropy",
        None,
        "Entropy of the policy's distribution at this place, nats, at that update.",
    ),
}


def token_lines(step, groups, batch, tokenizer, per_token) -> list[dict]:
    """A few of this rank's responses as lines of tokens.jsonl: the worst and the best judged one of
    NUM_GROUPS groups, those with mixed outcomes first, then the last in the batch, on which most
    updates have been made. per_token [b, 1] or [b, T] by name; numbers get six digits."""
    responses = [pair for g in groups for pair in zip(g.responses, g.correct, strict=True)]
    owners = [group for group in groups for _ in group.responses]
    members: dict[int, list[int]] = {}  # indices into this rank's rows
    for i, row in enumerate(batch.rows.tolist()):
        members.setdefault(owners[row].number, []).append(i)
    verdicts = [responses[row][1] for row in batch.rows.tolist()]
    pairs = [sorted(rows, key=lambda i: verdicts[i]) for rows in reversed(members.values())]
    pairs = [rows[:1] + rows[1:][-1:] for rows in pairs]
    pairs.sort(key=lambda rows: (verdicts[rows[0]] == verdicts[rows[-1]], -len(rows)))  # stable
    lines, chosen = [], [i for rows in pairs[:NUM_GROUPS] for i in rows]
    for i in chosen:
        row = int(batch.rows[i])
        ids = responses[row][0].token_ids[:MAX_TOKENS].tolist()
        shown = {name: x[i].expand(batch.mask.shape[1]) for name, x in per_token.items()}
        lines.append(
            {
                "step": step,
                "group": owners[row].number,
                "prompt": owners[row].problem.prompt,
                "gold": owners[row].problem.gold,
                "correct": verdicts[i],
                "length": len(responses[row][0].token_ids),
                "tokens": tokenizer.batch_decode([[token] for token in ids]),
                "numbers": {
                    k: [digits(v) for v in x[: len(ids)].tolist()] for k, x in shown.items()
                },
            }
        )
    return lines


def digits(x: float) -> float:
    return float(f"{x:.6g}")  # weights near 1 differ in the fifth


def token_page(folder: Path) -> Path:
    """Draw tokens.html of the tokens.jsonl in a run's folder. Numbers that are not finite travel as
    texts, for JSON has none; "<" is escaped, so that no token can end the script that holds it."""
    folder = Path(folder)
    lines = [json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()]
    for line in lines:
        line["numbers"] = {
            name: [x if math.isfinite(x) else NOT_FINITE[str(x)] for x in row]
            for name, row in line["numbers"].items()
        }
    data = {"quantities": QUANTITIES, "responses": lines}
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    page = PAGE.replace("RUN_NAME", html.escape(folder.resolve().name)).replace("RUN_DATA", text)
    (folder / "tokens.html").write_text(page, encoding="utf-8")
    return folder / "tokens.html"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    for run in parser.parse_args().runs:
        if not (run / "tokens.jsonl").is_file():
            parser.error(f"{run} has no tokens.jsonl; the RL scripts write it, sft.py does not")
        print(token_page(run))
