"""Run under torchrun by test_ranks.py: a script on its real path, watched; or an engine alone.

torchrun --nproc_per_node 2 tests/rank_probe.py script fipo.py FOLDER REPLAY tiny --flag ...
torchrun --nproc_per_node 2 tests/rank_probe.py engine MODEL KIND TENSOR_PARALLEL
"""

import importlib
import math
import sys
from dataclasses import replace
from pathlib import Path

import test_engines
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

import common
from engines import Sampling, row_seed
from models import Policy, full_weights

UNEQUAL = "time/", "memory/", "seconds"  # what ranks measure for themselves


def watch_script(name: str, folder: str, replay: str, *flags: str) -> None:
    """The script as its user runs it. FOLDER/rank-<r>.pt then holds what this rank has logged, the
    groups that it sampled, and of every update its part of the loss and the whole gradient before
    clipping. With REPLAY, such a file of another run, responses are taken from there."""
    saved = torch.load(replay, weights_only=False)["groups"] if replay else None
    seen = {"metrics": [], "groups": {}, "updates": []}
    sample, log = common.sample, common.Run.log
    backward, clip = Accelerator.backward, Accelerator.clip_grad_norm_
    losses = []

    def watched_sample(engine, drawn, n, sampling, *seeds):
        if saved is None:
            groups = sample(engine, drawn, n, sampling, *seeds)
        else:
            groups = [saved[(seeds, number)] for number, _ in engine.share(drawn)]
        seen["groups"] |= {(seeds, group.number): group for group in groups}
        return groups

    def watched_log(self, step, metrics, *rest):
        kept = {k: v for k, v in metrics.items() if not k.startswith(UNEQUAL)}
        seen["metrics"].append({"step": step, **kept})
        log(self, step, metrics, *rest)

    def watched_backward(self, loss):
        losses.append(float(loss.detach().double()) / self.num_processes)
        backward(self, loss)

    def watched_clip(self, parameters, limit):
        parameters = list(parameters)
        if self.num_processes > 1:
            assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in parameters)
            held = sum(p.to_local().numel() for p in parameters)
            assert held < 0.6 * sum(p.numel() for p in parameters), held
        wholes = (p.grad.full_tensor() if isinstance(p, DTensor) else p.grad for p in parameters)
        gradient = torch.cat([whole.flatten().double() for whole in wholes])
        seen["updates"].append({"loss": math.fsum(losses), "gradient": gradient})
        losses.clear()
        return clip(self, parameters, limit)

    common.sample, common.Run.log = watched_sample, watched_log
    Accelerator.backward, Accelerator.clip_grad_norm_ = watched_backward, watched_clip
    script = importlib.import_module(Path(name).stem)
    sys.argv = [str(Path(script.__file__)), *flags]
    common.launch(script.main, script.Args, script.PRESETS, script.__doc__)
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.save(seen, Path(folder) / f"rank-{rank}.pt")


def check_engine(model: str, kind: str, tensor_parallel: str) -> None:
    """Train a sharded policy for three updates. After every sync the engine's greedy tokens are
    those of a whole copy decoded by transformers without a cache, and the sharded forward gives
    the copy's log-probabilities."""
    args = replace(test_engines.CPU, rollout_engine=kind, model=model, learning_rate=3e-2)
    args = replace(args, tensor_parallel=int(tensor_parallel))
    accelerator = common.make_accelerator(args)
    tokenizer = common.load_tokenizer(model)
    policy, optimizer = common.load_policy(args, accelerator)
    assert all(isinstance(p, DTensor) for p in policy.parameters())
    engine = common.make_engine(args, policy, tokenizer, accelerator)
    copy = Policy(common.load_lm(args))
    ids = test_engines.prompts(tokenizer, 4, words=140)  # longer than a block of the prefix cache
    assert min(map(len, ids)) > 128
    lengths = torch.tensor([16] * 4)
    rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in ids], batch_first=True)
    inputs = rows, torch.tensor([len(p) for p in ids]) - lengths, lengths, 16, 1.0
    seen = []
    for update in range(3):
        with torch.no_grad():  # before a sync, which lets go of all that is gathered
            logprobs = policy(*inputs)[0]
        common.reshard(policy)
        engine.sync_weights(policy)
        copy.lm.load_state_dict(dict(full_weights(policy)))
        with torch.no_grad():
            torch.testing.assert_close(logprobs, copy(*inputs)[0], atol=1e-4, rtol=0)
        answers = engine.generate(ids, 1, Sampling(12, temperature=0.0), [[0]] * 4)
        got = [responses[0].token_ids.tolist() for responses in answers]
        stop = tokenizer.eos_token_id
        assert got == [test_engines.greedy_by_hand(copy, p, 12, stop) for p in ids]
        seen.append(got)
        seeds = [[row_seed(5, i, g) for g in range(4)] for i in range(4)]
        torch.manual_seed(accelerator.process_index)  # ranks agree by the rows' seeds alone
        answers = engine.generate(ids, 4, Sampling(12, temperature=2.0), seeds)
        sampled = [r.token_ids.tolist() for responses in answers for r in responses]
        everyones = [None] * accelerator.num_processes
        dist.all_gather_object(everyones, sampled)
        assert everyones == [sampled] * accelerator.num_processes  # the same seeds on every rank
        wanted = rows.clone()  # towards another token each time
        wanted[:, -40:] = 10 * (update + 1)
        accelerator.backward(-policy(wanted, *inputs[1:])[0].mean())
        with torch.no_grad():
            policy(*inputs)  # leaves the root gathered, where nothing lets go of it
        common.reshard(policy)
        optimizer.step()
        optimizer.zero_grad()
    assert seen[0] != seen[1] != seen[2], seen
    # One string: torchrun's ranks share an unbuffered stdout, where print's parts can interleave.
    print(f"checked {kind} {tensor_parallel}", flush=True)


if __name__ == "__main__":
    command = {"script": watch_script, "engine": check_engine}[sys.argv[1]]
    command(*sys.argv[2:])
