"""Continuing prompts with a model, in one process or on the ranks of a tensor-parallel group.

Prompts of unequal length are padded on the left, so that the last position of every row is the one
that predicts. Padding is a document of its own (segment -1; the text is segment 0): padding sees
padding only, the text never sees it, and positions count from the text's first token.

Legend: ``B`` batch, ``S`` sequence, ``V`` words.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_engine.errors import ConfigError, DataError, DsEngineError, LaunchError
from ds_engine.inference.kv_cache import KVCache
from ds_engine.inference.sampling import GenerationSettings, choose, row_generators
from ds_engine.parallel.collectives import all_gather
from ds_engine.parallel.init import derive_seed
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.sequential import SequentialModel

__all__ = ["GenerationSettings", "OnToken", "generate", "left_padded"]

OnToken = Callable[[int, int], None]


def generate(
    model: SequentialModel,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    tp: TensorParallel,
    *,
    max_sequence_length: int | None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Continue each prompt; all ranks of the group must call, with the same arguments.

    The first pass reads the whole prompts, each later one a single token per row. A row that has
    met a stop word is frozen: its neighbours go on and its result does not change. The model is in
    evaluation mode meanwhile, and gets its modes back.

    Args:
        model: predicts (B, S, V) logits from tokens, positions, segments and sample numbers.
        prompts: word numbers, at least one a prompt.
        settings: see ``GenerationSettings``.
        tp: the handle that the model was built with.
        max_sequence_length: size of the model's learned position table; None for a model without
            one (rotary, ALiBi), which has no hard limit.
        on_token: called with (row, word) for each new word as soon as it is known, on every rank,
            in order of rows; not for stop words. It must not raise on some ranks only.

    Returns:
        The new words of each prompt, without the stop word; the same on all ranks.

    Raises:
        ConfigError: a prompt with its continuation is longer than the position table, a stop word
            is not in the vocabulary, or the model was built with sequence parallelism.
        DataError: an empty prompt, or a number that is not a word of the model.
        LaunchError: the ranks were given different arguments.
        NumericsError: the model predicts NaN or inf.
    """
    device = next(model.parameters()).device
    rows: list[list[int]] = []
    problem: DsEngineError | None = None
    try:
        rows = _checked(prompts, settings, tp, vocab_size(model), max_sequence_length)
    except DsEngineError as error:
        problem = error
    # Before raising: a rank that raises alone would leave its peers waiting.
    _check_agreement((rows, str(problem), settings), tp, device)
    if problem is not None:
        raise problem
    if not rows:
        return []
    batch, longest = len(rows), max(map(len, rows))
    # The last new word is never read again, so this is one position more than can be needed.
    cache = KVCache(batch, longest + settings.max_new_tokens)
    generators = row_generators(settings.seed, batch)
    results: list[list[int]] = [[] for _ in rows]
    running = set(range(batch))
    seen: Tensor | None = None
    with evaluation(model), torch.no_grad():
        inputs = left_padded(rows, device)
        for _ in range(settings.max_new_tokens):
            logits = model(inputs, None, cache)[:, -1].float()
            if settings.repetition_penalty != 1:
                seen = _seen(rows, logits) if seen is None else seen
            chosen = _agree(choose(logits, settings, generators, seen), tp)
            for row, token in enumerate(chosen.tolist()):
                if row not in running:
                    continue
                if token in settings.stop_ids:
                    running.discard(row)
                    continue
                results[row].append(token)
                if on_token is not None:
                    on_token(row, token)
            if not running:
                break
            if seen is not None:
                seen.scatter_(1, chosen[:, None], value=True)
            _, positions, segments, sample_ids = inputs
            inputs = (
                chosen[:, None],
                positions[:, -1:] + 1,
                torch.zeros_like(segments[:, -1:]),
                sample_ids,
            )
    return results


def left_padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, positions and segments (B, S) and sample numbers (B,) of a batch of prompts.

    Args:
        prompts: not empty, none of them empty; S is the longest.
        device: of the tensors.
    """
    batch, longest = len(prompts), max(map(len, prompts))
    tokens = torch.zeros(batch, longest, dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
    padding = torch.tensor([longest - len(prompt) for prompt in prompts])
    positions = torch.arange(longest) - padding[:, None]
    segments = torch.where(positions < 0, -1, 0)
    parts = (tokens, positions.clamp(min=0), segments, torch.arange(batch))
    tokens, positions, segments, sample_ids = (part.to(device) for part in parts)
    return tokens, positions, segments, sample_ids


def vocab_size(model: nn.Module) -> int | None:
    """Number of real words, without padding, from the model's own description of its tables.

    None: no parameter of the model has a vocabulary dimension.
    """
    specs = (getattr(parameter, "spec", None) for parameter in model.parameters())
    return next((spec.valid for spec in specs if spec is not None and spec.valid), None)


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, and give each module its own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _checked(
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    tp: TensorParallel,
    words: int | None,
    max_sequence_length: int | None,
) -> list[list[int]]:
    """The prompts as plain lists, or the reason why they cannot be continued."""
    if tp.scatters_sequence:
        raise ConfigError(
            "parallel.sequence = true cannot generate: a single new token cannot be cut into "
            f"{tp.size} parts; build the model with tensor_parallel(sequence_parallel=False), "
            "whose weights are the same"
        )
    rows = [_words(number, prompt, words) for number, prompt in enumerate(prompts)]
    for token in settings.stop_ids:
        if words is not None and token >= words:
            raise ConfigError(
                f"generation.stop_ids holds {token}, which the model can never predict: its "
                f"model.vocab_size = {words}; use numbers below that"
            )
    for number, row in enumerate(rows):
        needed = len(row) + settings.max_new_tokens
        if max_sequence_length is not None and needed > max_sequence_length:
            left = max_sequence_length - len(row)
            lower = f"lower generation.max_new_tokens to at most {left}, or " if left > 0 else ""
            raise ConfigError(
                f"prompt {number} has {len(row)} tokens; with generation.max_new_tokens = "
                f"{settings.max_new_tokens} that is {needed}, more than model.max_sequence_length "
                f"= {max_sequence_length}, the size of the learned position table; {lower}"
                "shorten the prompt"
            )
    return rows


def _words(number: int, prompt: Sequence[int], words: int | None) -> list[int]:
    if isinstance(prompt, str):
        raise DataError(f"prompt {number} is text; turn it into token numbers with the tokenizer")
    if len(prompt) == 0:
        raise DataError(
            f"prompt {number} is empty, and a model can only continue something; give it at least "
            "one token, for example the tokenizer's end-of-text token"
        )
    try:
        row = [operator.index(token) for token in prompt]
    except TypeError as error:
        raise DataError(f"prompt {number} must hold whole numbers: {error}") from error
    for place, token in enumerate(row):
        if token < 0 or (words is not None and token >= words):
            limit = "" if words is None else f" and below model.vocab_size = {words}"
            raise DataError(
                f"token {place} of prompt {number} is {token}, but words are numbered from 0"
                f"{limit}; encode the prompt with the tokenizer that the model was trained with"
            )
    return row


def _seen(rows: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
    """(B, V) bool: the words of each prompt, padding not counted."""
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    for row, prompt in zip(seen, rows, strict=True):
        row[torch.tensor(prompt)] = True
    return seen.to(logits.device)


def _agree(chosen: Tensor, tp: TensorParallel) -> Tensor:
    """The words that tensor-parallel rank 0 chose.

    All ranks hold the same gathered logits, but each runs its own kernels on them, and sums inside
    the model may be rounded otherwise on another rank. One different word would let the caches
    drift apart without an error, or let one rank stop while the others wait for it for ever; B
    integers a step make both impossible.
    """
    if tp.active:
        chosen = chosen.contiguous()
        dist.broadcast(chosen, group=tp.group, group_src=0)
    return chosen


def _check_agreement(arguments: object, tp: TensorParallel, device: torch.device) -> None:
    if not tp.active:
        return
    digest = torch.tensor([derive_seed(repr(arguments))], device=device)
    digests = all_gather(digest, tp, 0)
    if bool((digests != digests[0]).any()):
        raise LaunchError(
            "the ranks of a tensor-parallel group were asked to continue different prompts, or "
            "with different settings; give all of them the same, for example with "
            "torch.distributed.broadcast_object_list"
        )
