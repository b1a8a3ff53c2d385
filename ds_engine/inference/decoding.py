"""Choosing words one after the other, whatever the model reads: the loop that all generation runs.

A ``Reader`` hides how a model gets its inputs (a prompt on the left, or a source for an encoder),
so that sampling and beam search are written once.

Legend: ``R`` rows of the running batch, ``V`` words.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_engine.errors import ConfigError, DataError, DsEngineError, LaunchError
from ds_engine.inference.sampling import GenerationSettings, choose, row_generators
from ds_engine.parallel.collectives import all_gather
from ds_engine.parallel.init import derive_seed
from ds_engine.parallel.tensor_parallel import TensorParallel

OnToken = Callable[[int, int], None]
Checked = TypeVar("Checked")


class Reader(Protocol):
    """A model with the inputs and the cache of one batch."""

    @property
    def written(self) -> Sequence[Sequence[int]]:
        """For each row the words before the first new one, which a repetition penalty counts."""
        ...

    def read(self, tokens: Tensor | None) -> Tensor:
        """Read on; return the logits (R, V) of the words that follow.

        Args:
            tokens: (R,) the rows' new words; None in the first call, which reads what is given.
        """
        ...

    def reorder(self, rows: Tensor) -> None:
        """Let row i continue what row ``rows[i]`` was; ``rows`` (R',) may make the batch larger."""
        ...


@torch.no_grad()
def decode(
    reader: Reader,
    settings: GenerationSettings,
    tp: TensorParallel,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Choose or draw each row's words until all rows have met a stop word or are long enough.

    A row that has met a stop word is frozen: its neighbours go on and its result does not change.

    Returns:
        The new words of each row, without the stop word; the same on all ranks.
    """
    batch = len(reader.written)
    generators = row_generators(settings.seed, batch)
    results: list[list[int]] = [[] for _ in range(batch)]
    running = set(range(batch))
    seen: Tensor | None = None
    chosen: Tensor | None = None
    for _ in range(settings.max_new_tokens):
        logits = reader.read(chosen)
        if settings.repetition_penalty != 1:
            seen = seen_words(reader.written, logits) if seen is None else seen
        chosen = agree(choose(logits, settings, generators, seen), tp)
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
    return results


def agree(chosen: Tensor, tp: TensorParallel) -> Tensor:
    """What tensor-parallel rank 0 chose.

    All ranks hold the same gathered logits, but each runs its own kernels on them, and sums inside
    the model may be rounded otherwise on another rank. One different word would let the caches
    drift apart without an error, or let one rank stop while the others wait for it for ever; a few
    numbers a step make both impossible.
    """
    if tp.active:
        chosen = chosen.contiguous()
        dist.broadcast(chosen, group=tp.group, group_src=0)
    return chosen


def seen_words(written: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
    """(R, V) bool: the words that each row holds."""
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    for row, words in zip(seen, written, strict=True):
        row[torch.tensor(words)] = True
    return seen.to(logits.device)


def check_together(
    check: Callable[[], Checked], arguments: object, tp: TensorParallel, device: torch.device
) -> Checked:
    """Run a check of arguments on all ranks of the group: all go on, or all raise.

    Args:
        check: returns the checked rows or raises a ``DsEngineError``.
        arguments: what else all ranks must have been given alike.
        tp: the group.
        device: where the model is.

    Raises:
        LaunchError: the ranks were given different arguments.
        DsEngineError: what ``check`` raises.
    """
    rows: Checked | None = None
    problem: DsEngineError | None = None
    try:
        rows = check()
    except DsEngineError as error:
        problem = error
    # Before raising: a rank that raises alone would leave its peers waiting.
    if tp.active:
        digest = torch.tensor([derive_seed(repr((rows, str(problem), arguments)))], device=device)
        digests = all_gather(digest, tp, 0)
        if bool((digests != digests[0]).any()):
            raise LaunchError(
                "the ranks of a tensor-parallel group were asked to continue different prompts, or "
                "with different settings; give all of them the same, for example with "
                "torch.distributed.broadcast_object_list"
            )
    if problem is not None:
        raise problem
    assert rows is not None
    return rows


def check_model(settings: GenerationSettings, tp: TensorParallel, words: int | None) -> None:
    """Refuse what no prompt can make right.

    Raises:
        ConfigError: sequence parallelism, or a stop word that is no word of the model.
    """
    if tp.scatters_sequence:
        raise ConfigError(
            "parallel.sequence = true cannot generate: a single new token cannot be cut into "
            f"{tp.size} parts; build the model with tensor_parallel(sequence_parallel=False), "
            "whose weights are the same"
        )
    for token in settings.stop_ids:
        if words is not None and token >= words:
            raise ConfigError(
                f"generation.stop_ids holds {token}, which the model can never predict: its "
                f"model.vocab_size = {words}; use numbers below that"
            )


def check_words(number: int, prompt: Sequence[int], words: int | None) -> list[int]:
    """A prompt as a plain list.

    Args:
        number: of the prompt, for messages.
        prompt: token numbers, at least one.
        words: of the model; None: unknown.

    Raises:
        DataError: it is empty, or a number is not a word of the model.
    """
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


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters lie."""
    return next(model.parameters()).device
