"""eval_only: a model on the evaluation suites, with intervals: what --eval-only does.

Nothing is trained: no optimizer, no critic, no data but the suites. On the same number of samples,
seed and engine the numbers are those of an evaluation during training."""

import json
import sys
from pathlib import Path

import numpy as np

from common import (
    bootstrap_means,
    eval_settings,
    evaluate_suite,
    load_reward,
    load_suites,
    load_tokenizer,
    make_accelerator,
    make_engine,
    num_right,
    pass_at_k,
    pass_at_k_plugin,
    problem_scores,
    require,
    run_folder,
    write_args,
)

RESAMPLES = 10_000


def scores_at_every_k(groups, tokenizer) -> dict[str, list[float]]:
    """One number per problem of everything that is reported: problem_scores, and pass@k for k = 1,
    2, 4, ... and the number of samples."""
    scores, n = problem_scores(groups, tokenizer), len(groups[0].responses)
    right = [num_right(group) for group in groups]
    ks = sorted({*(2**i for i in range(n.bit_length())), n})
    table = {f"avg@{n}": scores["avg_at_k"], f"maj@{n}": scores["maj_at_k"]}
    table |= {f"pass@{k}": [pass_at_k(n, c, k) for c in right] for k in ks}
    table |= {f"plug-in pass@{k}": [pass_at_k_plugin(n, c, k) for c in right] for k in ks[1:]}
    table["response tokens"] = scores["response_tokens_mean"]
    return table | {"truncated share": scores["truncated_frac"]}


def with_intervals(suites: dict[str, dict], seed: int) -> dict[str, dict]:
    """Per suite, and where there are several of their macro average, name -> mean, low, high: 95 %
    of the means of problems drawn with replacement, within each suite."""
    means, resampled = {}, {}
    for i, (name, table) in enumerate(suites.items()):
        scores = np.array(list(table.values())).T  # [P, numbers]
        means[name] = scores.mean(0)
        resampled[name] = bootstrap_means(scores, [seed, i], RESAMPLES)
    if len(suites) > 1:
        means["macro average"] = np.mean(list(means.values()), 0)
        resampled["macro average"] = np.mean(list(resampled.values()), 0)
    rows, report = list(next(iter(suites.values()))), {}
    for name, mean in means.items():
        triples = zip(mean, *np.quantile(resampled[name], (0.025, 0.975), axis=0), strict=True)
        cells = [dict(zip(("mean", "low", "high"), map(float, t), strict=True)) for t in triples]
        report[name] = dict(zip(rows, cells, strict=True))
    return report


def table_lines(report: dict[str, dict]) -> list[str]:
    """The report as text, a column for each suite."""
    lines = [f"{'':<22}" + "".join(f"{name:>28}" for name in report)]
    for row in next(iter(report.values())):
        cells = [suite[row] for suite in report.values()]
        digits = 1 if row == "response tokens" else 3
        texts = ["{:.{d}f} [{:.{d}f}, {:.{d}f}]".format(*cell.values(), d=digits) for cell in cells]
        lines.append(f"{row:<22}" + "".join(f"{text:>28}" for text in texts))
    return lines


def eval_only(args, preset: str) -> None:
    """Evaluate args.model on args.eval_dataset. Print a table; write it, with the counts of every
    problem but not its text, to eval.json in a folder of its own."""
    require(args.eval_dataset != "", "--eval-only needs --eval-dataset")
    require(
        not args.resume,
        "--eval-only evaluates a model, and --resume continues a run: drop one of them "
        "(the final model of a run is runs/NAME/model)",
    )
    accelerator = make_accelerator(args)
    tokenizer = load_tokenizer(args.model)
    suites, reward = load_suites(args, tokenizer), load_reward(args.reward)
    engine = make_engine(args, None, tokenizer, accelerator)
    folder = run_folder(args, f"{Path(sys.argv[0]).stem}-{preset}-eval-seed{args.seed}")
    if accelerator.is_main_process:
        write_args(args, folder)
    tables, counts = {}, {}
    for name, problems in suites.items():
        groups = evaluate_suite(args, engine, problems, reward, tokenizer)  # collective
        tables[name] = scores_at_every_k(groups, tokenizer)
        counts[name] = {
            "problems": len(groups),
            "responses": sum(len(group.responses) for group in groups),
            "right": [num_right(group) for group in groups],  # of each problem
        }
    if accelerator.is_main_process:
        report = with_intervals(tables, args.seed)
        settings = f"{eval_settings(args)}; {type(engine).__name__}"
        settings += "" if args.chat_template else "; no chat template"
        sizes = [
            f"{n}: {c['problems']} problems, {c['responses']} responses" for n, c in counts.items()
        ]
        print(f"\n{args.model}\n{settings}\n{'; '.join(sizes)}\n")
        print("\n".join(table_lines(report)))
        note = f"95 % intervals by bootstrap over problems, {RESAMPLES:,} resamples"
        record = {"model": args.model, "settings": settings, "intervals": note}
        record |= {"numbers": report, "counts": counts}  # args.json beside it has every flag
        (folder / "eval.json").write_text(json.dumps(record, indent=1))
        print(f"\n{note}; also in {folder / 'eval.json'}")
    accelerator.wait_for_everyone()
