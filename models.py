"""models: the policy as a module that returns log-probabilities, never holding full logits, and the
critic as one that returns values."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TokenLogprobs(torch.autograd.Function):
    """log softmax((hidden @ weight^T + bias) / temperature) at the targets, chunk by chunk.

    Logits [chunk, V] exist for one chunk of positions at a time. The backward pass makes them anew,
    from the saved normalizer, and turns them in place into their own gradient,
    (1[v = target] - softmax_v) / temperature; the entropy gets none and is not made anew."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk):
        normalizer = torch.empty(len(hidden), device=hidden.device)
        logprobs, entropy = torch.empty_like(normalizer), torch.empty_like(normalizer)
        # One for all chunks: on a CPU a new one costs more than what is computed in it.
        buffer = torch.empty(min(chunk, len(hidden)), len(weight), device=hidden.device)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = F.linear(hidden[rows], weight, bias).float().div_(temperature)  # [chunk, V]
            largest = logits.amax(-1)
            exps = torch.exp(logits.sub_(largest[:, None]), out=buffer[: len(logits)])
            total = exps.sum(-1)
            log_total = total.log()
            normalizer[rows] = largest + log_total
            logprobs[rows] = logits.gather(-1, targets[rows, None]).squeeze(-1) - log_total
            entropy[rows] = log_total - exps.mul_(logits).sum(-1) / total
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, bias, targets, normalizer = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)  # a sum over many chunks
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        scale = (grad / ctx.temperature)[:, None]
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits = F.linear(hidden[rows], weight, bias).float().div_(ctx.temperature)
            signal = logits.sub_(normalizer[rows, None]).exp_().mul_(-scale[rows])  # -softmax
            signal = signal.scatter_add_(-1, targets[rows, None], scale[rows]).to(hidden.dtype)
            grad_hidden[rows] = signal @ weight
            if weight.dtype == torch.float32:
                grad_weight.addmm_(signal.t(), hidden[rows])
            else:
                grad_weight += signal.t() @ hidden[rows]
            if bias is not None:
                grad_bias += signal.sum(0)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None


def token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of targets [N] and entropies (nats, no gradient), two fp32 [N], where
    logits are (hidden @ weight^T + bias) / temperature; hidden [N, D], weight [V, D].

    Memory does not grow with N * V."""
    # Logits of one chunk: 256 MB on a GPU, 128 MB else.
    floats = 2**26 if hidden.is_cuda else 2**25
    chunk = max(1, floats // len(weight))
    weight = weight.to(hidden.dtype)
    bias = None if bias is None else bias.to(hidden.dtype)
    return TokenLogprobs.apply(hidden, weight, bias, targets, temperature, chunk)


class Policy(nn.Module):
    """A causal language model whose forward returns log-probabilities of responses: inside the
    module, so that FSDP's hooks run, and without ever materialising full logits."""

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm.eval()  # no dropout: old and new log-probabilities differ by weights alone
        self._no_split_modules = lm._no_split_modules  # the blocks that Accelerate shards

    def tie_weights(self, **kwargs):
        self.lm.tie_weights(**kwargs)

    def forward(
        self,
        ids: Tensor,
        prompt_lengths: Tensor,
        response_lengths: Tensor,
        width: int,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """logprobs and entropy (no grad), fp32 [b, width], 0 beyond each response.

        ids [b, S] hold each prompt followed directly by its response, right-padded, so that causal
        attention needs no mask. Token t of a response stands at prompt_length + t and is predicted
        from the position before it."""
        hidden = self.lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
        mask = torch.arange(width, device=ids.device) < response_lengths[:, None]  # [b, width]
        row, t = mask.nonzero(as_tuple=True)
        source = prompt_lengths[row] + t - 1
        head = self.lm.get_output_embeddings()
        flat = token_logprobs(
            hidden[row, source], head.weight, head.bias, ids[row, source + 1], temperature
        )
        empty = torch.zeros(mask.shape, device=ids.device)
        return empty.masked_scatter(mask, flat[0]), empty.masked_scatter(mask, flat[1])


class Critic(nn.Module):
    """A value model: transformers' token classifier with one label, whose forward returns the value
    of every state of a response."""

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm.eval()  # no dropout: values are a function of the weights alone
        self._no_split_modules = lm._no_split_modules

    def tie_weights(self, **kwargs):
        self.lm.tie_weights(**kwargs)

    def forward(
        self, ids: Tensor, prompt_lengths: Tensor, response_lengths: Tensor, width: int
    ) -> Tensor:
        """Values fp32 [b, width + 1] of the T + 1 states of each response, 0 beyond them.

        State t is the prompt and the response tokens before t: the one in which token t is chosen,
        read at the position before that token. State T follows the last token."""
        hidden = self.lm.base_model(input_ids=ids, use_cache=False).last_hidden_state  # [b, S, D]
        head = self.lm.score
        everywhere = F.linear(hidden.float(), head.weight.float(), head.bias.float()).squeeze(-1)
        t = torch.arange(width + 1, device=ids.device)
        position = (prompt_lengths[:, None] + t - 1).clamp(max=ids.shape[1] - 1)  # [b, width + 1]
        return torch.where(t <= response_lengths[:, None], everywhere.gather(1, position), 0.0)


def full_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of the weights of a policy or a critic, gathered one at a time: a
    collective under sharding. From state_dict, which holds tied weights under both of their names,
    as an engine needs them; named_parameters does not."""
    for name, tensor in module.lm.state_dict().items():
        if hasattr(tensor, "full_tensor"):
            tensor = (tensor.cuda() if torch.cuda.is_available() else tensor).full_tensor()
        yield name.replace("_checkpoint_wrapped_module.", ""), tensor.detach()
